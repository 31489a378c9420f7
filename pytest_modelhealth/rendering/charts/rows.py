"""Layers from top to bottom in execution order, with log axes beside their names.

Where rows would be thinner than 3 px, several layers share a band, through which the line goes from
the least to the greatest of them: no layer is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.notation import plural

NAMES, ROW, HEAD, FOOT, GAP = 196, 18, 42, 22, 22
TALLEST = 40 * ROW
GUTTER = 16
"""Pixels beside an axis, for zeros and for what is not finite."""

NAME_PITCH = 13
MOST_NAMED = 20
"""Layers with findings that are named before others are."""


class Row(NamedTuple):
    """A layer: its name, and what a chart says of it."""

    name: str
    label: str
    title: str
    is_culprit: bool = False
    is_found: bool = False
    is_tinted: bool = False
    note: str = ""


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


class Band(NamedTuple):
    """Neighbouring layers that are drawn at one height."""

    layers: slice
    y: float
    height: float


def rows_chart(
    kind: str, anchor: str, rows: Sequence[Row], panels: Sequence[Panel], finding: str
) -> Markup:
    """Return a chart of layers with panels beside their names."""
    pitch = min(ROW, TALLEST / len(rows))
    size = max(1, math.ceil(3 / pitch))
    starts = range(0, len(rows), size)
    ends = [min(start + size, len(rows)) for start in starts]
    bands = [
        Band(slice(start, end), HEAD + (start + end) / 2 * pitch, (end - start) * pitch)
        for start, end in zip(starts, ends, strict=True)
    ]
    bottom = HEAD + pitch * len(rows)
    named = named_rows(rows, pitch)
    body, marks = [], []
    for band in bands:
        members = rows[band.layers]
        chief = max(members, key=lambda row: (row.is_culprit, row.is_found))
        place = 0, band.y - band.height / 2, svg.WIDTH, band.height
        if any(row.is_tinted for row in members):
            body.append(svg.rect(*place, "tinted-band"))
        if chief.is_culprit:
            body.append(svg.rect(*place, "culprit-band"))
        several = f"{plural(len(members), 'layer')}, from {members[0].label}; of them:\n"
        title = several * (len(members) > 1) + chief.title
        is_reached = not named.isdisjoint(range(band.layers.start, band.layers.stop))
        link = svg.link_to(anchor, chief.name)
        marks.append(svg.mark(title, svg.rect(*place, "mark"), link, is_reached=is_reached))
    width = (svg.WIDTH - NAMES - GAP * (len(panels) - 1) - 10) / len(panels)
    for index, panel in enumerate(panels):
        body += _panel(panel, bands, NAMES + index * (width + GAP), width, bottom)
    for index in sorted(named):
        body += name_of(rows[index], HEAD + (index + 0.5) * pitch + 3.8)
    height = bottom + FOOT
    if any(row.note for row in rows):
        notes = "(+) only in the candidate, (\N{MINUS SIGN}) only in the reference"
        body.append(svg.write(0, height + 14, notes, "quiet small"))
        height += 18
    return svg.chart(kind, (svg.WIDTH, height), finding, "".join(body), "".join(marks))


def named_rows(rows: Sequence[Row], pitch: float) -> set[int]:
    """Return which names stand far enough apart to be read: what was found first."""
    wanted = sorted(range(len(rows)), key=lambda at: not rows[at].is_culprit)[:1]
    wanted += [at for at, row in enumerate(rows) if row.is_found or row.note][:MOST_NAMED]
    step = 1 if pitch >= NAME_PITCH else math.ceil(20 / pitch)
    reach = math.ceil(NAME_PITCH / pitch - 0.01)
    chosen: set[int] = set()
    for index in (*wanted, 0, len(rows) - 1, *range(0, len(rows), step)):
        if chosen.isdisjoint(range(index - reach + 1, index + reach)):
            chosen.add(index)
    return chosen


def name_of(row: Row, y: float) -> Iterator[str]:
    """Yield the name of a row, and a sign beside that of the culprit."""
    note = f" {row.note}" if row.note else ""
    text = svg.fitted(row.label, 24 - len(note) - 3 * row.is_culprit) + note
    is_red = row.is_culprit or row.is_found
    class_ = f"end name{' alarm' * is_red}{' culprit' * row.is_culprit}"
    yield svg.write(NAMES - 12, y, text, class_)
    if row.is_culprit:
        yield svg.write(1, y, "\N{BLACK RIGHT-POINTING TRIANGLE}", "alarm")


def _panel(
    panel: Panel, bands: Sequence[Band], x: float, width: float, bottom: float
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
    for band in bands if panel.ranges else ():
        if (most := max(panel.ranges[band.layers])) > 0:
            height = max(1.0, band.height - 4)
            place = left, band.y - height / 2, scale.at(most) - left, height
            yield svg.rect(*place, "ranges")
    for series in panel.series:
        parts = [*_series(series, bands, scale, low, high), " "]
        yield svg.tag("g", *parts, class_=f"series {series.key} {series.style}")
        if any(value is not None for value in series.values):
            glyph = "\u25c6" if series.style == "second" else "\u25cf"
            text = f"{glyph} {series.name}"
            yield svg.write(x, 30, text, f"small coloured {series.style}")
            x += 12 + len(text) * svg.LETTER * 0.93
    if any(panel.ranges):
        yield svg.write(x, 30, "\u2592 explained by rounding", "small quiet")


def _series(
    series: Series, bands: Sequence[Band], scale: svg.Scale, low: float, high: float
) -> Iterator[str]:
    """Yield the lines through a series, which zeros and NaN break, and these beside them."""
    runs: list[list[tuple[float, float]]] = [[]]
    for band in bands:
        values = [value for value in series.values[band.layers] if value is not None]
        if positive := [value for value in values if value > 0]:
            ends = dict.fromkeys((min(positive), max(positive)))
            runs[-1] += [(scale.at(value), band.y) for value in ends]
        elif values:
            runs.append([])
        if 0 in values:
            yield _point(series, low, band.y, "zero")
        if any(map(math.isnan, values)):
            yield svg.cross(high, band.y)
    for run in runs:
        if len(run) > 1:
            yield svg.path(svg.line(run), f"line {series.style}")
        if bands[0].height >= 6 or len(run) == 1:  # a line only, where there is no room for points
            yield from (_point(series, x, y, "point") for x, y in run)


def _point(series: Series, x: float, y: float, class_: str) -> str:
    if series.style == "second":
        return svg.path(f"M{svg.plain(x)} {svg.plain(y - 3.5)}l3.5 3.5l-3.5 3.5l-3.5 -3.5z", class_)
    return svg.tag("circle", cx=x, cy=y, r=2.8, class_=class_)


# Scale through depth

_MEASURES = {
    "activation rms": "activations",
    "gradient norm": "gradients",
    "parameter gradient norm": "parameter_gradients",
}


def depth(
    layers: Sequence[Mapping[str, Any]], violations: Sequence[Mapping[str, Any]], anchor: str
) -> Markup:
    """Return a chart of how large activations and gradients are through the depth of a model."""
    found = {violation["layer"] for violation in violations}
    containers = svg.containers_of(layers)
    shown = []
    for layer in layers:
        roles = {tensor["role"] for tensor in layer["tensors"]}
        is_leaf = layer["name"] not in containers or "parameter_gradients" in roles
        if roles.intersection(_MEASURES.values()) and (is_leaf or layer["name"] in found):
            shown.append(layer)
    if not shown:
        return svg.nothing("depth", "No activations and no gradients were measured.")
    values = {name: [_value(layer, name) for layer in shown] for name in _MEASURES}
    rows = []
    for index, layer in enumerate(shown):
        told = [svg.label_of(layer)]
        told += [
            f"{name} {svg.brief(own[index])}"
            for name, own in values.items()
            if own[index] is not None
        ]
        told += [v["message"] for v in violations if v["layer"] == layer["name"]]
        is_culprit = bool(violations) and violations[0]["layer"] == layer["name"]
        is_found = layer["name"] in found
        rows.append(Row(layer["name"], told[0], "\n".join(told), is_culprit, is_found))
    scale, gradients, parameters = values.values()
    own = Series("parameter_gradients", "of parameters", parameters, "second")
    panels = [
        Panel("activation scale", [Series("activations", "rms", scale)]),
        Panel("gradient norm (L2)", [own, Series("gradients", "of activations", gradients)]),
    ]
    labels = [row.label for row in rows]
    flowing = gradients if any(gradients) else parameters
    said = [
        *_change("activation rms", scale, labels),
        *_change("gradient norm", flowing[::-1], labels[::-1]),
    ]
    if violations:
        said.append(f"culprit {svg.label_of(violations[0])}: {svg.words(violations[0]['check'])}")
    finding = "; ".join(said) or "no finite activations and gradients"
    return rows_chart("depth", anchor, rows, panels, finding)


def _value(layer: Mapping[str, Any], name: str) -> float | None:
    """Return what the tensors of a role measure together; NaN where one is not finite."""
    tensors = [tensor for tensor in layer["tensors"] if tensor["role"] == _MEASURES[name]]
    if not tensors:
        return None
    if any(t["nan"] or t["inf"] or not svg.finite(t["norm"]) for t in tensors):
        return math.nan
    norm = math.hypot(*(tensor["norm"] for tensor in tensors))
    count = sum(tensor["count"] for tensor in tensors)
    return norm / math.sqrt(max(1, count)) if name.endswith("rms") else norm


def _change(name: str, values: Sequence[float | None], labels: Sequence[str]) -> Iterator[str]:
    """Yield from where to where a value rises or falls, and in how many layers it is zero."""
    pairs = zip(values, labels, strict=True)
    seen = [(v, label) for v, label in pairs if v is not None and not math.isnan(v)]
    if seen:
        (first, start), (last, end) = seen[0], seen[-1]
        verb = "rises" if last > first else "falls" if last < first else "goes"
        yield f"{name} {verb} from {svg.brief(first)} at {start} to {svg.brief(last)} at {end}"
    if zeros := sum(value == 0 for value, _ in seen):
        yield f"{name} is zero in {plural(zeros, 'layer')}"


# Errors through depth


def errors(comparison: Mapping[str, Any], anchor: str) -> Markup:
    """Return a chart of how far a candidate is from its reference, and what rounding explains."""
    divergence = comparison["divergence"]
    layers = [
        layer
        for layer in comparison["layers"]
        if layer["tensors"]
        or None in (layer["reference"], layer["candidate"])
        or _diverges_first(layer, divergence)
    ]
    if not layers:
        return svg.nothing("errors", "No layers were compared.")
    passes = {
        "activations": [_worst(layer, "activations", "outputs") for layer in layers],
        "gradients": [_worst(layer, "gradients", "parameter_gradients") for layer in layers],
    }
    panels = [
        Panel(
            f"{name}: relative error",
            [Series(name, "error", [_error(tensor) for tensor in worst], style)],
            [_allowed(tensor) for tensor in worst],
        )
        for (name, worst), style in zip(passes.items(), ("first", "second"), strict=True)
    ]
    rows, said = [], []
    for index, layer in enumerate(layers):
        name = layer["candidate"] if layer["reference"] is None else layer["reference"]
        label, note = svg.label_of(layer, name), ""
        told = [label]
        if layer["reference"] is None:
            told, note = [label, "only in the candidate"], "(+)"
        elif layer["candidate"] is None:
            told, note = [label, "only in the reference"], "(\N{MINUS SIGN})"
        for kind, worst in passes.items():
            if (tensor := worst[index]) is not None:
                error, allowed = svg.brief(tensor["error"]), svg.brief(_allowed(tensor))
                told.append(f"{kind}: error {error}, noise explains up to {allowed}")
                told += [tensor["problem"]] if tensor["problem"] else []
        is_first = _diverges_first(layer, divergence)
        if is_first:
            said = [f"first divergence at {svg.label_of(divergence)}", *told[1:]]
            told.append(divergence["story"] or "the first divergence")
        title = "\n".join(told)
        rows.append(Row(name, label, title, is_first, is_tinted=layer["diverged"], note=note))
    differing = sum(layer["diverged"] for layer in layers)
    said.append(f"{differing} of {plural(len(layers), 'layer')} differ")
    return rows_chart("errors", anchor, rows, panels, "; ".join(said))


def _diverges_first(layer: Mapping[str, Any], divergence: Mapping[str, Any] | None) -> bool:
    if divergence is None:
        return False
    if layer["reference"] is None:
        return layer["candidate"] in (divergence["layer"], divergence["candidate"])
    return bool(layer["reference"] == divergence["layer"])


def _worst(layer: Mapping[str, Any], *roles: str) -> Mapping[str, Any] | None:
    """Return the tensor furthest beyond its noise; a ratio of ``None`` is infinite."""
    tensors = [tensor for tensor in layer["tensors"] if tensor["role"] in roles]
    return max(
        tensors, key=lambda one: math.inf if one["ratio"] is None else one["ratio"], default=None
    )


def _allowed(tensor: Mapping[str, Any] | None) -> float:
    if tensor is None or not svg.finite(tensor["noise"]) or not svg.finite(tensor["limit"]):
        return 0.0
    return float(tensor["noise"] * tensor["limit"])


def _error(tensor: Mapping[str, Any] | None) -> float | None:
    if tensor is None:
        return None
    return float(tensor["error"]) if svg.finite(tensor["error"]) else math.nan
