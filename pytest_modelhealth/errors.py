"""Every exception this package raises on purpose.

::

    AssertionError
    └── ModelHealthError       the verdict on a model: unhealthy, drifted or not equivalent
    RuntimeError
    └── InspectionError        the model could not be inspected as asked
        ├── LayerNotFoundError a layer name or pattern matches nothing
        └── UnknownNameError   an object of ours has no such attribute; also an AttributeError
    ValueError
    └── SettingsError          a setting has an unknown name, a wrong type or an impossible value

A message says what was wrong, where, what was expected, and the next move. An exception that the
user's model raises is never wrapped: it passes through as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class ModelHealthError(AssertionError):
    """A verdict: the first line names it and the worst layer, the rest is the evidence.

    Args:
        report: the `HealthReport` judged, under the thresholds that failed it; ``None`` where the
            verdict is not on one report.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class InspectionError(RuntimeError):
    """The model could not be inspected as asked; the model is as it was."""


class LayerNotFoundError(InspectionError):
    """No layer has this name, or none matches this pattern."""


class UnknownNameError(InspectionError, AttributeError):
    """An object of this package has no attribute of this name."""


class SettingsError(ValueError):
    """A setting has an unknown name, a wrong type or an impossible value."""


class ModelHealthWarning(UserWarning):
    """Something that fails no test but should not pass unseen, such as a waiver without effect."""


# Test reports print the qualified name before the message; the public path is the short one.
for _exception in (
    ModelHealthError,
    InspectionError,
    LayerNotFoundError,
    UnknownNameError,
    SettingsError,
    ModelHealthWarning,
):
    _exception.__module__ = "pytest_modelhealth"


def require_kind(other: object, kind: type) -> None:
    """Do nothing if `other`, which is to be merged, is of this `kind`.

    Raises:
        InspectionError: it is not.
    """
    if not isinstance(other, kind):
        raise InspectionError(
            f"merge() takes another {kind.__name__}, of another batch or run, not {other!r} "
            f"({type(other).__name__})"
        )


def public_names(kind: type) -> list[str]:
    """Return the names of what users call and read of a `kind`."""
    return [name for name in dir(kind) if not name.startswith("_")]


def suggest(wrong: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name nearest to `wrong`, or ``"."``.

    Near is what two typing mistakes in ten letters leave, or, where nothing is, what contains
    `wrong` whole: ``grad`` of ``grad_norm``.
    """
    word, names = str(wrong), list(known)
    nearest = difflib.get_close_matches(word, names, n=1, cutoff=0.65)
    if not nearest and len(word) > 2:
        nearest = [name for name in names if word in name][:3]
    return f"; did you mean {' or '.join(map(repr, nearest))}?" if nearest else "."


def suggest_layer(wrong: object, layers: Iterable[str]) -> str:
    """Return what `suggest` does, or else which layers there are, the outermost of them."""
    names = sorted(filter(None, layers), key=lambda name: name.count("."))
    nearest = suggest(wrong, names)
    if nearest != ".":
        return nearest
    if not names:
        return "; it has no layers inside: '*' matches the model itself."
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f". Its layers are {', '.join(map(repr, names[:3]))}{more}."
