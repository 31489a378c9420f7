"""Charts as figures of matplotlib: drawn again from their SVG, in the colours of `charts.css`.

Figures are made without pyplot: no global state, no window, nothing to close. One report always
gives the same bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Circle, FancyBboxPatch, Patch, PathPatch
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from pytest_modelhealth.rendering.charts.svg import LETTER, STYLE
from pytest_modelhealth.rendering.notation import printable

INK, ALARM = "#1c2127", "#c3261f"


class HealthFigure(Figure):
    """A figure that notebooks show without pyplot being imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def drawable(text: str) -> str:
    """Return `text` with an escape for each character that the figure's font lacks.

    matplotlib would warn, and a warning fails the test of a user who turns warnings into errors.
    """
    return "".join(
        letter if _has_glyph(letter) else letter.encode("unicode_escape").decode()
        for letter in printable(text)
    )


@cache
def _has_glyph(letter: str) -> bool:
    return letter.isascii() or bool(
        get_font(findfont(FontProperties())).get_char_index(ord(letter))
    )


_INCH = 100
"""Pixels."""

_HIDDEN = {"mark", "edge-mark"}
"""What stands above a chart on the page, for a mouse."""


def figure_of(
    chart: str, title: str, said: Sequence[str] = (), alarms: Sequence[str] = (), scale: float = 1.0
) -> Figure:
    """Return a figure of a chart, with lines above it.

    Args:
        chart: SVG, of classes that `charts.css` colours.
        title: stands at the top left.
        said: lines below it.
        alarms: lines below these, in red.
        scale: inches and letters for each that the page has.
    """
    root = ElementTree.fromstring(chart)
    width, height = (float(root.get(side, "")) for side in ("width", "height"))
    lines = [(title, 13.0, INK)]
    for texts, color in ((said, INK), (alarms, ALARM)):
        broken = [part for text in texts for part in textwrap.wrap(text, int(width / LETTER))]
        lines += [(part, 11.0, color) for part in broken]
    head = 17.0 * len(lines) + 12
    inches = (width + 2 * _PAD) / _INCH * scale, (height + head + _PAD) / _INCH * scale
    figure = HealthFigure(figsize=inches, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), facecolor="white")
    axes.set_xlim(-_PAD, width + _PAD)
    axes.set_ylim(height + _PAD, -head)
    axes.set_axis_off()
    for row, (text, size, color) in enumerate(lines):
        axes.text(
            0, 17 * (row + 1) - head, drawable(text), fontsize=size * 72 / _INCH * scale,
            color=color, fontweight="normal" if row else "bold", parse_math=False,
        )  # fmt: skip
    _draw(axes, root, "black", 72 / _INCH * scale)
    return figure


_PAD = 10.0


def _draw(axes: Axes, element: Element, color: str, point: float) -> None:
    """Draw an element and all in it; a pixel has so many points."""
    classes = frozenset(element.get("class", "").split())
    if classes & _HIDDEN or element.tag == "title":
        return
    look = _look(classes | {element.tag})
    color = look.get("color", color)
    look = {key: color if value == "currentColor" else value for key, value in look.items()}
    if element.tag == "text":
        _write(axes, element, look, point)
    elif (patch := _patch(element)) is not None:
        fill = look.get("fill", "none" if "stroke" in look else "black")
        for name, value, setter in (
            ("fill", fill, patch.set_facecolor),
            ("stroke", look.get("stroke", "none"), patch.set_edgecolor),
        ):
            opacity = None if value == "none" else float(look.get(f"{name}-opacity", 1))
            setter(to_rgba(value, opacity))
        patch.set_linewidth(float(look.get("stroke-width", 1)) * point)
        if "stroke-dasharray" in look:
            patch.set_linestyle((0, [float(part) for part in look["stroke-dasharray"].split()]))
        patch.set_clip_on(False)
        axes.add_patch(patch)
    for inner in element:
        _draw(axes, inner, color, point)


_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def _write(axes: Axes, element: Element, look: dict[str, str], point: float) -> None:
    x, y = (float(element.get(name, 0)) for name in "xy")
    axes.text(
        x, y, drawable(element.text or ""), color=look.get("fill", "black"), parse_math=False,
        fontsize=float(look.get("font-size", "11px").removesuffix("px")) * point,
        fontweight="bold" if "font-weight" in look else "normal",
        fontstyle=look.get("font-style", "normal"),
        ha=_ANCHORS[look.get("text-anchor", "start")],
        path_effects=[withStroke(linewidth=3 * point, foreground="white")] * ("stroke" in look),
    )  # fmt: skip


def _patch(element: Element) -> Patch | None:
    def at(*names: str) -> list[float]:
        return [float(element.get(name, 0)) for name in names]

    if element.tag == "path":
        path = path_of(element.get("d", ""))
        return None if path is None else PathPatch(path, capstyle="butt")
    if element.tag == "circle":
        x, y, radius = at("cx", "cy", "r")
        return Circle((x, y), radius)
    if element.tag == "rect":
        x, y, width, height, rounding = at("x", "y", "width", "height", "rx")
        form = f"round,pad=0,rounding_size={rounding}" if rounding else "square,pad=0"
        return FancyBboxPatch((x, y), width, height, boxstyle=form)
    return None


def path_of(d: str) -> Path | None:
    """Return a path of SVG; it has the commands that charts are drawn with."""
    vertices: list[tuple[float, float]] = []
    codes: list[int] = []
    x = y = 0.0
    for command, written in re.findall(r"([MLHVCZmlhvcz])([^MLHVCZmlhvcz]*)", d):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", written)]
        kind = command.upper()
        if kind == "Z":
            vertices.append((x, y))
            codes.append(int(Path.CLOSEPOLY))
        size = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "Z": 1}[kind]
        for start in range(0, len(numbers), size):
            given = numbers[start : start + size]
            from_x, from_y = (x, y) if command.islower() else (0.0, 0.0)
            if kind == "H":
                points = [(from_x + given[0], y)]
            elif kind == "V":
                points = [(x, from_y + given[0])]
            else:
                points = [(from_x + a, from_y + b) for a, b in zip(*[iter(given)] * 2, strict=True)]
            vertices += points
            code = {"M": Path.LINETO if start else Path.MOVETO, "C": Path.CURVE4}
            codes += [int(code.get(kind, Path.LINETO))] * len(points)
            x, y = points[-1]
    return Path(vertices, codes) if vertices else None


@cache
def _look(classes: frozenset[str]) -> dict[str, str]:
    """Return what `charts.css` says of an element of a tag and classes; no rule asks for others."""
    look: dict[str, str] = {}
    for needed, declarations in _rules():
        if needed <= classes:
            look |= declarations
    return look


@cache
def _rules() -> list[tuple[frozenset[str], dict[str, str]]]:
    """Return the rules of `charts.css`, the less specific first: classes and declarations."""
    css = STYLE.read_text(encoding="ascii")
    palette = dict(re.findall(r"--([\w-]+): (#\w+)", css))
    css = re.sub(r"var\(--([\w-]+)\)", lambda found: palette.get(found[1], ""), css)
    rules = []
    for selectors, body in re.findall(r"^(\.chart [.\w][^{:]*)\{([^}]*)\}", css, re.MULTILINE):
        declarations = dict(re.findall(r"([\w-]+): ([^;]+);", body))
        for selector in selectors.split(","):
            own = frozenset(re.findall(r"[\w-]+", selector.split()[1]))
            rules.append((own, declarations))
    return sorted(rules, key=lambda rule: len(rule[0]))
