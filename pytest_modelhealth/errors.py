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
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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


def in_one_line(error: Exception) -> str:
    """Return an exception by its type and the first line of its text."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


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


class NamesItsAttributes:
    """Has an attribute that an object lacks raise an error which names the nearest it has."""

    if not TYPE_CHECKING:  # a type checker knows the names by itself

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)  # what copy, pickle and others ask for
            raise UnknownNameError(self._without(name))

    def _without(self, name: str) -> str:
        """Return what to say of a public name that the object does not have."""
        names = list(dict.fromkeys((*public_names(type(self)), *vars(self))))
        names = [known for known in names if not known.startswith("_")]
        kind = type(self).__name__
        return f"{kind} has no {name!r}{suggest(name, names)} It has {', '.join(names)}."


def checked_call(
    settings: Callable[[], Iterable[str]] = tuple, *, switches: bool = True
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Have wrong arguments of a public call raise an `InspectionError` with the right call.

    Args:
        settings: returns the names of the settings, which `Inspector` takes.
        switches: whether what is declared as ``bool`` or ``bool | None`` may be nothing else.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        signature = _CALLS[name] = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                text = _wrong_call(name, str(error), kwargs, settings())
                raise InspectionError(text) from None
            for key, value in arguments.items() if switches else ():
                types, expected = _SWITCHES.get(signature.parameters[key].annotation, (object, ""))
                if not isinstance(value, types):
                    raise InspectionError(f"{key} must be {expected}, not {value!r}")
            return function(*args, **kwargs)

        return call

    return decorate


_CALLS: dict[str, inspect.Signature] = {}
"""The public calls whose arguments are checked, by name."""
_SWITCHES: dict[str, tuple[Any, str]] = {
    "bool": (bool, "True or False"),
    "bool | None": (bool | None, "True, False or None"),
}
_BY_POSITION = inspect.Parameter.POSITIONAL_OR_KEYWORD
_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def taking(argument: str) -> str:
    """Return ``"; run_step takes it: run_step(step, optimizer, batch)"``, or ``""`` for no call."""
    if argument in _CALLS:
        return f"; it is a call of its own: inspector(model).{argument}(...)"
    # run_inspection before the others, in whatever order their modules were imported
    calls = [name for name in ("run_inspection", *_CALLS) if argument in _names(name)]
    return f"; {calls[0]} takes it: {_usage(calls[0], argument)}" if calls else ""


def _wrong_call(name: str, problem: str, given: Iterable[str], settings: Iterable[str]) -> str:
    """Return what to write instead of a call to which Python objects by `problem`."""
    arguments = ", ".join(_names(name))
    if "too many positional" in problem:
        return (
            f"{name} takes no more by position: {_usage(name, 'loss')}; its arguments: {arguments}"
        )
    if "unexpected keyword" not in problem:
        return f"{name}: {problem}: {_usage(name)}"
    wrong = next(key for key in given if key not in _CALLS[name].parameters)
    near = [wrong] if wrong in settings else difflib.get_close_matches(wrong, settings, 1, 0.8)
    own = suggest(wrong, _names(name))
    if near and own == ".":
        is_one = "it is a setting" if near == [wrong] else f"did you mean the setting {near[0]!r}"
        where = f"; {is_one}: Inspector(model, {near[0]}=...)"
    else:
        where = taking(wrong) or f"{own} Its arguments: {arguments}"
    return f"{name} has no argument {wrong!r}{where}"


def _usage(name: str, argument: str = "") -> str:
    """Return a call by what goes in by position, and one argument by its name."""
    by_name = [f"{argument}=..."] if argument in _names(name, _BY_NAME) else []
    return f"{name}({', '.join(_names(name, _BY_POSITION) + by_name)})"


def _names(name: str, *kinds: object) -> list[str]:
    """Return the arguments of a call, those of some kinds or all that can be named."""
    listed = _CALLS[name].parameters.values() if name in _CALLS else ()
    return [
        one.name
        for one in listed
        if one.kind in (kinds or (_BY_POSITION, _BY_NAME)) and one.name != "self"
    ]
