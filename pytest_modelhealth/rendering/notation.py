"""How numbers, names and tables are written for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from pytest_modelhealth.statistics import HIGHEST_EXPONENT

NOT_SEEN = "-"  # where there is no number: no such tensor, or it was not observed


def number(value: float | None) -> str:
    """Return `value` in three significant digits: ``"0.0123"``, ``"-4.00"``, ``"1.50e-7"``."""
    if value is None:
        return NOT_SEEN
    if value == 0 or not math.isfinite(value):
        return f"{abs(value) if value == 0 else value:g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    power = int(exponent)
    if -3 <= power <= 4:
        return f"{value:.{max(0, 2 - power)}f}"
    return f"{mantissa}e{power}"


def power_of_two(exponent: int) -> str:
    """Return ``2**exponent``, in full where that is short; ``"inf"`` above all exponents kept."""
    if exponent > HIGHEST_EXPONENT:
        return "inf"
    value = 2.0**exponent
    return f"{value:g}" if -4 <= exponent <= 13 else number(value)


def beside_limit(value: float, limit: float | None) -> str:
    """Return `value` in as many digits as it takes to tell it from `limit`; counts in full."""
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{value:,.0f}"
    text = number(value)
    digits = 4
    while limit is not None and float(text) == limit != value:
        text = f"{value:.{digits}g}"
        digits += 1
    return text


def percent(fraction: float | None) -> str:
    """Return whole percents; only none is ``"0%"`` and only all is ``"100%"``."""
    if fraction is None or math.isnan(fraction):
        return NOT_SEEN
    if 0 < fraction < 0.01:
        return "<1%"
    if 0.99 < fraction < 1:
        return ">99%"
    return f"{fraction:.0%}"


def whole(count: int | None) -> str:
    """Return ``"1,234,567"``, or a dash where nothing was counted."""
    return NOT_SEEN if count is None else f"{count:,}"


def scaled(count: int | None) -> str:
    """Return ``"376 k"``, ``"4.21 G"``: three significant digits and a power of 1,000."""
    return NOT_SEEN if count is None else _in_units(count, 1000, ("", " k", " M", " G", " T", " P"))


def in_bytes(count: int | None) -> str:
    """Return ``"64.0 KiB"``: three significant digits and a power of 1,024."""
    units = (" B", " KiB", " MiB", " GiB", " TiB", " PiB")
    return NOT_SEEN if count is None else _in_units(count, 1024, units)


def _in_units(count: int, base: int, units: Sequence[str]) -> str:
    power, value = 0, float(count)
    while value >= 999.5 and power < len(units) - 1:
        value /= base
        power += 1
    digits = 0 if not power or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}{units[power]}"


def shape(sizes: Sequence[int]) -> str:
    """Return ``"64x32x14x14"``, or ``"scalar"``."""
    return "x".join(map(str, sizes)) or "scalar"


def plural(count: int, noun: str) -> str:
    """Return ``"1 layer"``, ``"2 layers"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def few(lines: Sequence[str], most: int, noun: str) -> list[str]:
    """Return at most so many lines, and how many there are besides."""
    more = len(lines) - most
    return [*lines[:most], *[f"... and {plural(more, noun)}"] * (more > 0)]


def printable(text: str) -> str:
    """Return `text` on one line, with what a terminal would obey or hide written as an escape."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def readable(text: str) -> str:
    """Return `text` on its lines, each as `printable` makes it."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def shorten(text: str, width: int) -> str:
    """Return the start of `text`, in at most `width` characters."""
    return text if len(text) <= width else text[: width - 2] + ".."


def abbreviate(name: str, width: int) -> str:
    """Return a layer's name in at most `width` characters: ``"e.l.0.a.self.query"``.

    Outer modules give way first and numbers never, since these tell the layers of a stack apart.
    """
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= width:
            break
        parts[index] = part if part.isdigit() else part[:1]
    short = ".".join(parts)
    return short if len(short) <= width else ".." + short[len(short) - width + 2 :]


class Column(NamedTuple):
    """One column of a table with a row for each layer."""

    title: str
    help: str = ""  # what it holds, in a sentence
    cell: Callable[[Any], str] = str  # gives its text for a layer
    is_text: bool = False  # whether it is flush left


def table(
    rows: Sequence[Sequence[str]],
    left: Collection[int] = (0,),
    *,
    width: int | None = None,
    narrowest: Iterable[tuple[int, int]] = (),
    names: int | None = None,
) -> list[str]:
    """Return `rows` as aligned lines, in `width` characters where that can be.

    The columns `left` are flush left, the others right. Those in `narrowest` give way, in this
    order and so far; names of layers, in the column `names`, are abbreviated rather than cut.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    excess = 0 if width is None else sum(widths) + 2 * (len(widths) - 1) - width
    for column, least in narrowest:
        cut = max(0, min(excess, widths[column] - least))
        widths[column] -= cut
        excess -= cut
    lines = []
    for row in rows:
        cells = []
        for column, (cell, most) in enumerate(zip(row, widths, strict=True)):
            short = (abbreviate if column == names else shorten)(cell, most)
            cells.append(short.ljust(most) if column in left else short.rjust(most))
        lines.append("  ".join(cells).rstrip())
    return lines
