"""The checks of a training step: tables of what may be wrong, a file a subject."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.report import Finding, Observation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.contract import (  # noqa: F401 - each adds its rows
    calls,
    gradients,
    parameters,
)
from pytest_modelhealth.training.contract.fault import SOURCES


def findings(check: Listed, observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what the step breaks, if one was run, in the layers that were seen or the model."""
    assert observation.stepped is not None  # by the catalogue
    for source, is_last in SOURCES[check.name]:
        found = list(source(check, observation.stepped, settings))
        for one in found:
            yield replace(one, layer=place(observation, one.layer).name)
        if found and is_last:
            return
