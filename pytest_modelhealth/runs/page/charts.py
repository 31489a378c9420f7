"""The charts of a tensor's values, of a training and of a drift."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from pytest_modelhealth.rendering.notation import percent, plural, shorten
from pytest_modelhealth.runs.page import drawing as svg

# Histogram

_WIDE, _FLOOR, _TOP = 360, 120, 44
_MOST_ZEROS = 2
"""Times the greatest other bar; a higher bar of zeros is cut."""


class _Axis(NamedTuple):
    """Where numbers stand, the place and width of the zeros, and from where to where bars are."""

    at: Callable[[float], float]
    zero_at: float
    zero_width: float
    bars: list[tuple[float, float, int, str]]


def histogram(tensor: Mapping[str, Any]) -> Markup:
    """Return the values of a tensor by sign and power of two."""
    bad = [(name, tensor[key]) for name, key in (("NaN", "nan"), ("inf", "inf")) if tensor[key]]
    right = _WIDE - (76 if bad else 8)
    filled, zeros = _filled(tensor.get("bins")), tensor["zeros"] or 0
    axis = _axis(filled, zeros, right)
    parts, marks = [svg.write(0, 11, _moments(tensor), "quiet")], []
    if not filled and not zeros:
        why = "no finite values" if bad else "the values were not counted by size"
        parts.append(svg.write(0, 70, why if tensor["count"] else "no values", "quiet slanted"))
    most = max((count for *_, count, _ in axis.bars), default=0)
    tallest = max(1, most, min(zeros, (most or zeros) * _MOST_ZEROS))
    bars = [(*bar, "bin") for bar in axis.bars]
    if zeros:
        end = axis.zero_at + axis.zero_width
        bars.append((axis.zero_at, end, zeros, plural(zeros, "zero"), "zeros"))
    for start, end, count, title, kind in bars:
        top = _FLOOR - max(1.5, min(count, tallest) / tallest * (_FLOOR - _TOP))
        space = 1 if end - start > 5 and kind == "bin" else 0
        shape = {"x": start + space / 2, "y": top, "width": end - start - space}
        parts.append(svg.tag("rect", **shape, height=_FLOOR - top, class_=kind))
        marks.append(svg.mark(title, svg.area(start, _TOP - 4, end - start, _FLOOR - _TOP + 4)))
        if count > tallest:
            parts.append(
                svg.path(f"M{svg.plain(start - 2)} {_TOP + 11}l{end - start + 4:g} -6", "cut")
            )
        if kind == "zeros" and count >= 0.005 * tensor["count"]:
            share = percent(count / tensor["count"])
            parts.append(svg.write((start + end) / 2, top - 3, share, "quiet small middle"))
    parts += [svg.path(f"M4 {_FLOOR}H{right + 4}", "axis-line"), *_ticks(axis, filled)]
    parts += _mean_and_std(axis, tensor)
    for y, (name, count) in zip((94, 60), reversed(bad), strict=False):
        parts += [
            svg.cross(right + 18, y - 4),
            svg.write(right + 27, y, name, "alarm strong"),
            svg.write(right + 14, y + 14, f"{count:,}", "alarm"),
        ]
        title = f"{plural(count, 'value')} that {'is' if count == 1 else 'are'} {name}"
        marks.append(svg.mark(title, svg.area(right + 10, y - 14, 66, 32)))
    if tensor.get("bins") and tensor["bins"].get("sampled"):
        parts.append(svg.write(_WIDE, 11, "a sample", "quiet end"))
    size = _WIDE, _FLOOR + 20
    return svg.chart("histogram", size, _told(tensor), "".join(parts), "".join(marks))


def _mean_and_std(axis: _Axis, tensor: Mapping[str, Any]) -> Iterable[str]:
    mean, std = tensor["mean"], tensor["std"]
    if svg.finite(mean) and svg.finite(std):
        start, end = svg.plain(axis.at(mean - std)), svg.plain(axis.at(mean + std))
        yield svg.path(f"M{start} 23v6m0 -3H{end}m0 -3v6", "spread")
    if svg.finite(mean):
        yield svg.path(f"M{svg.plain(axis.at(mean) - 4)} 21h8l-4 7z", "mean")


def _axis(filled: Sequence[tuple[int, int, int]], zeros: int, right: float) -> _Axis:
    """Return an axis from the least to the greatest power of either sign, zeros between them."""
    powers = [power for _, power, _ in filled]
    low, high = min(powers, default=0), max(powers, default=-1) + 1
    signs = {sign for sign, _, _ in filled}
    has_zero = bool(zeros) or -1 in signs
    number = (high - low) * len(signs)
    zero_width = min(22.0, max(8.0, right / (number + 1))) if has_zero else 0.0
    step = min((right - 14 - zero_width) / number, 22.0) if number else 0.0
    used = step * number + zero_width + 6 * has_zero
    zero_at = 8 + (right - 8 - used) / 2 + (high - low) * step * (-1 in signs) + 3 * has_zero

    def at(value: float) -> float:
        power = math.log2(abs(value)) - low if value else -1.0
        if power < 0 and has_zero:
            return zero_at + zero_width / 2
        along = max(0.0, min(power, high - low)) * step + 3 * has_zero
        return zero_at + zero_width + along if value > 0 else zero_at - along

    group = max(1, math.ceil(2.5 / step)) if step else 1
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for sign, power, count in filled:
        counts[sign, (power - low) // group] += count
    bars = []
    for (sign, place), count in counts.items():
        ends = (min(low + (place + more) * group, high, 1023) for more in (0, 1))
        start, end = sorted(sign * 2.0**power for power in ends)
        title = f"{plural(count, 'value')} of {svg.brief(start)} to {svg.brief(end)}"
        bars.append((at(start), at(end), count, title))
    return _Axis(at, zero_at, zero_width, bars)


def _filled(bins: Mapping[str, Any] | None) -> list[tuple[int, int, int]]:
    """Return sign, power of two and count of each bin that holds a value."""
    return [
        (sign, bins["lowest"] + index, count)
        for sign, side in ((-1, "negative"), (1, "positive"))
        for index, count in enumerate(bins[side] if bins else ())
        if bins and count
    ]


def _ticks(axis: _Axis, filled: Sequence[tuple[int, int, int]]) -> Iterable[str]:
    """Yield ticks at powers of ten, as far as their texts have room."""
    powers = [power for _, power, _ in filled]
    low, high = min(powers, default=0), max(powers, default=-1) + 1
    first, last = math.ceil(low * math.log10(2)), math.floor(high * math.log10(2))
    step = max(1, math.ceil((last - first) / 5))
    marked = [10.0**power for power in range(last, first - 1, -1) if power % step == 0]
    marked = marked or [2.0**low, 2.0 ** min(high, 1023)]
    signs = sorted({sign for sign, _, _ in filled}, reverse=True)
    wanted = [0.0] * bool(axis.zero_width) + [sign * value for sign in signs for value in marked]
    taken: list[tuple[float, float]] = []
    for value in wanted:
        x, text = axis.at(value), svg.brief(value)
        half = len(text) * svg.LETTER / 2 + 3
        is_free = all(x + half <= start or x - half >= end for start, end in taken)
        yield svg.path(f"M{svg.plain(x)} {_FLOOR}v3", "axis-line")
        if is_free and x - half >= -4 and x + half <= _WIDE + 4:
            taken.append((x - half, x + half))
            yield svg.write(x, _FLOOR + 14, text, "quiet small middle")


def _moments(tensor: Mapping[str, Any]) -> str:
    told = [
        f"{name} {svg.brief(tensor[name])}" for name in ("mean", "std") if svg.finite(tensor[name])
    ]
    told += [f"{percent(tensor['dead'])} dead"] if svg.finite(tensor["dead"]) else []
    return "  \N{MIDDLE DOT}  ".join(told)


def _told(tensor: Mapping[str, Any]) -> str:
    told = [f"{_called(tensor)}: {plural(tensor['count'], 'value')}"]
    if svg.finite(tensor["min"]) and svg.finite(tensor["max"]):
        told.append(f"from {svg.brief(tensor['min'])} to {svg.brief(tensor['max'])}")
    told += [
        f"{name} {svg.brief(tensor[name])}" for name in ("mean", "std") if svg.finite(tensor[name])
    ]
    if tensor["count"]:
        told.append(f"{percent((tensor['zeros'] or 0) / tensor['count'])} zeros")
    if svg.finite(tensor["dead"]):
        told.append(f"{percent(tensor['dead'])} of the units dead")
    for key, name in (("nan", "NaN"), ("inf", "infinite")):
        told += [f"{plural(tensor[key], 'value')} {name}"] if tensor[key] else []
    return ", ".join(told)


def _called(tensor: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (svg.words(tensor["role"]), tensor["name"])))


# Course of a training

_LOSS, _SMALL, _GAP, _ABOVE, _BELOW, _LEFT, _LABEL = 120, 96, 26, 24, 24, 44, 96
_LOG_FROM = 30
"""Times the least: positive values that differ by more have a log axis."""

_MOST_LINES = 12
"""Of more layers, the band from the least to the greatest is drawn."""

_Line = tuple[str, Sequence["float | None"]]


@dataclass(frozen=True)
class _Frame:
    x: float
    y: float
    width: float
    height: float


def course(found: Mapping[str, Any], anchor: str) -> Markup:
    """Return the loss of a training, and each statistic of its layers, over steps."""
    steps, loss = found["steps"], found["loss"]
    if not steps:
        return svg.nothing("course", "No step was recorded.")
    by_statistic: dict[str, list[_Line]] = defaultdict(list)
    for name, statistics in found["layers"].items():
        for statistic, values in statistics.items():
            if any(map(svg.finite, values)):
                by_statistic[statistic].append((name, values))
    top = _ABOVE + _LOSS + _BELOW
    row = _ABOVE + _SMALL + _BELOW
    marks: list[str] = []
    frame = _Frame(0, 0, svg.WIDTH, _LOSS)
    body = [_over_steps("loss", frame, steps, [("", loss)], marks, None)]
    width = (svg.WIDTH - _GAP) / 2
    for index, (statistic, lines) in enumerate(by_statistic.items()):
        frame = _Frame(index % 2 * (width + _GAP), top + index // 2 * row, width, _SMALL)
        body.append(_over_steps(svg.words(statistic), frame, steps, lines, marks, anchor))
    height = top + math.ceil(len(by_statistic) / 2) * row
    return svg.chart(
        "course", (svg.WIDTH, height), _course_told(steps, loss), "".join(body), "".join(marks)
    )


def _over_steps(
    title: str,
    frame: _Frame,
    steps: Sequence[int],
    lines: Sequence[_Line],
    marks: list[str],
    anchor: str | None,
) -> str:
    """Return a panel of one statistic; `anchor` is ``None`` for the loss."""
    top, bottom = frame.y + _ABOVE, frame.y + _ABOVE + frame.height
    left = frame.x + _LEFT
    right = frame.x + frame.width - (8 if len(lines) == 1 else _LABEL)
    known = [value for _, values in lines for value in values if value is not None]
    positive = [value for value in known if value > 0] or [1.0]
    is_log = min(known, default=-1) >= 0 and max(positive) > _LOG_FROM * min(positive)
    scale = svg.log_scale if is_log else svg.linear_scale
    vertical = scale(positive if is_log else known, bottom - 3, top + 3, 4)
    across = svg.linear_scale(steps, left + 3, right - 3, 8 if frame.width > 400 else 5)

    def place(step: float, value: float) -> tuple[float, float]:
        return across.at(step), bottom if is_log and not value else vertical.at(value)

    parts = _grid(vertical, across, frame, right, len(lines))
    marks.append(
        svg.mark(_summary(title, steps, lines), svg.area(left, top, right - left, frame.height))
    )
    ended = sorted(
        (_last(own), at) for at, (_, own) in enumerate(lines) if any(map(svg.finite, own))
    )
    chosen = dict.fromkeys(at for _, at in ended[-1:] + ended[:1])  # end highest and lowest
    named = [lines[at] for at in chosen]
    if len(lines) > _MOST_LINES:
        parts.append(_band(steps, lines, place))
    else:
        others = [own for at, (_, own) in enumerate(lines) if at not in chosen]
        parts += [_line(steps, values, place, "line other") for values in others]
    for (_, values), style in zip(named, ("first", "second"), strict=False):
        parts.append(_line(steps, values, place, f"line chosen {style}"))
    if anchor is not None and len(lines) > 1:
        parts.append(_line_names(named, place, right, marks, anchor))
    bad = _first_bad(steps, lines[0][1]) if anchor is None else None
    if bad is not None:
        x = across.at(bad)
        is_late = x > svg.WIDTH - 160
        parts.append(svg.cross(x, top + 5))
        text = f"NaN or inf from step {bad}"
        parts.append(
            svg.write(x - 8 if is_late else x + 8, top + 9, text, f"alarm{' end' * is_late}")
        )
    kind = "loss" if anchor is None else "statistic"
    return svg.write(frame.x, frame.y + 12, title, "strong") + svg.tag(
        "g", *parts, class_=f"panel {kind}"
    )


def _grid(
    vertical: svg.Scale, across: svg.Scale, frame: _Frame, right: float, lines: int
) -> list[str]:
    """Return the axes of a panel, and what stands at their end."""
    left, bottom = svg.plain(frame.x + _LEFT), frame.y + _ABOVE + frame.height
    parts = [svg.path(f"M{left} {svg.plain(bottom)}H{svg.plain(right)}", "axis-line")]
    for y, text in vertical.ticks:
        parts.append(svg.path(f"M{left} {svg.plain(y)}H{svg.plain(right)}", "rule"))
        parts.append(svg.write(frame.x + _LEFT - 5, y + 3.5, text, "quiet small end"))
    for x, text in across.ticks:
        if "." not in text and (lines > 1 or x <= right - 40):
            parts.append(svg.path(f"M{svg.plain(x)} {svg.plain(bottom)}v3", "axis-line"))
            parts.append(svg.write(x, bottom + 14, text, "quiet small middle"))
    y, text = (bottom + 14, "step") if lines == 1 else (frame.y + 12, plural(lines, "layer"))
    return [*parts, svg.write(right, y, text, "quiet small end")]


def _last(values: Sequence[float | None]) -> float:
    return next(value for value in reversed(values) if value is not None)


def _line(steps: Sequence[int], values: Sequence[float | None], place: Any, class_: str) -> str:
    """Return a line that breaks where there is no number."""
    parts, run = [], []
    for step, value in [*zip(steps, values, strict=True), (0, None)]:
        if value is not None:
            run.append(place(step, value))
        elif run:
            alone = "h.1" if len(run) == 1 else ""
            parts.append(svg.line(run) + alone)
            run = []
    return svg.path("".join(parts), class_)


def _band(steps: Sequence[int], lines: Sequence[_Line], place: Any) -> str:
    """Return the band from the least to the greatest of all layers, and the median."""
    lows, medians, highs = [], [], []
    for index, step in enumerate(steps):
        known = sorted(v for _, values in lines if (v := values[index]) is not None)
        if known:
            lows.append(place(step, known[0]))
            medians.append(place(step, known[len(known) // 2]))
            highs.append(place(step, known[-1]))
    band = f"{svg.line(lows)}L{svg.line(highs[::-1])[1:]}z"
    return svg.path(band, "band") + svg.path(svg.line(medians), "median")


def _line_names(
    named: Sequence[_Line], place: Any, right: float, marks: list[str], anchor: str
) -> str:
    """Return the names of lines at their ends, apart from each other."""
    parts, above = [], -math.inf
    ends = [
        (place(0, _last(values))[1], style, name, _last(values))
        for (name, values), style in zip(named, ("first", "second"), strict=False)
    ]
    for y, style, name, end in sorted(ends):
        above = max(y + 3.5, above + 12.5)
        label = name or "model"
        parts.append(svg.write(right + 5, above, svg.fitted(label, 14), f"small coloured {style}"))
        shape = svg.area(right + 2, above - 10, _LABEL - 4, 13)
        marks.append(
            svg.mark(f"{label}: ends at {svg.brief(end)}", shape, svg.link_to(anchor, name))
        )
    return "".join(parts)


def _first_bad(steps: Sequence[int], loss: Sequence[float | None]) -> int | None:
    return next((s for s, value in zip(steps, loss, strict=False) if value is None), None)


def _summary(title: str, steps: Sequence[int], lines: Sequence[_Line]) -> str:
    known = [value for value in lines[0][1] if value is not None]
    if len(lines) > 1:
        return f"{title} of {len(lines)} layers, steps {steps[0]} to {steps[-1]}"
    ends = (svg.brief(known[0]), svg.brief(known[-1])) if known else ("no number", "no number")
    return f"{title}: {ends[0]} at first, {ends[1]} at last"


def _course_told(steps: Sequence[int], loss: Sequence[float | None]) -> str:
    known = [value for value in loss if value is not None]
    if not known:
        return f"course of {plural(len(steps), 'step')}; no loss was recorded"
    first, last = known[0], known[-1]
    verb = "rises" if last > first else "falls" if last < first else "stays"
    bad = _first_bad(steps, loss)
    end = f" at step {steps[-1]}" if bad is None else f"; NaN or infinity from step {bad}"
    return f"loss {verb} from {svg.brief(first)} at step {steps[0]} to {svg.brief(last)}{end}"


# Drift

_LABELS, _TALL, _MOST_TENSORS = 250, 66, 30
_SPREAD = 25
"""A range of more stds is drawn on an axis that is logarithmic far from zero."""


def drift(found: Mapping[str, Any], anchor: str) -> Markup:
    """Return what tensors were in the snapshot, above what they are now, each on one axis."""
    sides = [
        {
            (layer["name"], t["role"], t["name"]): t
            for layer in found[side]
            for t in layer["tensors"]
        }
        for side in ("before", "now")
    ]
    moves: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for item in found["drifts"]:
        moves[item["layer"], item["role"], tensor_of(item)].append(item)
    if not moves:
        return svg.nothing("drift", "Nothing drifted.")
    body, marks = [_drift_legend()], []
    finding = ""
    for index, (key, items) in enumerate(moves.items()):
        layer, role, own = key
        label = layer if own and layer else svg.label_of(items[0])
        what = " ".join(filter(None, (svg.words(role), own)))
        told = [
            f"{svg.words(i['statistic'])} {_spelt(i['before'])} \u2192 {_spelt(i['now'])}"
            for i in items
        ]
        finding = finding or f"first {label} {what}: {told[0]}"
        if index < _MOST_TENSORS:
            y = _ABOVE + index * _TALL
            more = f"  (+{len(told) - 1})" if len(told) > 1 else ""
            body += [
                svg.path(f"M0 {y}H{svg.WIDTH}", "rule"),
                svg.write(0, y + 16, svg.fitted(label, 32), "strong"),
                svg.write(0, y + 31, shorten(what, 36), "quiet"),
                svg.write(0, y + 46, shorten(told[0], 31) + more, "alarm"),
                _both_sides([side.get(key) for side in sides], y),
            ]
            title = "\n".join((f"{label} {what}", *told))
            marks.append(
                svg.mark(
                    title, svg.area(0, y + 1, svg.WIDTH, _TALL - 2), svg.link_to(anchor, layer)
                )
            )
    rest = len(moves) - _MOST_TENSORS
    height = _ABOVE + min(len(moves), _MOST_TENSORS) * _TALL
    if rest > 0:
        body.append(
            svg.write(0, height + 14, f"and {plural(rest, 'tensor')} more", "quiet slanted")
        )
    finding = f"{plural(len(moves), 'tensor')} drifted; {finding}"
    size = (svg.WIDTH, height + 20 * (rest > 0))
    return svg.chart("drift", size, finding, "".join(body), "".join(marks))


def tensor_of(item: Mapping[str, Any]) -> str:
    """Return ``"weight"`` of a drift labelled ``"head.weight"``, ``""`` where a role is enough."""
    if item["role"] not in ("parameters", "parameter_gradients", "buffers"):
        return ""
    start = f"{item['layer']}." if item["layer"] else ""
    return str(item["label"]).removeprefix(start)


def _spelt(value: object) -> str:
    if value is None:
        return "\N{EN DASH}"
    return svg.brief(value) if isinstance(value, int | float) else str(value)


def _drift_legend() -> str:
    parts = []
    for x, name in ((_LABELS, "before"), (_LABELS + 110, "now")):
        glyph = {"min": x, "max": x + 44.0, "mean": x + 20.0, "std": 11.0}
        parts.append(_range(glyph, float, 9, name))
        parts.append(svg.write(x + 50, 13, name, "quiet"))
    said = "line: least to greatest; bar: mean \N{PLUS-MINUS SIGN} std"
    return "".join((*parts, svg.write(_LABELS + 206, 13, said, "quiet")))


def _both_sides(sides: Sequence[Mapping[str, Any] | None], y: float) -> str:
    start, end = _LABELS + 8, svg.WIDTH - 14
    scale = _drift_scale([side for side in sides if side is not None], start, end)
    parts = []
    for index, (name, side) in enumerate(zip(("before", "now"), sides, strict=True)):
        at = y + 17 + index * 17
        if side is None:
            why = "not there now" if index else "not in the snapshot"
            parts.append(svg.write(start, at + 4, why, "quiet slanted"))
            continue
        if scale is not None and svg.finite(side["min"]) and svg.finite(side["max"]):
            parts.append(_range(side, scale.at, at, name))
        else:
            parts.append(svg.write(start, at + 4, "no finite values", "quiet slanted"))
        if bad := (side.get("nan") or 0) + (side.get("inf") or 0):
            parts.append(svg.cross(svg.WIDTH - 6, at))
            parts.append(
                svg.write(svg.WIDTH - 16, at + 4, f"{bad:,} NaN or inf", "alarm small end")
            )
    if scale is not None:
        parts.append(svg.path(f"M{start} {y + 44}H{end}", "rule"))
        taken = -math.inf
        for x, text in sorted(scale.ticks):
            half = len(text) * svg.LETTER / 2 + 2
            parts.append(svg.path(f"M{svg.plain(x)} {y + 44}v3", "axis-line"))
            if x - half >= taken and x + half <= svg.WIDTH:
                taken = x + half
                parts.append(svg.write(x, y + 58, text, "quiet small middle"))
    return "".join(parts)


def _range(side: Mapping[str, Any], at: Any, y: float, name: str) -> str:
    """Return a line from least to greatest, a bar of mean and std, a stroke at the mean."""
    low, high = svg.plain(at(side["min"])), svg.plain(at(side["max"]))
    parts = [svg.path(f"M{low} {y - 4}v8m0 -4H{high}m0 -4v8", "extent")]
    mean, std = side.get("mean"), side.get("std")
    if svg.finite(mean) and mean is not None:
        if svg.finite(std) and std is not None:
            start = at(mean - std)
            width = max(1.0, at(mean + std) - start)
            parts.append(
                svg.tag("rect", x=start, y=y - 4.5, width=width, height=9, class_="spread")
            )
        parts.append(svg.path(f"M{svg.plain(at(mean))} {y - 6.5}v13", "mean"))
    return svg.tag("g", *parts, class_=f"range {name}")


def _drift_scale(sides: Sequence[Mapping[str, Any]], start: float, end: float) -> svg.Scale | None:
    """Return an axis of both sides; asinh(x / std) shows extremes that are many stds away."""
    ends: list[float] = []
    stds = [side["std"] for side in sides if side.get("std")]
    for side in sides:
        if svg.finite(side["min"]) and svg.finite(side["max"]):
            ends += (side["min"], side["max"])
            if svg.finite(side["mean"]) and svg.finite(side["std"]):
                ends += (side["mean"] - side["std"], side["mean"] + side["std"])
    if not ends:
        return None
    low, high, unit = min(ends), max(ends), min(stds, default=0.0)
    if not unit or high - low <= _SPREAD * unit:
        return svg.linear_scale(ends, start, end)
    inner = svg.linear_scale([math.asinh(low / unit), math.asinh(high / unit)], start, end)

    def at(value: float) -> float:
        return inner.at(math.asinh(value / unit))

    first, last = math.ceil(math.log10(unit)), math.floor(math.log10(max(-low, high)))
    powers = [10.0**power for power in range(first, last + 1)]
    values = [value for value in (0.0, *powers, *(-p for p in powers)) if low <= value <= high]
    return svg.Scale(at, [(at(value), svg.brief(value)) for value in values])
