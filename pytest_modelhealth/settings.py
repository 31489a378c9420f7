"""Thresholds and other settings, and where each value came from.

A setting has one name everywhere: keyword of `Inspector` and of the `modelhealth` marker, ini
option ``modelhealth_<name>``, command line option ``--modelhealth-<name>``. Layers of values lie
over each other, default < ini < option < marker < call, and each value keeps its origin, so that a
failure can say which line set the limit. This module imports neither torch nor pytest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_modelhealth.errors import SettingsError, suggest

SettingValue = float | int | bool | str | None


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting.

    Args:
        name: its name everywhere, in snake case.
        type: ``float``, ``int``, ``bool`` or ``str``; a float takes an int too.
        default: its value when nobody sets it; ``None`` means "no limit".
        help: one sentence for ``--help`` and the reference; it names the source of the default.
        minimum: the least value allowed, inclusive.
        maximum: the greatest value allowed, inclusive.
        per_layer: whether its value may differ from layer to layer: its check asks for it with
            `Settings.limit`, by layer.
    """

    name: str
    type: type
    default: SettingValue
    help: str
    minimum: float | None = None
    maximum: float | None = None
    per_layer: bool = True

    def validate(self, value: object, origin: str) -> SettingValue:
        """Return `value` as this setting's type.

        Raises:
            SettingsError: wrong type, not a number, or out of range. `origin` says where it stood.
        """
        if value is None and self.default is None:
            return None
        if not self._accepts(value):
            raise SettingsError(
                f"{origin}: {self.name} must be {self._expected()}, not {value!r} "
                f"({type(value).__name__})"
            )
        if isinstance(value, float | int) and not isinstance(value, bool):
            self._validate_range(value, origin)
        return self.type(value)  # type: ignore[no-any-return]

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
    def shown_default(self) -> str:
        """The default as an ini file or a command line spells it."""
        spelled = {None: "none", True: "true", False: "false"}
        if self.default is None or isinstance(self.default, bool):
            return spelled[self.default]
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def _accepts(self, value: object) -> bool:
        if isinstance(value, bool):
            return self.type is bool
        if self.type is float:
            return isinstance(value, float | int)
        return isinstance(value, self.type)

    def _validate_range(self, value: float, origin: str) -> None:
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        if not low <= value <= high:  # NaN fails this too
            raise SettingsError(f"{origin}: {self.name} must be {self._expected()}, not {value!r}")

    def _expected(self) -> str:
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


@dataclass(frozen=True)
class Limit:
    """A setting's value in force and where it came from, for example ``"default"``."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Waiver:
    """A violation that a project accepts, and why.

    Args:
        layers: a layer name or a shell wildcard.
        check: the name of the check waived; ``None`` waives all checks on these layers.
        reason: why it is accepted; never empty.
        origin: where the waiver stands.
    """

    layers: str
    check: str | None
    reason: str
    origin: str


LAYERS = Setting(
    "layers",
    str,
    default="*",
    help="shell wildcard on layer names: only these layers are judged; all are still observed, so "
    "that a fault is traced to where it begins",
    per_layer=False,
)


class Settings(Mapping[str, Limit]):
    """Every declared setting with its value in force; immutable.

    ``settings["max_grad_norm"]`` is a `Limit`. `override` lays values over these and returns a new
    object. Settings pickle, compare and print.
    """

    def __init__(
        self,
        declared: Iterable[Setting],
        limits: Mapping[str, Limit] | None = None,
        waivers: tuple[Waiver, ...] = (),
    ) -> None:
        self._declared = {setting.name: setting for setting in declared}
        self._limits = {name: Limit(s.default, "default") for name, s in self._declared.items()}
        self._limits.update(limits or {})
        self.waivers = waivers

    def __getitem__(self, name: str) -> Limit:
        return self._limits[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._limits)

    def __len__(self) -> int:
        return len(self._limits)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Settings):
            return NotImplemented
        return (self._declared, self._limits, self.waivers) == (
            other._declared,
            other._limits,
            other.waivers,
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        changed = {n: limit for n, limit in self._limits.items() if limit.origin != "default"}
        return f"Settings({changed}, waivers={self.waivers})"

    def limit(self, name: str, layer: str) -> Limit:
        """Return the value of setting `name` in force for `layer`."""
        return self[name]

    @property
    def declarations(self) -> tuple[Setting, ...]:
        """Every setting there is, in the order of the checks that declare them."""
        return tuple(self._declared.values())

    def declared(self, name: str, origin: str) -> Setting:
        """Return the declaration of `name`.

        Raises:
            SettingsError: no such setting; the message suggests the nearest and lists all.
        """
        if name not in self._declared:
            raise SettingsError(
                f"{origin}: unknown setting {name!r}{suggest(name, self._declared)} "
                f"Known settings: {', '.join(sorted(self._declared))}."
            )
        return self._declared[name]

    def override(self, values: Mapping[str, object], origin: str) -> Settings:
        """Return these settings with `values` laid over them, each marked as coming from `origin`.

        Raises:
            SettingsError: a name is unknown, or a value has the wrong type or range.
        """
        limits = dict(self._limits)
        for name, value in values.items():
            limits[name] = Limit(self.declared(name, origin).validate(value, origin), origin)
        return Settings(self._declared.values(), limits, self.waivers)

    def waive(self, *waivers: Waiver) -> Settings:
        """Return these settings with `waivers` added."""
        return Settings(self._declared.values(), self._limits, (*self.waivers, *waivers))
