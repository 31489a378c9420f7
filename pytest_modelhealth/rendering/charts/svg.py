"""What the charts share: SVG as text, how things are written, scales and their ticks.

Names and sentences of a run come in as they are and are escaped here. Colours are the classes of
``charts.css``, so that a chart follows the theme and is printed in ink.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup, escape

from pytest_modelhealth.rendering.notation import abbreviate, number, printable, readable

STYLE = Path(__file__).with_name("charts.css")
WIDTH = 720
LETTER = 6.7  # Pixels: the width of a chart, and of a letter of 11 px in a wide font


def plain(value: object) -> str:
    """Return text and numbers as markup that shows them, and nothing else."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(escape(readable(str(value))))


def tag(name: str, *inside: str, **attributes: object) -> str:
    """Return an element around markup; attributes without a value are left out.

    ``class_`` is written as ``class``, ``data_name`` as ``data-name``.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{plain(value)}"'
        for key, value in attributes.items()
        if value is not None and value != ""
    )
    return f"<{name}{written}>{''.join(inside)}</{name}>" if inside else f"<{name}{written}/>"


def write(x: float, y: float, text: object, class_: str = "") -> str:
    """Return a line of text."""
    return tag("text", plain(text), x=x, y=y, class_=class_)


def path(d: str, class_: str) -> str:
    """Return a path."""
    return tag("path", d=d, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str) -> str:
    """Return a rectangle; ``"mark"`` is transparent."""
    return tag("rect", x=x, y=y, width=width, height=height, class_=class_)


def line(points: Iterable[tuple[float, float]]) -> str:
    """Return what draws a line through these points."""
    return "M" + "L".join(f"{plain(x)} {plain(y)}" for x, y in points)


def chart(kind: str, size: tuple[float, float], finding: str, body: str, marks: str = "") -> Markup:
    """Return a chart of this width and height: its body is one image to a screen reader.

    `finding` is the sentence that says what it shows; `marks` are transparent shapes above it, with
    titles and links.
    """
    image = tag("g", body or " ", role="img", aria_label=finding)
    width, height = map(round, size)
    return Markup(
        tag(
            "svg", image, marks, class_=f"chart chart-{kind}", viewBox=f"0 0 {width} {height}",
            width=width, height=height,
        )
    )  # fmt: skip


def nothing(kind: str, sentence: str) -> Markup:
    """Return a chart that says why there is nothing to show."""
    return chart(kind, (360, 28), sentence, write(0, 18, sentence, "quiet slanted"))


def mark(title: str, shape: str, link: str | None = None) -> str:
    """Return a shape with a title, and a link."""
    inside = tag("title", plain(title)) + shape
    return tag("g", inside) if link is None else tag("a", inside, href=link)


def link_to(anchor: str, layer: str) -> str:
    """Return the address of a layer in the table of a result."""
    return f"#{anchor}/{quote(printable(layer), safe='')}"


def cross(x: float, y: float) -> str:
    """Return what stands for values that are not finite."""
    return path(f"M{plain(x - 3.5)} {plain(y - 3.5)}l7 7m0 -7l-7 7", "bad")


def brief(value: float | None) -> str:
    """Return ``"0.8"`` and ``"1e-5"``, without the noughts that align a column."""
    if value is None:
        return "NaN"
    digits, letter, exponent = number(value).partition("e")
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + letter + exponent


def fitted(name: str, width: int) -> str:
    """Return a layer's name in at most `width` characters."""
    return abbreviate(printable(name), width)


def words(name: object) -> str:
    """Return a check, role or statistic as words: ``"dead units"``."""
    return str(name or "").replace("_", " ")


def label_of(item: Mapping[str, Any], name: str | None = None) -> str:
    """Return what to show for a layer."""
    return str(item.get("label") or name or item.get("name") or item.get("layer") or "model")


def accused(violations: Sequence[Mapping[str, Any]]) -> str:
    """Return the end of a sentence on a chart, where there is a culprit."""
    return "".join(f"; culprit {label_of(v)}: {words(v['check'])}" for v in violations[:1])


def finite(value: object) -> bool:
    """Return whether this is a number, and a finite one."""
    return isinstance(value, int | float) and math.isfinite(value)


class Scale(NamedTuple):
    """Where a number stands, and the ticks of the axis: places and texts."""

    at: Callable[[float], float]
    ticks: list[tuple[float, str]]


def log_scale(values: Sequence[float], start: float, end: float, most_ticks: int) -> Scale:
    """Return a scale of positive numbers, two powers of ten at least, with ticks at some."""
    logs = [math.log10(value) for value in values] or [0.0]
    low, high = min(logs), max(logs)
    margin = max(0.15, (high - low) * 0.04, (2.05 - (high - low)) / 2)
    low, high = low - margin, high + margin

    def at(value: float) -> float:
        return start + (math.log10(value) - low) / (high - low) * (end - start)

    exponents = range(math.ceil(low), math.floor(high) + 1, math.ceil((high - low) / most_ticks))
    powers = [power for e in exponents if 0 < (power := float(f"1e{e}")) < math.inf]
    return Scale(at, [(at(power), brief(power)) for power in powers])


def linear_scale(values: Sequence[float], start: float, end: float, most_ticks: int) -> Scale:
    """Return a scale with ticks at 1, 2 or 5 times a power of ten."""
    low, high = max(min(values, default=0.0), -8e307), min(max(values, default=1.0), 8e307)
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin

    def at(value: float) -> float:
        return start + (min(max(value, -8e307), 8e307) - low) / (high - low) * (end - start)

    rough = max((high - low) / most_ticks, 1e-307)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)
    ticks = range(math.ceil(low / step), math.floor(high / step) + 1)
    return Scale(at, [(at(n * step), brief(n * step)) for n in ticks])
