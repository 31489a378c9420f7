"""`Setting`: one value that a user may set; `Waiver`: a violation that a project accepts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from pytest_modelhealth.errors import SettingsError, suggest


def is_inside(layer: str, container: str) -> bool:
    """Whether a layer lies in another; every other lies in the model, ``""``."""
    return layer != container and (not container or layer.startswith(f"{container}."))


def parent(layer: str) -> str:
    """Return the layer that one lies in next, ``""`` for the model and what lies right in it."""
    return layer.rpartition(".")[0]


def dotted(layer: str, own_name: str) -> str:
    """Return the full name of a tensor or layer in a layer, which may be the model, ``""``."""
    return f"{layer}.{own_name}" if layer and own_name else layer or own_name


def ancestors(layer: str) -> Iterator[str]:
    """Yield the layers that one lies in, the innermost first and the model, ``""``, last."""
    while layer:
        layer = parent(layer)
        yield layer


SettingValue = float | int | bool | str | tuple[Any, ...] | None
_TYPES = (float, int, bool, str, list, dict)


class Limit(NamedTuple):
    """A setting's value in force and where it came from, for example ``"default"``."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting.

    Args:
        name: its name everywhere, in snake case.
        type: ``float``, ``int``, ``bool`` or ``str``; a float takes an int too. The settings in
            `choices` are a ``list`` or a ``dict``.
        default: its value when nobody sets it; ``None`` means "no limit".
        help: one sentence for the listing and the reference.
        minimum: the least value allowed, inclusive.
        maximum: the greatest value allowed, inclusive.
        one_of: the only values allowed, for a ``str``; empty allows all. For the settings
            in `choices` that name checks, the names there are.
        per_layer: whether its value may differ from layer to layer: its check asks for it with
            `Settings.limit`, by layer.

    Raises:
        SettingsError: an argument is of a wrong type.
    """

    name: str
    type: type
    default: SettingValue
    help: str
    minimum: float | None = None
    maximum: float | None = None
    one_of: tuple[str, ...] = ()
    per_layer: bool = True

    def __post_init__(self) -> None:
        name: object = self.name
        kind: object = self.type
        bounds: tuple[object, ...] = (self.minimum, self.maximum)
        if not isinstance(name, str):
            raise SettingsError(f"the name of a setting must be a string, not {name!r}")
        if kind not in _TYPES:
            raise SettingsError(
                f"the type of {name} must be the class float, int, bool or str, not {kind!r}"
            )
        if not all(isinstance(bound, float | int | None) for bound in bounds):
            raise SettingsError(
                f"minimum and maximum of {name} must be numbers or None, not {bounds!r}"
            )

    def validate(self, value: object, origin: str) -> SettingValue:
        """Return `value` as this setting's type.

        Raises:
            SettingsError: wrong type, not a number, out of range, or not one of those allowed.
                `origin` says where it stood.
        """
        if value is None and self.default is None:
            return None
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        is_right = isinstance(value, self.type) and isinstance(value, bool) == (self.type is bool)
        text = f"{origin}: {self.name} must be {self._expected()}, not {value!r}"
        if not (is_number if self.type is float else is_right):
            raise SettingsError(f"{text} ({type(value).__name__})")
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        if is_number and not low <= value <= high:  # type: ignore[operator]  # NaN fails this too
            raise SettingsError(text)
        if self.one_of and value not in self.one_of:
            raise SettingsError(f"{text}{suggest(str(value), self.one_of)}")
        return self.type(value)  # type: ignore[no-any-return]

    def over(self, below: Limit, value: SettingValue, origin: str) -> Limit:
        """Return what is in force when a valid `value` is laid over what stood `below`.

        Rules by pattern (a ``dict``) add up; of those that match the last one wins.
        """
        rules: Any = value
        return Limit((*below.value, *rules) if self.type is dict else value, origin)

    def parse(self, text: str, origin: str) -> SettingValue:
        """Return the value that `text` spells, as an ini file or a command line does.

        Raises:
            SettingsError: `text` does not spell a value of this setting's type.
        """
        text = text.strip()
        if self.default is None and text.lower() == "none":
            return None
        try:
            value = _BOOLEANS[text.lower()] if self.type is bool else self.type(text)
        except (ValueError, KeyError):
            raise SettingsError(
                f"{origin}: {self.name} must be {self._expected()}, not {text!r}"
            ) from None
        return self.validate(value, origin)

    @property
    def takes_lines(self) -> bool:
        """Whether an ini file and the command line may give several values, a line each."""
        return self.type in (list, dict)

    def show(self, value: Any) -> str:
        """Return `value` as an ini file or a command line spells it."""
        spelled = {None: "none", True: "true", False: "false"}
        if value is None or isinstance(value, bool):
            return spelled[value]
        return f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def shown_default(self) -> str:
        """The default as an ini file or a command line spells it."""
        return self.show(self.default)

    def _expected(self) -> str:
        if self.one_of:
            return f"one of {', '.join(self.one_of)}" + (" or none" if self.default is None else "")
        kind = {float: "a number", int: "a whole number", bool: "true or false", str: "a string"}
        words = kind[self.type]
        if self.minimum is not None and self.maximum is not None:
            words += f" from {self.minimum:g} to {self.maximum:g}"
        elif self.minimum is not None:
            words += f" of at least {self.minimum:g}"
        elif self.maximum is not None:
            words += f" of at most {self.maximum:g}"
        return words + (" or none" if self.default is None else "")


_BOOLEANS = {"true": True, "yes": True, "1": True, "on": True}
_BOOLEANS |= {"false": False, "no": False, "0": False, "off": False}

# What most checks declare, by the numbers that a setting may have.
Ratio = partial(Setting, type=float, minimum=0.0)
Share = partial(Setting, type=float, minimum=0.0, maximum=1.0)
Factor = partial(Setting, type=float, minimum=1.0)
Count = partial(Setting, type=int, minimum=1)
# The same for the whole model.
ModelRatio = partial(Ratio, per_layer=False)
ModelShare = partial(Share, per_layer=False)
ModelFactor = partial(Factor, per_layer=False)
ModelCount = partial(Count, per_layer=False)


WAIVE = Setting(
    "waive",
    list,
    default=None,
    help="violations to accept in every test, as 'LAYERS [CHECK]: REASON'; LAYERS and CHECK are "
    "names or shell wildcards; for the ini file and the command line",
)


@dataclass(frozen=True)
class Waiver:
    """A violation that a project accepts, and why.

    Args:
        layers: a layer name or a shell wildcard.
        check: the name of the check waived, or a shell wildcard; ``None`` waives all checks on
            these layers.
        reason: why it is accepted; never empty.
        origin: where the waiver stands.
        shared: whether it holds for every model of a test run, and so need not match in each.

    Raises:
        SettingsError: the layers are no string, the check is none, or the reason is missing.
    """

    layers: str
    check: str | None
    reason: str
    origin: str
    shared: bool = False

    def __post_init__(self) -> None:
        layers: object = self.layers
        check: object = self.check
        reason: object = self.reason
        if not isinstance(layers, str):
            raise SettingsError(
                f"{self.origin}: name the layers as strings first, such as 'encoder.*', not "
                f"{layers!r}; '*' is all of them"
            )
        if not isinstance(reason, str) or not reason.strip():
            raise SettingsError(
                f"{self.origin}: reason='...' is missing; say why the violation is accepted, as in "
                f"({self}, reason='sparse vocabulary')"
            )
        if not isinstance(check, str | None):
            raise SettingsError(
                f"{self.origin}: check must be the name of one check, not {check!r}"
            )

    def covers(self, check: str, layer: str) -> bool:
        """Whether it accepts what `check` finds in `layer`."""
        return self.concerns(check) and fnmatchcase(layer, self.layers)

    def concerns(self, check: str) -> bool:
        """Whether it is meant for `check`."""
        return self.check is None or fnmatchcase(check, self.check)

    def __str__(self) -> str:
        return repr(self.layers) + (f", check={self.check!r}" if self.check else "")


def parse_waivers(text: str, origin: str) -> tuple[Waiver, ...]:
    """Return the waivers that `text` spells, one a line: ``LAYERS [CHECK]: REASON``.

    Raises:
        SettingsError: a line has no layers, more than one check, or no reason.
    """
    waivers = []
    for line in map(str.strip, text.splitlines()):
        what, _, reason = line.partition(":")
        layers, *check = what.split() or [""]
        if line and (not layers or len(check) > 1 or not reason):
            raise SettingsError(
                f"{origin}: a waiver is 'LAYERS [CHECK]: REASON', such as 'encoder.embed "
                f"dead_units: sparse vocabulary', not {line!r}"
                f"{'' if reason else '; its reason is missing'}"
            )
        if line:
            check_name = check[0] if check else None
            waivers.append(Waiver(layers, check_name, reason.strip(), origin, shared=True))
    return tuple(waivers)
