"""`Setting`: one value that a user may set, and how it is checked and spelt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_modelhealth.errors import SettingsError, suggest

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
        help: one sentence for the listing and the reference; it names the source of the default.
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
        if not self._accepts(value):
            raise SettingsError(
                f"{origin}: {self.name} must be {self._expected()}, not {value!r} "
                f"({type(value).__name__})"
            )
        if isinstance(value, float | int) and not isinstance(value, bool):
            self._validate_range(value, origin)
        if self.one_of and value not in self.one_of:
            nearest = suggest(str(value), self.one_of)
            raise SettingsError(
                f"{origin}: {self.name} must be {self._expected()}, not {value!r}{nearest}"
            )
        return self.type(value)  # type: ignore[no-any-return]

    def over(self, below: Limit, value: SettingValue, origin: str) -> Limit:
        """Return what is in force when a valid `value` is laid over what stood `below`."""
        return Limit(value, origin)

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
