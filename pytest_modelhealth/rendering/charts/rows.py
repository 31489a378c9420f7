"""Layers from top to bottom in execution order, with log axes beside their names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from markupsafe import Markup

from pytest_modelhealth.alignment.result import containers
from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.notation import plural

NAMES, ROW, HEAD, FOOT, GAP = 196, 18, 42, 22, 22
GUTTER = 16  # pixels beside an axis, for zeros and for what is not finite
MOST = 64  # of more layers those with findings are drawn, and of the others every n-th
TALLEST = 900  # pixels of all rows, which stay on a page of paper


class Row(NamedTuple):
    """A layer: its name, what is written, and whether something is found in it."""

    name: str
    label: str
    is_culprit: bool = False
    is_found: bool = False


class Series(NamedTuple):
    """A value of each layer: none, NaN for what is not finite, or a number from 0 on."""

    key: str
    name: str
    values: Sequence[float | None]
    style: str = "first"


class Panel(NamedTuple):
    """An axis with its series; `ranges` are bars up to there."""

    title: str
    series: Sequence[Series]
    ranges: Sequence[float] = ()


def selection(weights: Sequence[int], most: int = MOST) -> list[int]:
    """Return which of the layers are drawn, in order: the heaviest, and then every n-th."""
    every = max(1, math.ceil(len(weights) / most))
    wanted = sorted(range(len(weights)), key=lambda at: (-weights[at], at % every, at))
    return sorted(wanted[:most])


def rows_chart(
    kind: str,
    anchor: str,
    rows: Sequence[Row],
    panels: Sequence[Panel],
    finding: str,
    footnote: str,
) -> Markup:
    """Return a chart of layers with panels beside their names."""
    high = min(ROW, TALLEST / len(rows))
    ys = [HEAD + (index + 0.5) * high for index in range(len(rows))]
    bottom = HEAD + high * len(rows)
    body, marks = [], []
    for row, y in zip(rows, ys, strict=True):
        place = 0, y - high / 2, svg.WIDTH, high
        if row.is_culprit or row.is_found:
            body.append(svg.rect(*place, "culprit-band" if row.is_culprit else "tinted-band"))
        marks.append(mark_of(row, *place, anchor))
        body += name_of(row, y)
    width = (svg.WIDTH - NAMES - GAP * (len(panels) - 1) - 10) / len(panels)
    for index, panel in enumerate(panels):
        body += _panel(panel, ys, NAMES + index * (width + GAP), width, bottom)
    height = bottom + FOOT
    notes = [footnote, *["\u25b6 the culprit"] * any(row.is_culprit for row in rows)]
    notes += ["tinted: other findings"] * any(r.is_found and not r.is_culprit for r in rows)
    if footnote := "; ".join(filter(None, notes)):
        body.append(svg.write(0, height + 14, footnote, "quiet small"))
        height += 18
    return svg.chart(kind, (svg.WIDTH, height), finding, "".join(body), "".join(marks))


def mark_of(row: Row, x: float, y: float, width: float, height: float, anchor: str) -> str:
    """Return a link to the layer of a row."""
    shape = svg.rect(x, y, width, height, "mark")
    return svg.mark(row.label, shape, svg.link_to(anchor, row.name))


def name_of(row: Row, y: float) -> Iterator[str]:
    """Yield the name of a row, and a sign beside that of the culprit."""
    is_red = row.is_culprit or row.is_found
    class_ = f"end name{' alarm' * is_red}{' culprit' * row.is_culprit}"
    label = svg.fitted(row.label, 24 - 3 * row.is_culprit)
    yield svg.write(NAMES - 12, y + 3.8, label, class_)
    if row.is_culprit:
        yield svg.write(1, y + 3.8, "\N{BLACK RIGHT-POINTING TRIANGLE}", "alarm")


def _panel(
    panel: Panel, ys: Sequence[float], x: float, width: float, bottom: float
) -> Iterator[str]:
    values = [value for series in panel.series for value in series.values if value is not None]
    positive = [value for value in (*values, *panel.ranges) if value > 0]
    has_zeros, has_bad = 0 in values, any(map(math.isnan, values))
    yield svg.write(x, 12, panel.title, "strong")
    if not values and not positive:
        yield svg.write(x, HEAD + 14, "none were measured", "quiet slanted")
        return
    left, right = x + GUTTER * has_zeros, x + width - GUTTER * has_bad
    scale = svg.log_scale(positive, left, right, max(3, int((right - left) / 46)))
    axis = [svg.rect(x, HEAD, width, bottom - HEAD, "rule")]
    for at, text in scale.ticks if positive else ():
        axis.append(svg.path(f"M{svg.plain(at)} {HEAD}V{svg.plain(bottom)}", "rule"))
        if (not has_zeros or at > left + 14) and (not has_bad or at < right - 16):
            axis.append(svg.write(at, bottom + 15, text, "quiet small middle"))
    low, high = x + GUTTER / 2, x + width - GUTTER / 2
    axis += [svg.write(low, bottom + 15, "0", "quiet small middle")] * has_zeros
    axis += [svg.write(high - 2, bottom + 15, "NaN", "alarm small middle")] * has_bad
    yield svg.tag("g", *axis, class_="axis")
    pitch = (bottom - HEAD) / len(ys)
    for y, most in zip(ys, panel.ranges, strict=False):
        if most > 0:
            yield svg.rect(left, y - pitch / 2 + 2, scale.at(most) - left, pitch - 4, "ranges")
    for series in panel.series:
        parts = [*_series(series, ys, scale, low, high), " "]
        yield svg.tag("g", *parts, class_=f"series {series.key} {series.style}")
        glyph = "\u25c6" if series.style == "second" else "\u25cf"
        yield svg.write(x, 30, f"{glyph} {series.name}", f"small coloured {series.style}")
        x += 26 + len(series.name) * svg.LETTER * 0.93
    if any(panel.ranges):
        yield svg.write(x, 30, "\u2592 explained by rounding", "small quiet")


def _series(
    series: Series, ys: Sequence[float], scale: svg.Scale, low: float, high: float
) -> Iterator[str]:
    """Yield the lines through a series, which zeros and NaN break, and these beside them."""
    seen = [(v, y) for v, y in zip(series.values, ys, strict=True) if v is not None]
    for is_positive, run in groupby(seen, lambda pair: pair[0] > 0):
        if is_positive:
            places = [(scale.at(value), y) for value, y in run]
            yield svg.path(svg.line(places), f"line {series.style}") if len(places) > 1 else ""
            yield from (_point(series, x, y, "point") for x, y in places)
        else:
            for value, y in run:
                yield svg.cross(high, y) if math.isnan(value) else _point(series, low, y, "zero")


def _point(series: Series, x: float, y: float, class_: str) -> str:
    if series.style == "second":
        return svg.path(f"M{svg.plain(x)} {svg.plain(y - 3.5)}l3.5 3.5l-3.5 3.5l-3.5 -3.5z", class_)
    return svg.tag("circle", cx=x, cy=y, r=2.8, class_=class_)


# Scale through depth

_MEASURES = {
    "activations": ("rms", "first"),
    "gradients": ("of activations", "first"),
    "parameter_gradients": ("of parameters", "second"),
}


def depth(
    layers: Sequence[Mapping[str, Any]], violations: Sequence[Mapping[str, Any]], anchor: str
) -> Markup:
    """Return a chart of how large activations and gradients are through the depth of a model."""
    found = {violation["layer"] for violation in violations}
    holders = containers(layer["name"] for layer in layers)
    every = []
    for layer in layers:
        roles = {tensor["role"] for tensor in layer["tensors"]}
        is_leaf = layer["name"] not in holders or "parameter_gradients" in roles
        if roles.intersection(_MEASURES) and (is_leaf or layer["name"] in found):
            every.append(layer)
    if not every:
        return svg.nothing("depth", "No activations and no gradients were measured.")
    culprit = violations[0]["layer"] if violations else None
    weights = [(layer["name"] == culprit) + (layer["name"] in found) for layer in every]
    shown = [every[at] for at in selection(weights)]
    rows = [
        Row(each["name"], svg.label_of(each), each["name"] == culprit, each["name"] in found)
        for each in shown
    ]
    scale, gradients, parameters = (
        Series(role, name, [_value(layer, role) for layer in shown], style)
        for role, (name, style) in _MEASURES.items()
    )
    panels = [
        Panel("activation scale", [scale]),
        Panel("gradient norm (L2)", [parameters, gradients]),
    ]
    finding = f"activation scale and gradient norms of {plural(len(every), 'layer')}"
    finding += svg.accused(violations)
    return rows_chart("depth", anchor, rows, panels, finding, _part(shown, every))


def _part(shown: Sequence[object], every: Sequence[object]) -> str:
    is_part = len(shown) < len(every)
    return f"{len(shown)} of {len(every):,} layers, those with findings first" * is_part


def _value(layer: Mapping[str, Any], role: str) -> float | None:
    """Return what the tensors of a role measure together; NaN where one is not finite."""
    tensors = [tensor for tensor in layer["tensors"] if tensor["role"] == role]
    if not tensors:
        return None
    if any(t["nan"] or t["inf"] or not svg.finite(t["norm"]) for t in tensors):
        return math.nan
    norm = math.hypot(*(tensor["norm"] for tensor in tensors))
    count = sum(tensor["count"] for tensor in tensors)
    return norm / math.sqrt(max(1, count)) if role == "activations" else norm


# Errors through depth


def errors(comparison: Mapping[str, Any], anchor: str) -> Markup:
    """Return a chart of how far a candidate is from its reference, and what rounding explains."""
    divergence = comparison["divergence"]
    every = [
        layer
        for layer in comparison["layers"]
        if layer["tensors"] or None in (layer["reference"], layer["candidate"])
    ]
    if not every:
        return svg.nothing("errors", "No layers were compared.")
    first = () if divergence is None else (divergence["layer"], divergence["candidate"])
    names = [one["candidate"] if one["reference"] is None else one["reference"] for one in every]
    weights = [(n in first) + one["diverged"] for n, one in zip(names, every, strict=True)]
    layers = [every[at] for at in selection(weights)]
    passes = {
        "activations": [_worst(layer, "activations", "outputs") for layer in layers],
        "gradients": [_worst(layer, "gradients", "parameter_gradients") for layer in layers],
    }
    panels = []
    for (name, worst), style in zip(passes.items(), ("first", "second"), strict=True):
        values = [None if one is None else _number(one["error"]) for one in worst]
        allowed = [_number(o["noise"]) * _number(o["limit"]) if o else 0.0 for o in worst]
        ranges = [0.0 if math.isnan(one) else one for one in allowed]
        series = [Series(name, "error", values, style)]
        panels.append(Panel(f"{name}: relative error", series, ranges))
    rows, notes = [], [_part(layers, every)]
    finding = f"{sum(layer['diverged'] for layer in every)} of {plural(len(every), 'layer')} differ"
    for layer in layers:
        name, sign = layer["reference"], ""
        if None in (layer["reference"], layer["candidate"]):
            sign = " (+)" if name is None else " (\N{MINUS SIGN})"
            name = layer["candidate"] if name is None else name
            notes[1:] = ["(+) only in the candidate, (\N{MINUS SIGN}) only in the reference"]
        rows.append(Row(name, svg.label_of(layer, name) + sign, name in first))
        finding += f"; first divergence at {rows[-1].label}" * (name in first)
    return rows_chart("errors", anchor, rows, panels, finding, "; ".join(filter(None, notes)))


def _worst(layer: Mapping[str, Any], *roles: str) -> Mapping[str, Any] | None:
    """Return the tensor furthest beyond its noise; a ratio of ``None`` is infinite."""
    tensors = [tensor for tensor in layer["tensors"] if tensor["role"] in roles]
    return max(
        tensors, key=lambda one: math.inf if one["ratio"] is None else one["ratio"], default=None
    )


def _number(value: float | None) -> float:
    return float(value) if value is not None and svg.finite(value) else math.nan
