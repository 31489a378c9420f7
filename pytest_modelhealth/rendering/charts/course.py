"""A training over steps: the loss, and a row of coloured cells a layer or the lines of one layer.

A path holds all cells of a colour: each alone would be one of some 30,000 elements.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.charts.rows import NAMES, Row, name_of, named_rows
from pytest_modelhealth.rendering.notation import plural

Reals = npt.NDArray[np.float64]
Values = Sequence["float | None"]
_Place = Callable[[float, float], tuple[float, float]]

BAND = (1e-4, 1e-2)
"""Update ratios between these are usual; a rule of thumb, not a limit."""

MOST_DEAD = 0.5
"""A layer with a larger part of its units dead is remarked on."""

MOST_ROWS, MOST_COLUMNS = 120, 240
"""Of more layers or steps, neighbours share a row or a column."""

LEVELS = 8
BAD, ZERO, MISSING, USUAL = "bad-cell", "zero-cell", "no-cell", "usual-cell"
_KEY = {BAD: "not finite", ZERO: "zero", MISSING: "no number"}

_ROW, _LEAST, _MOST, _LOSS, _HIGH = 14, 28, 360, 110, 84
"""Pixels: a row, all rows of a map, the loss, a panel of lines."""

_LEFT, _RIGHT, _GAP = NAMES, svg.WIDTH - 8, 62
"""Pixels: the ends of the axis of steps, and between two panels."""

_LOG_FROM = 30
"""Times the least: positive values that differ by more have a log axis."""

_TITLES = {
    "parameter_gradient_norm": "gradient norm of parameters",
    "gradient_norm": "gradient norm of activations",
    "dead_fraction": "dead units, part of all",
    "update_ratio": "update ratio: norm of what a step changes by norm of the weights",
}


def course(found: Mapping[str, Any], anchor: str, events: Sequence[tuple[int, str]] = ()) -> Markup:
    """Return the loss of a training over steps, and a map of its layers for each statistic.

    Args:
        found: steps, losses, and statistics of layers, as in the file of a run; infinity is what
            was not finite.
        anchor: where the layers are.
        events: steps and layers at which something went wrong.
    """
    if not found["steps"]:
        return svg.nothing("course", "No step was recorded.")
    statistics = dict.fromkeys(chain(*found["layers"].values()))
    maps = [_cells(found["layers"], name, events) for name in statistics]
    steps = [step for step, _ in events]
    return timeline("course", found["steps"], [found["loss"], *filter(None, maps)], steps, anchor)


@dataclass(frozen=True)
class Cells:
    """A map with a row a layer and a column a step.

    Args:
        title: what it is of.
        members: the layers in each row.
        values: shape ``(rows, steps)``; NaN where nothing was seen, infinity where something was
            not finite.
        limits: values of the faintest and of the deepest colour.
        is_log: whether colours are on a log scale.
        usual: values between which all is well: below they are of one colour, above of another.
        empty: the class of a zero on a log scale, ``""`` where it is not drawn.
        wrong: layers that are named first, in red.
        rings: steps and layers at which something went wrong.
        every: how many steps are in a column.
    """

    title: str
    members: Sequence[Sequence[str]]
    values: Reals
    limits: tuple[float, float] = (0.0, 1.0)
    is_log: bool = True
    usual: tuple[float, float] | None = None
    empty: str = ZERO
    wrong: frozenset[str] = frozenset()
    rings: Sequence[tuple[int, str]] = ()
    every: int = 1

    def folded(self) -> Cells:
        """Return it with so few rows and columns that each can be seen.

        Of cells that are put together the worst is shown: what is not finite first, then what is
        farthest from the rest.
        """
        values = self.values
        with np.errstate(divide="ignore"):
            scaled = np.log10(values) if self.is_log else values
        known = scaled[np.isfinite(scaled)]
        middle = np.median(known) if len(known) and self.is_log else 0.0
        far = np.minimum(np.abs(scaled - middle), 1e9)  # a zero, too
        far = np.where(np.isnan(values), -1.0, np.where(np.isinf(values), np.inf, far))
        (rows, columns) = values.shape
        down, across = (
            max(1, math.ceil(rows / MOST_ROWS)),
            max(1, math.ceil(columns / MOST_COLUMNS)),
        )
        blocks = [
            [np.s_[row : row + down, at : at + across] for at in range(0, columns, across)]
            for row in range(0, rows, down)
        ]
        return replace(
            self,
            members=[[*chain(*self.members[at : at + down])] for at in range(0, rows, down)],
            values=np.array([[values[b].flat[far[b].argmax()] for b in row] for row in blocks]),
            every=across,
        )

    def kinds(self, values: Reals) -> npt.NDArray[np.str_]:
        """Return the classes of cells with these values."""
        limits = np.array(self.limits if self.usual is None else self.usual)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.log10(values) if self.is_log else values
            low, high = np.log10(limits) if self.is_log else limits
        if self.usual is None:
            depth, style = (scaled - low) / (high - low) * LEVELS, np.full(values.shape, "first")
        else:  # a level for half a power of ten
            depth = np.maximum(low - scaled, scaled - high) * 2 + 2
            style = np.where(scaled < low, "first", "second")
        levels = np.clip(np.nan_to_num(depth), 0, LEVELS - 1).astype(int)
        kinds = np.char.add(np.char.add(style, " level-"), levels.astype(str))
        if self.usual is not None:
            kinds[(scaled >= low) & (scaled <= high)] = USUAL
        kinds[(values == 0) & self.is_log] = self.empty
        kinds[np.isinf(values)] = BAD
        kinds[np.isnan(values)] = MISSING
        return kinds


def _cells(
    layers: Mapping[str, Mapping[str, Any]], statistic: str, events: Sequence[tuple[int, str]]
) -> Cells | None:
    """Return the map of the layers that have something to show, if there are any."""
    every = {name: np.array(own[statistic], float) for name, own in layers.items()}
    known = {name: own for name, own in every.items() if not np.isnan(own).all()}
    title, is_log = _TITLES.get(statistic, svg.words(statistic)), statistic != "dead_fraction"
    limits = (0.0, 1.0)
    if not is_log:
        seen, known = len(known), {name: own for name, own in known.items() if own.any()}
        if none := seen - len(known):
            title += f" ({plural(none, 'further layer' if known else 'layer')} never had one)"
    elif not known:
        return None
    else:
        values = np.concatenate([*known.values()])
        powers = np.log10(values[np.isfinite(values) & (values > 0)])
        powers = powers if len(powers) else np.zeros(1)
        middle = np.median(powers)  # at most six powers of ten to both sides of it have a colour
        low, high = np.clip([powers.min(), powers.max()], middle - 6, middle + 6).tolist()
        spare = max(0.0, 1 - (high - low)) / 2
        limits = 10 ** (low - spare), 10 ** (high + spare)
    wrong = {
        name
        for name, own in known.items()
        if (np.isinf(own) | (own == 0 if is_log else own > MOST_DEAD)).any()
    }
    usual = BAND if statistic == "update_ratio" else None
    made = Cells(
        title, [[name] for name in known], np.array([*known.values()]),
        limits if usual is None else (1e-6, 1.0), is_log, usual,
        wrong=frozenset(wrong.union(layer for _, layer in events)), rings=events,
    )  # fmt: skip
    return made.folded() if known else made


def timeline(
    kind: str,
    steps: Sequence[int],
    panels: Sequence[Values | Lines | Cells],
    events: Sequence[int] = (),
    anchor: str = "",
    crosses: Sequence[int] = (),
) -> Markup:
    """Return a chart of panels over the same steps, one below the other.

    Args:
        kind: becomes its class.
        steps: numbers of the steps.
        panels: losses, lines of a layer, or maps.
        events: steps at which a line goes through all panels, with a number above.
        anchor: where the layers are.
        crosses: steps that are marked in the first panel, where there is no number to draw.
    """
    if not panels:
        return svg.nothing(kind, "nothing finite was seen of this layer")
    between = [(a + b) / 2 for a, b in pairwise(steps)]
    first, last = (between[0], between[-1]) if between else (steps[0] + 0.5, steps[0] - 0.5)
    edges = [2 * steps[0] - first, *between, 2 * steps[-1] - last]
    body: list[str] = []
    marks: list[str] = []
    y = float(_GAP - 12)
    top = y
    for panel in panels:
        height = _HIGH if isinstance(panel, Lines) else _LOSS
        if isinstance(panel, Cells):
            height = min(_MOST, max(_LEAST, _ROW * len(panel.members))) if panel.members else 0
        axes = Axes(steps, edges, y, height)
        if isinstance(panel, Cells):
            parts = _map(axes, panel, edges) if panel.members else [" "]
            body.append(axes.titled(panel.title, *parts, kind="cells"))
            marks += _marks(axes, panel, anchor)
        else:
            body.append(axes.named_lines(panel) if isinstance(panel, Lines) else axes.loss(panel))
        y = axes.bottom + _GAP
    body += [
        svg.cross(axes.across.at(at), top + 5) for at in crosses[:: max(1, len(crosses) // 60)]
    ]
    if crosses:
        body.append(svg.write(svg.WIDTH - 8, top + 24, "not finite", "alarm small end"))
    groups: list[list[int]] = []  # those nearer to each other than a number is wide share one
    for at, step in enumerate(events):
        x = axes.across.at(step)
        body.append(svg.path(f"M{svg.plain(x)} {top}V{svg.plain(y - _GAP)}", "event"))
        if groups and x - axes.across.at(events[groups[-1][0]]) <= 14:
            groups[-1].append(at)
        else:
            groups.append([at])
    for first_, *others in groups:
        text = f"{first_ + 1}-{others[-1] + 1}" if others else f"{first_ + 1}"
        x = axes.across.at(events[first_])
        body.append(svg.write(x, top - 28, text, "alarm strong small middle"))
    size = svg.WIDTH, y - _GAP + 26
    finding = next((_told(steps, each) for each in panels if isinstance(each, list)), kind)
    return svg.chart(kind, size, finding, "".join(body), "".join(marks))


def _marks(axes: Axes, cells: Cells, anchor: str) -> Iterator[str]:
    """Yield a mark for each row: its first layer, and where that ends."""
    for row, ((first, *others), values) in enumerate(zip(cells.members, cells.values, strict=True)):
        pitch = (axes.bottom - axes.y) / len(cells.members)
        title = f"{first or 'model'}{f' and {len(others)} more' * bool(others)}: ends at "
        title += "no number" if math.isnan(values[-1]) else svg.brief(values[-1])
        shape = svg.area(0, axes.y + row * pitch, _RIGHT, pitch)
        yield svg.mark(title, shape, svg.link_to(anchor, first), is_reached=row < 20)


def _map(axes: Axes, cells: Cells, edges: Sequence[float]) -> Iterator[str]:
    """Yield the cells, the names of the rows that have room, the key and the numbers of steps."""
    pitch = (axes.bottom - axes.y) / len(cells.members)
    xs = [axes.across.at(edge) for edge in [*edges[:-1][:: cells.every], edges[-1]]]
    kinds = cells.kinds(cells.values)
    drawn: dict[str, str] = defaultdict(str)
    for row, of_row in enumerate(kinds.tolist()):
        at, y, high = 0, svg.plain(axes.y + row * pitch), svg.plain(pitch)
        for kind, run in groupby(of_row):
            end = at + sum(1 for _ in run)
            left, wide = svg.plain(xs[at]), svg.plain(xs[end] - xs[at])
            drawn[kind] += f"M{left} {y}h{wide}v{high}h-{wide}z" if kind else ""
            at = end
    yield from (svg.path(d, f"cell {kind}") for kind, d in sorted(drawn.items()) if d)
    rows = []
    for first, *others in cells.members:
        more = f" +{len(others)}" * bool(others)
        label = svg.fitted(first or "(model)", 24 - len(more)) + more
        rows.append(Row(first, label, "", is_found=not cells.wrong.isdisjoint((first, *others))))
    for at in sorted(named_rows(rows, pitch)):
        yield from name_of(rows[at], axes.y + (at + 0.5) * pitch + 3.8)
    for step, layer in cells.rings:
        for row, members in enumerate(cells.members):
            if layer in members:
                shape = {"cx": axes.across.at(step), "cy": axes.y + (row + 0.5) * pitch, "r": 5}
                yield svg.tag("circle", **shape, class_="ring")
    yield from axes.ticks()
    yield from _key(axes, cells, set(kinds.flat))


def _key(axes: Axes, cells: Cells, occurring: set[str]) -> Iterator[str]:
    """Yield what the colours mean, at the right above a map."""
    scale = (np.geomspace if cells.is_log else np.linspace)(*cells.limits, LEVELS)
    ends = [svg.brief(end) if cells.is_log else f"{end:.0%}" for end in cells.limits]
    key = [(name, [kind]) for kind, name in _KEY.items() if kind in occurring]
    if cells.usual is not None:
        usual = " to ".join(map(svg.brief, cells.usual))
        key.append((f"usual: {usual}", [USUAL]))
    key.append((ends[1], cells.kinds(scale[None])[0].tolist()))
    x = float(_RIGHT)
    for name, kinds in key:
        yield svg.write(x, axes.y - 12, name, "small end")
        x -= len(name) * svg.LETTER * 0.93 + 4
        for kind in reversed(kinds):
            x -= 10
            yield svg.tag("rect", x=x, y=axes.y - 20, width=10, height=9, class_=f"cell {kind}")
        if name == ends[1]:
            yield svg.write(x - 4, axes.y - 12, ends[0], "small end")
        x -= 12


@dataclass(frozen=True)
class Lines:
    """Values of one layer over steps.

    Args:
        title: what they are.
        values: by their names, two at most.
        spread: the least and the most around them.
        is_log: whether they have a log axis in any case.
        usual: from where to where all is well.
    """

    title: str
    values: Mapping[str, Values]
    spread: Sequence[Values] = ()
    is_log: bool = False
    usual: tuple[float, float] | None = None


class Axes:
    """The axes of a panel over steps, what is drawn in them, and the title above.

    Args:
        steps: numbers of the steps.
        edges: where the cell of each begins, and where the last one ends.
        y: the top.
        height: pixels.
    """

    def __init__(
        self, steps: Sequence[int], edges: Sequence[float], y: float, height: float
    ) -> None:
        self.steps, self.y, self.bottom = steps, y, y + height
        self.across = svg.linear_scale((edges[0], edges[-1]), _LEFT, _RIGHT, 8)

    def titled(self, title: str, *parts: str, kind: str) -> str:
        """Return the parts below a title."""
        text = svg.write(0, self.y - (28 if kind == "cells" else 12), title, "strong")
        return text + svg.tag("g", *parts, class_=f"panel {kind}")

    def loss(self, loss: Values) -> str:
        """Return the line of the loss, and from where on it is no number."""
        known = [value for value in loss if value is not None]
        place, parts = self._axes(known)
        parts.append(svg.write(_RIGHT, self.bottom + 14, "step", "quiet small end"))
        parts.append(self._line(loss, place, "line chosen first"))
        if not known:
            why = "no finite loss was given to step_end()"
            parts.append(svg.write(_LEFT + 8, self.y + 40, why, "quiet"))
        elif (bad := _first_bad(self.steps, loss)) is not None:
            x = place(bad, 0.0)[0]
            is_late = x > svg.WIDTH - 160
            text, class_ = f"NaN or inf from step {bad}", f"alarm{' end' * is_late}"
            parts.append(svg.cross(x, self.y + 5))
            parts.append(svg.write(x - 8 if is_late else x + 8, self.y + 9, text, class_))
        return self.titled("loss", *parts, kind="loss")

    def named_lines(self, lines: Lines) -> str:
        """Return the lines of one layer; their names stand at the right above."""
        every = [v for own in (*lines.values.values(), *lines.spread) for v in own if v is not None]
        is_log = lines.is_log and any(value > 0 for value in every)
        place, parts = self._axes(every, is_log or None)
        if lines.usual and every:
            top, bottom = (
                min(max(place(0, end)[1], self.y), self.bottom) for end in reversed(lines.usual)
            )
            shape = {"x": _LEFT, "y": top, "width": _RIGHT - _LEFT}
            parts.append(svg.tag("rect", **shape, height=bottom - top, class_="usual-cell"))
        if lines.spread:
            points = zip(self.steps, *lines.spread, strict=True)
            d = ""
            for known, run in groupby(points, key=lambda point: None not in point):
                if known:
                    sides = [(place(s, low), place(s, high)) for s, low, high in run]
                    d += f"{svg.line([low for low, _ in sides] + [h for _, h in sides[::-1]])}z"
            parts.append(svg.tag("g", svg.path(d, "envelope"), class_="second"))
        x = float(_RIGHT)
        for (label, values), style in zip(lines.values.items(), ("first", "second"), strict=False):
            parts.append(self._line(values, place, f"line chosen {style}"))
            text = f"\N{BLACK CIRCLE} {label}"
            parts.append(svg.write(x, self.y - 12, text, f"small coloured end {style}"))
            x -= 12 + len(text) * svg.LETTER
        return self.titled(lines.title, *parts, kind="lines")

    def _axes(self, known: Sequence[float], is_log: bool | None = None) -> tuple[_Place, list[str]]:
        """Return where a value at a step stands, and the axes; log ones where values reach far."""
        positive = [value for value in known if value > 0] or [1.0]
        if is_log is None:
            is_log = min(known, default=-1) >= 0 and max(positive) > _LOG_FROM * min(positive)
        ends = self.bottom - 3, self.y + 3
        vertical = (
            svg.log_scale(positive, *ends, 4) if is_log else svg.linear_scale(known, *ends, 4)
        )

        def place(step: float, value: float) -> tuple[float, float]:
            return self.across.at(step), self.bottom if is_log and value <= 0 else vertical.at(
                value
            )

        left, bottom, end = map(svg.plain, (_LEFT, self.bottom, _RIGHT))
        parts = [svg.path(f"M{left} {bottom}H{end}", "axis-line")]
        for y, text in vertical.ticks:
            parts.append(svg.path(f"M{left} {svg.plain(y)}H{end}", "rule"))
            parts.append(svg.write(_LEFT - 5, y + 3.5, text, "quiet small end"))
        return place, [*parts, *self.ticks()]

    def ticks(self) -> Iterator[str]:
        """Yield the numbers of steps below."""
        for x, text in self.across.ticks:
            if "." not in text and x <= _RIGHT - 40:
                yield svg.path(f"M{svg.plain(x)} {svg.plain(self.bottom)}v3", "axis-line")
                yield svg.write(x, self.bottom + 14, text, "quiet small middle")

    def _line(self, values: Values, place: _Place, class_: str) -> str:
        """Return a line that breaks where there is no number."""
        d, run = "", []
        for step, value in [*zip(self.steps, values, strict=True), (0, None)]:
            if value is not None:
                run.append(place(step, value))
            elif run:
                d += svg.line(run) + "h.1" * (len(run) == 1)
                run = []
        return svg.path(d, class_)


def _first_bad(steps: Sequence[int], loss: Values) -> int | None:
    return next((s for s, value in zip(steps, loss, strict=False) if value is None), None)


def _told(steps: Sequence[int], loss: Values) -> str:
    known = [value for value in loss if value is not None]
    if not known:
        return f"course of {plural(len(steps), 'step')}; no loss was recorded"
    first, last = known[0], known[-1]
    verb = "rises" if last > first else "falls" if last < first else "stays"
    bad = _first_bad(steps, loss)
    end = f" at step {steps[-1]}" if bad is None else f"; NaN or infinity from step {bad}"
    return f"loss {verb} from {svg.brief(first)} at step {steps[0]} to {svg.brief(last)}{end}"
