"""The shelf of what a training step is made of: one kind a file, found by itself.

None of the libraries is imported before an object of theirs is given.
"""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import AbstractContextManager
from functools import cache

from pytest_modelhealth.training.stepping.givers.giver import Given, Giver
from pytest_modelhealth.training.stepping.session import TrainingStep

__all__ = ["Given", "Giver", "step_of"]


def step_of(given: Given) -> AbstractContextManager[TrainingStep]:
    """Return a context of the step that is made of what was given; in the end nothing is left.

    Raises:
        InspectionError: no step can be made of it; the message says why.
    """
    return next(giver.made(given) for giver in _givers() if giver.recognises(given))


@cache
def _givers() -> tuple[Giver, ...]:
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    kinds = {value for module in modules for value in vars(module).values() if _is_giver(value)}
    return tuple(sorted((kind() for kind in kinds), key=lambda giver: -giver.precedence))


def _is_giver(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Giver) and value is not Giver
