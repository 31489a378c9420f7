"""Layers from top to bottom in execution order, with log axes beside their names.

Where rows would be thinner than 3 px, several layers share a band, which shows the least, the
greatest and the geometric mean of them: no layer is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


class Value(NamedTuple):
    """What a layer has: a number from 0 on, if there is one, and whether it has NaN or infinity."""

    number: float | None
    bad: bool = False


@dataclass(frozen=True)
class Row:
    """A layer: its name, and what a chart says of it."""

    name: str
    label: str
    title: str
    is_culprit: bool = False
    is_found: bool = False
    is_tinted: bool = False
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A value of each layer; `whiskers` are numbers that lines lead to."""

    key: str
    name: str
    values: Sequence[Value | None]
    style: str = "first"
    whisker_name: str = ""
    whiskers: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    """An axis with its series; `ranges` are bars up to there, `empty` is said without values."""

    title: str
    series: Sequence[Series]
    empty: str
    range_name: str = ""
    ranges: Sequence[float] = ()


class Band(NamedTuple):
    """Neighbouring layers that are drawn at one height."""

    layers: slice
    y: float
    height: float

    @property
    def has_points(self) -> bool:
        """Whether there is room for points; a line only, where there is none."""
        return self.height >= 6


def rows_chart(
    kind: str,
    anchor: str,
    rows: Sequence[Row],
    panels: Sequence[Panel],
    finding: str,
    footnote: str = "",
) -> Markup:
    """Return a chart of layers with panels beside their names."""
    pitch = min(ROW, TALLEST / len(rows))
    size = max(1, math.ceil(3 / pitch))
    bands = []
    for start in range(0, len(rows), size):
        end = min(start + size, len(rows))
        y = HEAD + (start + end) / 2 * pitch
        bands.append(Band(slice(start, end), y, (end - start) * pitch))
    bottom = HEAD + pitch * len(rows)
    named = named_rows(rows, pitch)
    body, marks = [], []
    for band in bands:
        held = rows[band.layers]
        chief = next((row for row in held if row.is_culprit or row.is_found), held[0])
        across = {"x": 0, "y": band.y - band.height / 2, "width": svg.WIDTH, "height": band.height}
        if any(row.is_tinted for row in held):
            body.append(svg.tag("rect", **across, class_="tinted-band"))
        if any(row.is_culprit for row in held):
            body.append(svg.tag("rect", **across, class_="culprit-band"))
        several = f"{plural(len(held), 'layer')}, from {held[0].label}; of them:\n"
        title = (several if len(held) > 1 else "") + chief.title
        is_reached = not named.isdisjoint(range(band.layers.start, band.layers.stop))
        shape = svg.tag("rect", **across, class_="mark")
        marks.append(svg.mark(title, shape, svg.link_to(anchor, chief.name), is_reached=is_reached))
    width = (svg.WIDTH - NAMES - GAP * (len(panels) - 1) - 10) / len(panels)
    for index, panel in enumerate(panels):
        body += _panel(panel, bands, NAMES + index * (width + GAP), width, bottom)
    for index in sorted(named):
        body += name_of(rows[index], HEAD + (index + 0.5) * pitch + 3.8)
    if footnote:
        body.append(svg.write(0, bottom + FOOT + 14, footnote, "quiet small"))
    height = bottom + FOOT + (18 if footnote else 0)
    return svg.chart(kind, (svg.WIDTH, height), finding, "".join(body), "".join(marks))


def named_rows(rows: Sequence[Row], pitch: float) -> set[int]:
    """Return which names stand far enough apart to be read: what was found first."""
    found = [index for index, row in enumerate(rows) if row.is_found or row.note]
    step = 1 if pitch >= NAME_PITCH else math.ceil(20 / pitch)
    reach = math.ceil(NAME_PITCH / pitch - 0.01)
    chosen: set[int] = set()
    for index in (
        *(index for index, row in enumerate(rows) if row.is_culprit),
        *found[:MOST_NAMED], 0, len(rows) - 1, *range(0, len(rows), step),
    ):  # fmt: skip
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
    seen = [value for series in panel.series for value in series.values if value is not None]
    numbers = [*(value.number for value in seen), *panel.ranges]
    positive = [n for n in (*numbers, *(w for s in panel.series for w in s.whiskers)) if n]
    has_zeros, has_bad = any(v.number == 0 for v in seen), any(v.bad for v in seen)
    yield svg.write(x, 12, panel.title, "strong")
    if not positive and not has_zeros and not has_bad:
        yield svg.write(x, HEAD + 14, panel.empty, "quiet slanted")
        return
    left, right = x + GUTTER * has_zeros, x + width - GUTTER * has_bad
    scale = svg.log_scale(positive, left, right, max(3, int((right - left) / 46)))
    axis = [svg.tag("rect", x=x, y=HEAD, width=width, height=bottom - HEAD, class_="rule")]
    for at, text in scale.ticks if positive else ():
        axis.append(svg.path(f"M{svg.plain(at)} {HEAD}V{svg.plain(bottom)}", "rule"))
        if (not has_zeros or at > left + 14) and (not has_bad or at < right - 16):
            axis.append(svg.write(at, bottom + 15, text, "quiet small middle"))
    low, high = x + GUTTER / 2, x + width - GUTTER / 2
    axis += [svg.write(low, bottom + 15, "0", "quiet small middle")] * has_zeros
    axis += [svg.write(high - 2, bottom + 15, "NaN", "alarm small middle")] * has_bad
    yield svg.tag("g", *axis, class_="axis")
    d = ""
    for band in bands if panel.ranges else ():
        most = max(panel.ranges[band.layers])
        if most > 0:
            height = max(1.0, band.height - 4 * band.has_points)
            top, end = svg.plain(band.y - height / 2), svg.plain(max(left, scale.at(most)))
            d += f"M{svg.plain(left)} {top}H{end}v{svg.plain(height)}H{svg.plain(left)}z"
    yield svg.path(d, "ranges") if d else ""
    for series in panel.series:
        parts = [*_series(series, bands, scale, low, high), " "]
        yield svg.tag("g", *parts, class_=f"series {series.key} {series.style}")
    for glyph, name, class_ in _legend(panel):
        yield svg.write(x, 30, f"{glyph} {name}", f"small {class_}")
        x += 26 + len(name) * svg.LETTER * 0.93


def _legend(panel: Panel) -> Iterator[tuple[str, str, str]]:
    for series in panel.series:
        if any(value is not None for value in series.values):
            class_ = f"coloured {series.style}"
            yield "\u25c6" if series.style == "second" else "\u25cf", series.name, class_
            if any(series.whiskers):
                yield "\u2500\u2524", series.whisker_name, class_
    if any(panel.ranges):
        yield "\u2592", panel.range_name, "quiet"


def _point(series: Series, x: float, y: float, class_: str = "point") -> str:
    if series.style == "second":
        return svg.path(f"M{svg.plain(x)} {svg.plain(y - 3.5)}l3.5 3.5l-3.5 3.5l-3.5 -3.5z", class_)
    return svg.tag("circle", cx=x, cy=y, r=2.8, class_=class_)


def _series(
    series: Series, bands: Sequence[Band], scale: svg.Scale, low: float, high: float
) -> Iterator[str]:
    """Yield the line through a series, what it spans in each band, zeros and NaN beside it."""
    runs: list[list[tuple[float, ...]]] = [[]]  # y; least, mean, most across
    whiskers = ""
    for band in bands:
        held = [value for value in series.values[band.layers] if value is not None]
        if positive := [value.number for value in held if value.number]:
            mean = math.exp(math.fsum(map(math.log, positive)) / len(positive))
            runs[-1].append((band.y, *map(scale.at, (min(positive), mean, max(positive)))))
            if any(series.whiskers[band.layers]):
                end = scale.at(max(series.whiskers[band.layers]))
                whiskers += f"{svg.line([(scale.at(mean), band.y)])}H{svg.plain(end)}m0 -3v6"
        elif held:
            runs.append([])  # a zero or NaN alone in its band breaks the line
        if any(value.number == 0 for value in held):
            yield _point(series, low, band.y, "zero")
        if any(value.bad for value in held):
            yield svg.cross(high, band.y)
    if whiskers:
        yield svg.path(whiskers, "whiskers")
    yield from (shape for run in runs for shape in _run(series, run, bands[0].has_points))


def _run(series: Series, run: Sequence[tuple[float, ...]], has_points: bool) -> Iterator[str]:
    if run:
        if any(least != most for _, least, _, most in run):
            across = [(a, y) for y, a, *_ in run] + [(b, y) for y, *_, b in reversed(run)]
            yield svg.path(f"{svg.line(across)}z", "envelope")
        if len(run) > 1:
            class_ = f"line {series.style}"
            yield svg.path(svg.line((mean, y) for y, _, mean, _ in run), class_)
        if has_points or len(run) == 1:
            yield from (_point(series, mean, y) for y, _, mean, _ in run)


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
    most = [
        max((abs(t[end] or 0) for t in own for end in ("min", "max")), default=0.0)
        for layer in shown
        for own in [[t for t in layer["tensors"] if t["role"] == "activations"]]
    ]
    rows = []
    for index, layer in enumerate(shown):
        told = [svg.label_of(layer)]
        for name, own in values.items():
            if (value := own[index]) is not None:
                size = "no number" if value.number is None else svg.brief(value.number)
                told.append(f"{name} {size}{', with NaN or inf' if value.bad else ''}")
        told += [f"greatest |x| {svg.brief(most[index])}"] if most[index] else []
        told += [v["message"] for v in violations if v["layer"] == layer["name"]]
        is_culprit = bool(violations) and violations[0]["layer"] == layer["name"]
        is_found = layer["name"] in found
        rows.append(Row(layer["name"], told[0], "\n".join(told), is_culprit, is_found))
    scale, gradients, parameters = values.values()
    panels = [
        Panel(
            "activation scale",
            [Series("activations", "rms", scale, whisker_name="greatest |x|", whiskers=most)],
            "no activations were measured",
        ),
        Panel(
            "gradient norm (L2)",
            [
                Series("parameter_gradients", "of parameters", parameters, "second"),
                Series("gradients", "of activations", gradients),
            ],
            "no gradients were measured",
        ),
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


def _value(layer: Mapping[str, Any], name: str) -> Value | None:
    """Return what the tensors of a role measure together; ``None`` where there are none."""
    tensors = [tensor for tensor in layer["tensors"] if tensor["role"] == _MEASURES[name]]
    if not tensors:
        return None
    bad = sum(tensor["nan"] + tensor["inf"] for tensor in tensors)
    count = sum(tensor["count"] for tensor in tensors) - bad
    norms = [t["norm"] for t in tensors if svg.finite(t["norm"])]
    if not norms or count <= 0:
        return Value(None, bool(bad))
    norm = math.hypot(*norms)
    return Value(norm / math.sqrt(count) if name.endswith("rms") else norm, bool(bad))


def _change(name: str, values: Sequence[Value | None], labels: Sequence[str]) -> Iterator[str]:
    """Yield from where to where a value rises or falls, and in how many layers it is zero."""
    pairs = zip(values, labels, strict=True)
    seen = [(v.number, label) for v, label in pairs if v is not None and v.number is not None]
    if seen:
        (first, start), (last, end) = seen[0], seen[-1]
        verb = "rises" if last > first else "falls" if last < first else "goes"
        yield f"{name} {verb} from {svg.brief(first)} at {start} to {svg.brief(last)} at {end}"
    if zeros := sum(number == 0 for number, _ in seen):
        yield f"{name} is zero in {plural(zeros, 'layer')}"


# Errors through depth


def errors(comparison: Mapping[str, Any], anchor: str) -> Markup:
    """Return a chart of how far a candidate is from its reference, and what rounding explains."""
    divergence = comparison["divergence"]
    layers = [
        layer
        for layer in comparison["layers"]
        if layer["tensors"]
        or layer["reference"] is None
        or layer["candidate"] is None
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
            f"no {name} were compared",
            "explained by rounding",
            [_allowed(tensor) for tensor in worst],
        )
        for (name, worst), style in zip(passes.items(), ("first", "second"), strict=True)
    ]
    rows = []
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
                sizes = (tensor["error"], tensor["noise"], _allowed(tensor))
                told.append(
                    f"{kind}: error {{}}, noise {{}}, limit {{}}".format(*map(svg.brief, sizes))
                )
                told += [tensor["problem"]] if tensor["problem"] else []
        is_first = _diverges_first(layer, divergence)
        told += [divergence["story"] or "the first divergence"] if is_first and divergence else []
        title = "\n".join(told)
        rows.append(Row(name, label, title, is_first, is_tinted=layer["diverged"], note=note))
    footnote = "(+) only in the candidate, (\N{MINUS SIGN}) only in the reference"
    said = [
        f"{sum(layer['diverged'] for layer in layers)} of {plural(len(layers), 'layer')} differ"
    ]
    if divergence is not None:
        said.insert(0, f"first divergence at {svg.label_of(divergence)}")
        first = [at for at, row in enumerate(rows) if row.is_culprit]
        drawn = [own[at] for at in first for own in passes.values()]
        if seen := [one for one in drawn if one is not None]:
            one = max(seen, key=lambda tensor: tensor["diverged"])
            error, allowed = svg.brief(one["error"]), svg.brief(_allowed(one))
            said[0] += f": error {error} of {allowed} that rounding explains"
    has_notes = any(row.note for row in rows)
    return rows_chart("errors", anchor, rows, panels, "; ".join(said), footnote * has_notes)


def _diverges_first(layer: Mapping[str, Any], divergence: Mapping[str, Any] | None) -> bool:
    if divergence is None:
        return False
    if layer["reference"] is None:
        return layer["candidate"] in (divergence["layer"], divergence["candidate"])
    return bool(layer["reference"] == divergence["layer"])


def _worst(layer: Mapping[str, Any], *roles: str) -> Mapping[str, Any] | None:
    """Return the tensor furthest beyond its noise; a ratio of ``None`` is infinite."""
    found = [tensor for tensor in layer["tensors"] if tensor["role"] in roles]
    return max(
        found, key=lambda one: math.inf if one["ratio"] is None else one["ratio"], default=None
    )


def _allowed(tensor: Mapping[str, Any] | None) -> float:
    if tensor is None or not svg.finite(tensor["noise"]) or not svg.finite(tensor["limit"]):
        return 0.0
    return float(tensor["noise"] * tensor["limit"])


def _error(tensor: Mapping[str, Any] | None) -> Value | None:
    if tensor is None:
        return None
    return Value(tensor["error"], False) if svg.finite(tensor["error"]) else Value(None, True)
