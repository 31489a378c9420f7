"""The checks of a training step: a function for each, of its name, in the file of its subject.

Each gets the step, the settings, and what makes a finding of its check, and yields what that
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pytest_modelhealth.checks import facts
from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.report import Finding, Observation
from pytest_modelhealth.settings import Settings, Severity

Broken = Callable[..., Finding]


def broken(check: Listed, what: str, cause: str, about: Sequence[Any] = (), **more: Any) -> Finding:
    """Return a finding of the whole step, or of layers: the first, which affects the others.

    Args:
        check: the check that it is of.
        what: what is wrong, one sentence that stands alone.
        cause: the likely cause, one sentence.
        about: the parameters, modes or names of layers that it is about; none is the step.
        more: what else `Check.violation` takes; what only warns is not independent.
    """
    first, *others = dict.fromkeys(getattr(one, "layer", one) for one in about or [""])
    fields = {"value": float(len(about)), "independent": more.get("severity") != "warn"}
    fields |= {"tensor": next((getattr(one, "own", "") for one in about), "")}
    return check.violation(first, what, cause=cause, affected=others, **{**fields, **more})


def listed(some: Sequence[Any], most: int = 4) -> str:
    """Return names, or what has one, as a phrase: the first few, and how many more there are."""
    names = [one if isinstance(one, str) else getattr(one, "name", one.layer) for one in some]
    return facts.listed(names, most)


Table = Mapping[str, tuple[str, str, Severity]]
"""By a trait: what is wrong, with braces for the names, the likely cause, and the grade."""


def marked(some: Sequence[Any], table: Table, broken: Broken, **more: Any) -> Iterator[Finding]:
    """Yield what is wrong with parameters or layers by their traits."""
    for trait, (what, cause, grade) in table.items():
        if about := [one for one in some if trait in one.traits]:
            text = what.format(listed(about), n=len(about))
            yield broken(text, cause, about, severity=grade, **more)


from pytest_modelhealth.training.contract import (  # noqa: E402 - they take the names above
    calls,
    gradients,
    parameters,
)

_SUBJECTS = {**vars(calls), **vars(gradients), **vars(parameters)}


def findings(check: Listed, observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what the step breaks, if one was run, in the layers that were seen or the model."""
    assert observation.stepped is not None  # by the catalogue
    for one in _SUBJECTS[check.name](observation.stepped, settings, partial(broken, check)):
        yield replace(one, layer=facts.place(observation, one.layer).name)
