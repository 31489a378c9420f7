"""Numbers with their noise in the concise notation of metrology: ``0.60641(3)``.

The digit in parentheses is the noise in units of the last place, rounded up, so that no digit is
written that rounding may change.
"""

from __future__ import annotations

import math
import re

PLAIN_DIGITS = 10
"""Significant digits of a number without a noise: float32 resolves seven."""

_CONCISE = re.compile(r"(-?\d+(?:\.(\d+))?)\((\d)\)(?:e(-?\d+))?")


def spell(value: float, noise: float | None = None, digits: int = PLAIN_DIGITS) -> str:
    """Spell a number, and its noise where there is one; without it, to so many digits."""
    value += 0.0  # turns -0.0 into 0.0
    if not noise or not math.isfinite(noise) or not math.isfinite(value):
        return format(value, f".{digits}g")
    digit, place = _rounded_up(noise)
    rounded = round(value, -place) + 0.0
    exponent = math.floor(math.log10(abs(rounded))) if rounded else place
    if place <= 0 and (-4 <= exponent < 9 or (not rounded and place > -7)):
        return f"{rounded:.{-place}f}({digit})"
    if not rounded:
        return f"0({digit})e{place}"
    mantissa, _, power = f"{rounded:.{max(exponent - place, 0)}e}".partition("e")
    return f"{mantissa}({digit})e{int(power)}"


def _rounded_up(noise: float) -> tuple[int, int]:
    """Return the first digit of a noise, rounded up, and the power of ten that it counts."""
    place = math.floor(math.log10(noise))
    digit = math.ceil(noise / 10.0**place - 1e-6)
    return (1, place + 1) if digit == 10 else (max(digit, 1), place)


def read(text: str) -> tuple[float, float | None]:
    """Return the number and the noise that `text` spells; ``None`` where it has no noise.

    Raises:
        ValueError: it spells no number.
    """
    found = _CONCISE.fullmatch(text)
    if found is None:
        return float(text), None
    number, decimals, digit, power = found.groups()
    place = int(power or 0) - len(decimals or "")
    return float(f"{number}e{power or 0}"), float(f"{digit}e{place}")
