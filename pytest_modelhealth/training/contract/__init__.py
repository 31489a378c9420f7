"""The checks of a training step: a function for each, of its name, in the file of its subject."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.report import Finding, Observation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.contract import calls, gradients, parameters
from pytest_modelhealth.training.contract.fault import broken

_SUBJECTS = {**vars(calls), **vars(gradients), **vars(parameters)}


def findings(check: Listed, observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what the step breaks, if one was run, in the layers that were seen or the model."""
    assert observation.stepped is not None  # by the catalogue
    for one in _SUBJECTS[check.name](observation.stepped, settings, partial(broken, check)):
        yield replace(one, layer=place(observation, one.layer).name)
