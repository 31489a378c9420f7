"""A training over steps: the loss, and a row of coloured cells a layer for each statistic.

A path holds all cells of a colour: each alone would be one of some 30,000 elements.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.charts.rows import NAMES, Row, mark_of, name_of, selection
from pytest_modelhealth.rendering.notation import plural

Reals = npt.NDArray[np.float64]

MOST_DEAD = 0.5  # a layer with a larger part of its units dead is named in red

# of more layers those are drawn that went wrong, of more steps neighbours share a column
MOST_ROWS, MOST_COLUMNS = 32, 240

LEVELS = 8
BAD, ZERO, MISSING = "bad-cell", "zero-cell", "no-cell"
_KEY = {BAD: "not finite", ZERO: "zero", MISSING: "no number"}

_ROW, _LOSS, _GAP = 14, 110, 62  # Pixels: a row, the loss, between two panels
_LEFT, _RIGHT = NAMES, svg.WIDTH - 8

_LOG_FROM = 30  # times the least: positive losses that differ by more have a log axis

_TITLES = {
    "parameter_gradient_norm": "gradient norm of parameters",
    "gradient_norm": "gradient norm of activations",
    "dead_fraction": "dead units, part of all",
    "update_ratio": "update ratio: norm of what a step changes by norm of the weights",
}


def course(data: Mapping[str, Any], anchor: str, events: Sequence[tuple[int, str]] = ()) -> Markup:
    """Return the loss of a training over steps, and a map of its layers for each statistic.

    `data` is as in the file of a run, with infinity for what was not finite. `events` are steps and
    layers at which something went wrong: a line through all panels with a number above, and the
    names of the layers in red.
    """
    steps = data["steps"]
    if not steps:
        return svg.nothing("course", "No step was recorded.")
    between = [(a + b) / 2 for a, b in pairwise(steps)]
    first, last = (between[0], between[-1]) if between else (steps[0] + 0.5, steps[0] - 0.5)
    edges = [2 * steps[0] - first, *between, 2 * steps[-1] - last]
    across = svg.linear_scale((edges[0], edges[-1]), _LEFT, _RIGHT, 8)
    top = bottom = float(_GAP - 12)
    body, marks = _loss(steps, data["loss"], across, top), ""
    bottom += _LOSS
    red = frozenset(layer for _, layer in events)
    for statistic in dict.fromkeys(chain(*data["layers"].values())):
        cells = _cells(
            {name: own[statistic] for name, own in data["layers"].items()}, statistic, red
        )
        if cells is None:
            continue
        y = bottom + _GAP
        bottom = y + _ROW * len(cells.rows)
        xs = [across.at(edge) for edge in [*edges[:-1][:: cells.every], edges[-1]]]
        parts = [*_map(cells, xs, y), *_ticks(across, bottom)] if cells.rows else [" "]
        body += svg.write(0, y - 28, cells.title, "strong")
        body += svg.tag("g", *parts, class_="panel cells")
        for at, row in enumerate(cells.rows):
            marks += mark_of(row, 0, y + at * _ROW, _RIGHT, _ROW, anchor)
    body += "".join(_events([step for step, _ in events], across, top, bottom))
    finding = f"loss and layers of {plural(len(steps), 'step')}"
    return svg.chart("course", (svg.WIDTH, bottom + 26), finding, body, marks)


def _events(steps: Sequence[int], across: svg.Scale, top: float, bottom: float) -> Iterator[str]:
    """Yield a line for each, and their numbers; those nearer than a number is wide share one."""
    groups: list[list[int]] = []
    for number, step in enumerate(steps, start=1):
        x = across.at(step)
        yield svg.path(f"M{svg.plain(x)} {top}V{svg.plain(bottom)}", "event")
        if groups and x - across.at(steps[groups[-1][0] - 1]) <= 14:
            groups[-1].append(number)
        else:
            groups.append([number])
    for group in groups:
        text = "-".join(str(number) for number in dict.fromkeys((group[0], group[-1])))
        x = across.at(steps[group[0] - 1])
        yield svg.write(x, top - 28, text, "alarm strong small middle")


def _ticks(across: svg.Scale, bottom: float) -> Iterator[str]:
    """Yield the numbers of steps below a panel."""
    for x, text in across.ticks:
        if "." not in text and x <= _RIGHT - 40:
            yield svg.path(f"M{svg.plain(x)} {svg.plain(bottom)}v3", "axis-line")
            yield svg.write(x, bottom + 14, text, "quiet small middle")


# The loss


def _loss(steps: Sequence[int], loss: Sequence[float | None], across: svg.Scale, top: float) -> str:
    """Return the line of the loss, which breaks where there is no number, and its axes."""
    bottom = top + _LOSS
    known = [value for value in loss if value is not None]
    is_log = min(known, default=0) > 0 and max(known) > _LOG_FROM * min(known)
    scale = (svg.log_scale if is_log else svg.linear_scale)(known, bottom - 3, top + 3, 4)
    parts = [svg.path(f"M{_LEFT} {bottom}H{_RIGHT}", "axis-line"), *_ticks(across, bottom)]
    parts.append(svg.write(_RIGHT, bottom + 14, "step", "quiet small end"))
    for y, text in scale.ticks:
        parts.append(svg.path(f"M{_LEFT} {svg.plain(y)}H{_RIGHT}", "rule"))
        parts.append(svg.write(_LEFT - 5, y + 3.5, text, "quiet small end"))
    d = ""
    for is_known, run in groupby(zip(steps, loss, strict=True), lambda pair: pair[1] is not None):
        if is_known:
            points = [(across.at(step), scale.at(value or 0.0)) for step, value in run]
            d += svg.line(points) + "h.1" * (len(points) == 1)
    parts.append(svg.path(d, "line first"))
    bad = next((s for s, value in zip(steps, loss, strict=True) if value is None), None)
    if not known:
        why = "no finite loss was given to step_end()"
        parts.append(svg.write(_LEFT + 8, top + 40, why, "quiet"))
    elif bad is not None:
        x = across.at(bad)
        class_, aside = ("alarm end", -8) if x > svg.WIDTH - 160 else ("alarm", 8)
        parts.append(svg.cross(x, top + 5))
        parts.append(svg.write(x + aside, top + 9, f"NaN or inf from step {bad}", class_))
    title = svg.write(0, top - 12, "loss", "strong")
    return title + svg.tag("g", *parts, class_="panel loss")


# A map


class Cells(NamedTuple):
    """A map with a row a layer, and a column a step, or several."""

    title: str
    rows: Sequence[Row]
    # (rows, columns), of most statistics the powers of ten: NaN where nothing was seen, infinity
    # for what is not finite, minus infinity for the power of zero
    values: Reals
    limits: tuple[float, float]  # of the faintest and of the deepest colour
    is_log: bool
    every: int  # steps in a column

    def kinds(self, values: Reals) -> npt.NDArray[np.str_]:
        """Return the classes of cells with these values."""
        low, high = self.limits
        levels = np.nan_to_num((values - low) / (high - low) * LEVELS)
        levels = np.clip(levels, 0, LEVELS - 1).astype(int)
        kinds = np.char.add("first level-", levels.astype(str))
        kinds[np.isneginf(values)] = ZERO
        kinds[np.isposinf(values)] = BAD
        kinds[np.isnan(values)] = MISSING
        return kinds


def _cells(
    layers: Mapping[str, Sequence[float | None]], statistic: str, red: frozenset[str]
) -> Cells | None:
    """Return the map of the layers that have something to show, if there are any.

    Of steps that share a column the worst is shown: what is not finite first, then what is farthest
    from the rest.
    """
    every = {name: np.array(own, float) for name, own in layers.items()}
    known = {name: own for name, own in every.items() if not np.isnan(own).all()}
    title, is_log = _TITLES.get(statistic, svg.words(statistic)), statistic != "dead_fraction"
    limits, middle, most = (0.0, 1.0), 0.0, math.inf if is_log else MOST_DEAD
    if not is_log:
        seen, known = len(known), {name: own for name, own in known.items() if own.any()}
        if none := seen - len(known):
            title += f" ({plural(none, 'further layer' if known else 'layer')} never had one)"
    elif not known:
        return None
    else:
        with np.errstate(divide="ignore", invalid="ignore"):
            known = {name: np.log10(own) for name, own in known.items()}
        powers = np.concatenate([*known.values()])
        powers = powers[np.isfinite(powers)] if np.isfinite(powers).any() else np.zeros(1)
        middle = np.median(powers)  # at most six powers of ten to both sides of it have a colour
        low, high = np.clip([powers.min(), powers.max()], middle - 6, middle + 6).tolist()
        spare = max(0.0, 1 - (high - low)) / 2
        limits = low - spare, high + spare
    rows = []
    for name, own in known.items():
        is_wrong = bool((np.isinf(own) | (own > most)).any())
        rows.append(Row(name, name or "(model)", is_found=is_wrong or name in red))
    shown = selection([row.is_found for row in rows], MOST_ROWS)
    if shown and len(shown) < len(rows):
        title += f" ({len(shown)} of {len(rows):,} layers, those that went wrong first)"
    values, steps = np.array([known[rows[at].name] for at in shown]), 1
    if shown:
        steps = math.ceil(values.shape[1] / MOST_COLUMNS)
        far = np.minimum(np.abs(values - middle), 1e9)  # a zero, too
        far = np.where(np.isnan(values), -1.0, np.where(np.isposinf(values), np.inf, far))
        at = np.arange(len(values))
        starts = range(0, values.shape[1], steps)
        worst = [start + far[:, start : start + steps].argmax(axis=1) for start in starts]
        values = np.array([values[at, column] for column in worst]).T
    return Cells(title, [rows[at] for at in shown], values, limits, is_log, steps)


def _map(cells: Cells, xs: Sequence[float], y: float) -> Iterator[str]:
    """Yield the cells, the names of the rows, and the key."""
    kinds = cells.kinds(cells.values)
    drawn: dict[str, str] = defaultdict(str)
    for row, of_row in enumerate(kinds.tolist()):
        at, top = 0, svg.plain(y + row * _ROW)
        for kind, run in groupby(of_row):
            end = at + sum(1 for _ in run)
            left, wide = svg.plain(xs[at]), svg.plain(xs[end] - xs[at])
            drawn[kind] += f"M{left} {top}h{wide}v{_ROW}h-{wide}z"
            at = end
    yield from (svg.path(d, f"cell {kind}") for kind, d in sorted(drawn.items()))
    for at, named in enumerate(cells.rows):
        yield from name_of(named, y + (at + 0.5) * _ROW)
    least, most = (svg.brief(10**end) if cells.is_log else f"{end:.0%}" for end in cells.limits)
    key = [(name, [kind]) for kind, name in _KEY.items() if (kinds == kind).any()]
    x = float(_RIGHT)
    for name, own in [*key, (most, cells.kinds(np.linspace(*cells.limits, LEVELS)).tolist())]:
        yield svg.write(x, y - 12, name, "small end")
        x -= len(name) * svg.LETTER * 0.93 + 4
        for kind in reversed(own):
            x -= 10
            yield svg.rect(x, y - 20, 10, 9, f"cell {kind}")
        x -= 12
    yield svg.write(x + 8, y - 12, least, "small end")
