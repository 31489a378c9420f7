"""Layers from top to bottom in execution order, with log axes beside their names.

Where rows would be thinner than 3 px, several layers share a band, which shows the least, the
greatest and the geometric mean of them: no layer is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
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
    is_second: bool = False
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


class Bands(NamedTuple):
    """How the rows of so many layers lie: pixels of each, and how many share a band."""

    rows: int
    pitch: float
    size: int

    @property
    def has_points(self) -> bool:
        """Whether there is room for points; a line only, where there is none."""
        return self.pitch >= 6

    def spans(self) -> list[range]:
        """Return the layers of each band."""
        starts = range(0, self.rows, self.size)
        return [range(start, min(start + self.size, self.rows)) for start in starts]

    def y(self, rows: range) -> float:
        """Return the middle of these rows."""
        return HEAD + (rows.start + rows.stop) / 2 * self.pitch


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
    bands = Bands(len(rows), pitch, max(1, math.ceil(3 / pitch)))
    bottom = HEAD + bands.pitch * len(rows)
    width = (svg.WIDTH - NAMES - GAP * (len(panels) - 1) - 10) / len(panels)
    named = _named(rows, bands)
    body = [*_tints(rows, bands)]
    for index, panel in enumerate(panels):
        body.append(_panel(panel, bands, NAMES + index * (width + GAP), width, bottom))
    body += [_name(rows[index], bands.y(range(index, index + 1)) + 3.8) for index in sorted(named)]
    if footnote:
        body.append(svg.write(0, bottom + FOOT + 14, footnote, "quiet small"))
    marks = []
    for band in bands.spans():
        held = rows[band.start : band.stop]
        chief = next((row for row in held if row.is_culprit or row.is_found), held[0])
        several = f"{plural(len(held), 'layer')}, from {held[0].label}; of them:\n"
        height = bands.pitch * len(held)
        shape = svg.area(0, HEAD + band.start * bands.pitch, svg.WIDTH, height)
        title = (several if len(held) > 1 else "") + chief.title
        is_reached = not named.isdisjoint(band)
        marks.append(svg.mark(title, shape, svg.link_to(anchor, chief.name), is_reached=is_reached))
    size = (svg.WIDTH, bottom + FOOT + (18 if footnote else 0))
    return svg.chart(kind, size, finding, "".join(body), "".join(marks))


def _named(rows: Sequence[Row], bands: Bands) -> set[int]:
    """Return which names stand far enough apart to be read: what was found first."""
    found = [index for index, row in enumerate(rows) if row.is_found or row.note]
    step = 1 if bands.pitch >= NAME_PITCH else math.ceil(20 / bands.pitch)
    chosen: set[int] = set()
    for index in (
        *(index for index, row in enumerate(rows) if row.is_culprit),
        *found[:MOST_NAMED], 0, len(rows) - 1, *range(0, len(rows), step),
    ):  # fmt: skip
        reach = math.ceil(NAME_PITCH / bands.pitch - 0.01)
        if chosen.isdisjoint(range(index - reach + 1, index + reach)):
            chosen.add(index)
    return chosen


def _tints(rows: Sequence[Row], bands: Bands) -> Iterable[str]:
    for is_tinted, group in groupby(range(len(rows)), lambda index: rows[index].is_tinted):
        held = list(group)
        if is_tinted:
            yield _tint(range(held[0], held[-1] + 1), bands, "tinted-band")
    for index, row in enumerate(rows):
        if row.is_culprit:
            yield _tint(range(index, index + 1), bands, "culprit-band")


def _tint(span: range, bands: Bands, class_: str) -> str:
    height = max(len(span) * bands.pitch, 3)
    y = bands.y(span) - height / 2
    return svg.tag("rect", x=0, y=y, width=svg.WIDTH, height=height, class_=class_)


def _name(row: Row, y: float) -> str:
    note = f" {row.note}" if row.note else ""
    text = svg.fitted(row.label, 24 - len(note) - 3 * row.is_culprit) + note
    kinds = ("end", "alarm" * (row.is_culprit or row.is_found), "name", "culprit" * row.is_culprit)
    written = svg.write(NAMES - 12, y, text, " ".join(filter(None, kinds)))
    if not row.is_culprit:
        return written
    x = max(1.0, NAMES - 26 - len(text) * svg.LETTER * 1.08)
    return written + svg.path(
        f"M{svg.plain(x)} {svg.plain(y - 8.6)}l8 4.5l-8 4.5z", "alarm pointer"
    )


def _panel(panel: Panel, bands: Bands, x: float, width: float, bottom: float) -> str:
    seen = [value for series in panel.series for value in series.values if value is not None]
    positive = [value.number for value in seen if value.number]
    for series in panel.series:
        positive += filter(None, series.whiskers)
    positive += filter(None, panel.ranges)
    has_zeros = any(value.number == 0 for value in seen)
    has_bad = any(value.bad for value in seen)
    title = svg.write(x, 12, panel.title, "strong")
    if not positive and not has_zeros and not has_bad:
        return title + svg.write(x, HEAD + 14, panel.empty, "quiet slanted")
    left, right = x + GUTTER * has_zeros, x + width - GUTTER * has_bad
    scale = svg.log_scale(positive, left, right, max(3, int((right - left) / 46)))
    axis = [svg.tag("rect", x=x, y=HEAD, width=width, height=bottom - HEAD, class_="rule")]
    for at, text in scale.ticks if positive else ():
        axis.append(svg.path(f"M{svg.plain(at)} {HEAD}V{svg.plain(bottom)}", "rule"))
        if (not has_zeros or at > left + 14) and (not has_bad or at < right - 16):
            axis.append(svg.write(at, bottom + 15, text, "quiet small middle"))
    if has_zeros:
        axis.append(svg.write(x + GUTTER / 2, bottom + 15, "0", "quiet small middle"))
    if has_bad:
        axis.append(svg.write(x + width - GUTTER / 2 - 2, bottom + 15, "NaN", "alarm small middle"))
    parts = [title, svg.tag("g", *axis, class_="axis"), _ranges(panel, bands, scale, left)]
    edges = (x + GUTTER / 2, x + width - GUTTER / 2)
    parts += [_series(series, bands, scale, edges) for series in panel.series]
    return "".join((*parts, _legend(panel, bands, x)))


def _legend(panel: Panel, bands: Bands, x: float) -> str:
    parts: list[str] = []
    y = 30

    def add(name: str, width: float, glyph: str) -> None:
        nonlocal x
        parts.extend((glyph, svg.write(x + width + 4, y, name, "quiet small")))
        x += width + 16 + len(name) * svg.LETTER * 0.93

    for series in panel.series:
        if any(value is not None for value in series.values):
            glyph = svg.path(f"M{svg.plain(x)} {y - 4}h18", "line") + _point(
                series, x + 9, y - 4, "point-key"
            )
            add(series.name, 18, svg.tag("g", glyph, class_=_class(series)))
            if any(series.whiskers):
                d = f"M{svg.plain(x)} {y - 4}h14" + ("m0 -3v6" if bands.has_points else "")
                add(
                    series.whisker_name,
                    16,
                    svg.tag("g", svg.path(d, "whiskers"), class_=_class(series)),
                )
    if any(panel.ranges):
        box = svg.tag("rect", x=x, y=y - 9, width=14, height=9, class_="ranges-key")
        add(panel.range_name, 14, box)
    return "".join(parts)


def _class(series: Series) -> str:
    return "second" if series.is_second else "first"


def _point(series: Series, x: float, y: float, class_: str = "point") -> str:
    if series.is_second:
        return svg.path(f"M{svg.plain(x)} {svg.plain(y - 3.5)}l3.5 3.5l-3.5 3.5l-3.5 -3.5z", class_)
    return svg.tag("circle", cx=x, cy=y, r=2.8, class_=class_)


def _ranges(panel: Panel, bands: Bands, scale: svg.Scale, left: float) -> str:
    """Return bars from the left up to where each row's range goes."""
    parts = []
    for band in bands.spans() if panel.ranges else ():
        most = max(panel.ranges[band.start : band.stop])
        if most > 0:
            height = max(1.0, len(band) * bands.pitch - 4 * bands.has_points)
            top, end = svg.plain(bands.y(band) - height / 2), svg.plain(max(left, scale.at(most)))
            parts.append(f"M{svg.plain(left)} {top}H{end}v{svg.plain(height)}H{svg.plain(left)}z")
    return svg.path("".join(parts), "ranges") if parts else ""


class _Band(NamedTuple):
    """What a series has in a band: least, mean and greatest across, and where whiskers end."""

    y: float
    places: tuple[float, float, float] | None
    whisker: float | None
    has_zero: bool
    has_bad: bool


def _gathered(series: Series, bands: Bands, scale: svg.Scale) -> Iterator[_Band]:
    for band in bands.spans():
        held = [v for v in series.values[band.start : band.stop] if v is not None]
        positive = [value.number for value in held if value.number]
        most = max(series.whiskers[band.start : band.stop], default=0.0)
        places = whisker = None
        if positive:
            mean = math.exp(math.fsum(map(math.log, positive)) / len(positive))
            places = scale.at(min(positive)), scale.at(mean), scale.at(max(positive))
            whisker = scale.at(most) if most > 0 else None
        has_zero, has_bad = any(v.number == 0 for v in held), any(v.bad for v in held)
        yield _Band(bands.y(band), places, whisker, has_zero, has_bad)


def _series(series: Series, bands: Bands, scale: svg.Scale, edges: tuple[float, float]) -> str:
    """Return the line through a series, what it spans in each band, zeros and NaN beside it."""
    runs: list[list[tuple[float, float, float, float]]] = [[]]  # y; low, mean and high across
    parts, ends, whiskers = [], [], []
    for band in _gathered(series, bands, scale):
        if band.places is not None:
            runs[-1].append((band.y, *band.places))
            if band.whisker is not None:
                start = svg.line([(band.places[1], band.y)])
                whiskers.append(f"{start}H{svg.plain(band.whisker)}m0 -3v6")
                ends.append((band.whisker, band.y))
        elif (band.has_zero or band.has_bad) and runs[-1]:
            runs.append([])  # a zero or NaN alone in its band breaks the line
        parts += [_point(series, edges[0], band.y, "zero")] * band.has_zero
        parts += [svg.cross(edges[1], band.y)] * band.has_bad
    if ends:
        dense = svg.path(svg.line(ends), "whiskers dense")
        parts.append(svg.path("".join(whiskers), "whiskers") if bands.has_points else dense)
    parts += [_run(series, run, bands) for run in runs if run]
    return svg.tag("g", *parts, " ", class_=f"series {series.key} {_class(series)}")


def _run(series: Series, run: Sequence[tuple[float, float, float, float]], bands: Bands) -> str:
    parts = []
    if bands.size > 1:
        lows, highs = [(low, y) for y, low, _, _ in run], [(high, y) for y, *_, high in run]
        parts.append(svg.path(f"{svg.line(lows)}L{svg.line(highs[::-1])[1:]}z", "envelope"))
    if len(run) > 1:
        parts.append(svg.path(svg.line((mean, y) for y, _, mean, _ in run), "line"))
    if bands.has_points or len(run) == 1:
        parts += [_point(series, mean, y) for y, _, mean, _ in run]
    return "".join(parts)


def depth(
    layers: Sequence[Mapping[str, Any]], violations: Sequence[Mapping[str, Any]], anchor: str
) -> Markup:
    """Return a chart of how large activations and gradients are through the depth of a model."""
    found = {violation["layer"] for violation in violations}
    containers = svg.containers_of(layers)
    shown = []
    for layer in layers:
        roles = {tensor["role"] for tensor in layer["tensors"]}
        if roles & {"activations", "gradients", "parameter_gradients"} and (
            layer["name"] not in containers
            or "parameter_gradients" in roles
            or layer["name"] in found
        ):
            shown.append(layer)
    if not shown:
        return svg.nothing("depth", "No activations and no gradients were measured.")
    scale = [_value(layer, "activations", _rms) for layer in shown]
    most = [_greatest(layer) for layer in shown]
    gradients = [_value(layer, "gradients", _norm) for layer in shown]
    parameters = [_value(layer, "parameter_gradients", _norm) for layer in shown]
    rows = []
    for index, layer in enumerate(shown):
        told = [
            svg.label_of(layer),
            *_told("activation rms", scale[index]),
            *([f"greatest |x| {svg.brief(most[index])}"] if most[index] else []),
            *_told("gradient norm", gradients[index]),
            *_told("parameter gradient norm", parameters[index]),
            *(v["message"] for v in violations if v["layer"] == layer["name"]),
        ]
        is_culprit = bool(violations) and violations[0]["layer"] == layer["name"]
        is_found = layer["name"] in found
        rows.append(Row(layer["name"], told[0], "\n".join(told), is_culprit, is_found))
    panels = [
        Panel(
            "activation scale",
            [Series("activations", "rms", scale, whisker_name="greatest |x|", whiskers=most)],
            "no activations were measured",
        ),
        Panel(
            "gradient norm (L2)",
            [
                Series("parameter_gradients", "of parameters", parameters, is_second=True),
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
    pairs = zip(scale, flowing, strict=True)
    bad = sum(any(v is not None and v.bad for v in pair) for pair in pairs)
    if bad:
        said.append(f"NaN or infinity in {plural(bad, 'layer')}")
    if violations:
        said.append(f"culprit {svg.label_of(violations[0])}: {svg.words(violations[0]['check'])}")
    finding = "; ".join(said) or "no finite activations and gradients"
    return rows_chart("depth", anchor, rows, panels, finding)


Read = Callable[[Sequence[Mapping[str, Any]]], "float | None"]


def _value(layer: Mapping[str, Any], role: str, read: Read) -> Value | None:
    """Return the value of the tensors of a role together; ``None`` where there are none."""
    tensors = [tensor for tensor in layer["tensors"] if tensor["role"] == role]
    bad = any(tensor["nan"] or tensor["inf"] for tensor in tensors)
    return Value(read(tensors), bad) if tensors else None


def _norm(tensors: Sequence[Mapping[str, Any]]) -> float | None:
    norms = [t["norm"] for t in tensors if svg.has_finite(t) and svg.finite(t.get("norm"))]
    return math.hypot(*norms) if norms else None


def _rms(tensors: Sequence[Mapping[str, Any]]) -> float | None:
    norm = _norm(tensors)
    count = sum(tensor["count"] - tensor["nan"] - tensor["inf"] for tensor in tensors)
    return norm / math.sqrt(count) if norm is not None and count > 0 else None


def _greatest(layer: Mapping[str, Any]) -> float:
    ends = [
        abs(tensor[end] or 0.0)
        for tensor in layer["tensors"]
        if tensor["role"] == "activations"
        for end in ("min", "max")
    ]
    return max(ends, default=0.0)


def _told(name: str, value: Value | None) -> list[str]:
    if value is None:
        return []
    number = "no number" if value.number is None else svg.brief(value.number)
    return [f"{name} {number}{', with NaN or inf' if value.bad else ''}"]


def _change(name: str, values: Sequence[Value | None], labels: Sequence[str]) -> list[str]:
    """Return from where to where a value rises or falls, and in how many layers it is zero."""
    seen = [
        (value.number, label)
        for value, label in zip(values, labels, strict=True)
        if value is not None and value.number is not None
    ]
    if not seen:
        return []
    (first, start), (last, end) = seen[0], seen[-1]
    if len(seen) == 1:
        said = [f"{name} {svg.brief(first)} at {start}"]
    elif first == last:
        said = [f"{name} is {svg.brief(last)} from {start} to {end}"]
    else:
        verb = "rises" if last > first else "falls"
        said = [f"{name} {verb} from {svg.brief(first)} at {start} to {svg.brief(last)} at {end}"]
    zeros = sum(number == 0 for number, _ in seen)
    return [*said, f"{name} is zero in {plural(zeros, 'layer')}"] if zeros else said


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
            [Series(name, "error", [_error(one) for one in worst], is_second=name == "gradients")],
            f"no {name} were compared",
            "explained by rounding",
            [_allowed(tensor) for tensor in worst],
        )
        for name, worst in passes.items()
    ]
    rows = []
    for index, layer in enumerate(layers):
        name = layer["candidate"] if layer["reference"] is None else layer["reference"]
        label = svg.label_of(layer, name)
        told, note = [label], ""
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
        if is_first:
            told.append(divergence["story"] or "the first divergence")
        title = "\n".join(told)
        rows.append(Row(name, label, title, is_first, is_tinted=layer["diverged"], note=note))
    notes = [row.note for row in rows]
    finding = _errors_in_words(comparison, layers, rows, passes)
    footnote = "(+) only in the candidate, (\N{MINUS SIGN}) only in the reference"
    return rows_chart("errors", anchor, rows, panels, finding, footnote if any(notes) else "")


def _diverges_first(layer: Mapping[str, Any], divergence: Mapping[str, Any] | None) -> bool:
    if divergence is None:
        return False
    if layer["reference"] is None:
        return layer["candidate"] in (divergence["layer"], divergence["candidate"])
    return bool(layer["reference"] == divergence["layer"])


def _errors_in_words(
    comparison: Mapping[str, Any],
    layers: Sequence[Mapping[str, Any]],
    rows: Sequence[Row],
    passes: Mapping[str, Sequence[Mapping[str, Any] | None]],
) -> str:
    divergence = comparison["divergence"]
    whole = plural(len(layers), "layer")
    if divergence is not None:
        at = next((index for index, row in enumerate(rows) if row.is_culprit), None)
        seen = [worst[at] for worst in passes.values()] if at is not None else []
        known = sorted(filter(None, seen), key=lambda tensor: not tensor["diverged"])
        said = [f"first divergence at {svg.label_of(divergence)}"]
        if known:
            error, allowed = svg.brief(known[0]["error"]), svg.brief(_allowed(known[0]))
            said = [f"{said[0]}: error {error} of {allowed} that rounding explains"]
        said.append(f"{sum(layer['diverged'] for layer in layers)} of {whole} diverged")
    else:
        found = [one["error"] or 0.0 for worst in passes.values() for one in filter(None, worst)]
        most = svg.brief(max(found, default=0.0))
        said = [f"no divergence in {whole}", f"greatest relative error {most}"]
    for note, side in (("(+)", "candidate"), ("(\N{MINUS SIGN})", "reference")):
        if lone := sum(row.note == note for row in rows):
            said.append(f"{plural(lone, 'layer')} only in the {side}")
    return "; ".join(said)


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
