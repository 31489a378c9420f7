"""Takes down where the class of a layer may be found; no file is read for it."""

from __future__ import annotations

import sys
from types import FunctionType

from torch import nn

from pytest_modelhealth.report import Definition


def definitions(kind: type) -> tuple[Definition, ...]:
    """Return where the ``class`` statement of `kind` may stand, the likeliest first.

    A class whose functions do not say that they were written in it may have been made by a call,
    as torch makes those of parametrized and sharded modules; the classes that it derives from
    follow, up to one that was certainly written.
    """
    found = []
    for base in kind.__mro__:
        if base is nn.Module or not issubclass(base, nn.Module):
            break
        found.append(_definition(base))
        if found[-1].line:
            break
    return tuple(found)


def _definition(kind: type) -> Definition:
    for value in vars(kind).values():
        # not a wrapper around it, nor what a decorator or a compiler made
        if type(value) is FunctionType:
            code = value.__code__
            if code.co_qualname.rpartition(".")[0] == kind.__qualname__:
                line = code.co_firstlineno
                return Definition(kind.__module__, kind.__qualname__, code.co_filename, line)
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return Definition(kind.__module__, kind.__qualname__, path or "", 0)
