"""How what a training step does wrong is written down: a function a check, of its name.

It takes what the step did, the settings, and `broken` of its check, and yields what that returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.report import Finding

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
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
