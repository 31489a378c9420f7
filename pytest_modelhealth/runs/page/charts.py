"""The charts of a tensor's values, of a training and of a drift."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from pytest_modelhealth.rendering.notation import percent, plural, shorten
from pytest_modelhealth.runs.page.drawing import (
    LETTER,
    WIDTH,
    Scale,
    area,
    brief,
    chart,
    cross,
    finite,
    fitted,
    label_of,
    line,
    linear_scale,
    link_to,
    log_scale,
    mark,
    nothing,
    path,
    plain,
    tag,
    words,
    write,
)

# Histogram

_WIDE, _FLOOR, _TOP = 360, 120, 44
_MOST_ZEROS = 2
"""Times the greatest other bar; a higher bar of zeros is cut."""


def histogram(tensor: Mapping[str, Any]) -> Markup:
    """Return the values of a tensor by sign and power of two."""
    bins, zeros = tensor.get("bins"), tensor["zeros"] or 0
    bad = [(name, tensor[key]) for name, key in (("NaN", "nan"), ("inf", "inf")) if tensor[key]]
    right = _WIDE - (76 if bad else 8)
    filled = _filled(bins)
    parts, marks = [write(0, 11, _moments(tensor), "quiet")], []
    if not filled and not zeros:
        why = "no finite values" if bad else "the values were not counted by size"
        parts.append(write(0, 70, why if tensor["count"] else "no values", "quiet slanted"))
    low = min((power for _, power, _ in filled), default=0)
    high = max((power for _, power, _ in filled), default=-1) + 1
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
    bars: dict[tuple[int, int], int] = defaultdict(int)
    for sign, power, count in filled:
        bars[sign, (power - low) // group] += count
    most = max(bars.values(), default=0)
    tallest = max(1, most, min(zeros, (most or zeros) * _MOST_ZEROS))
    for (sign, place), count in bars.items():
        ends = sorted(sign * 2.0 ** min(low + (place + more) * group, 1023) for more in (0, 1))
        x = sorted(at(end) for end in ends)
        height = max(1.5, count / tallest * (_FLOOR - _TOP))
        space = 1 if x[1] - x[0] > 5 else 0
        parts.append(
            tag(
                "rect", x=x[0] + space / 2, y=_FLOOR - height, width=x[1] - x[0] - space,
                height=height, class_="bin",
            )
        )  # fmt: skip
        title = f"{plural(count, 'value')} of {brief(ends[0])} to {brief(ends[1])}"
        marks.append(mark(title, area(x[0], _TOP - 4, x[1] - x[0], _FLOOR - _TOP + 4)))
    if zeros:
        height = max(1.5, min(zeros, tallest) / tallest * (_FLOOR - _TOP))
        size = {"x": zero_at, "y": _FLOOR - height, "width": zero_width, "height": height}
        parts.append(tag("rect", **size, class_="zeros"))
        if zeros > tallest:
            parts.append(path(f"M{plain(zero_at - 2)} {_TOP + 11}l{zero_width + 4:g} -6", "cut"))
        if zeros >= 0.005 * tensor["count"]:
            share = percent(zeros / tensor["count"])
            parts.append(write(at(0), _FLOOR - height - 3, share, "quiet small middle"))
        shape = area(zero_at, _TOP - 4, zero_width, _FLOOR - _TOP + 4)
        marks.append(mark(plural(zeros, "zero"), shape))
    parts.append(path(f"M4 {_FLOOR}H{right + 4}", "axis-line"))
    parts += _ticks(at, has_zero, signs, low, high)
    if finite(tensor["mean"]):
        if finite(tensor["std"]):
            ends = [plain(at(tensor["mean"] + sign * tensor["std"])) for sign in (-1, 1)]
            parts.append(path(f"M{ends[0]} 23v6m0 -3H{ends[1]}m0 -3v6", "spread"))
        parts.append(path(f"M{plain(at(tensor['mean']) - 4)} 21h8l-4 7z", "mean"))
    for index, (name, count) in enumerate(bad):
        y = _FLOOR - 26 - (len(bad) - 1 - index) * 34
        parts += [
            cross(right + 18, y - 4, "alarm bad"),
            write(right + 27, y, name, "alarm strong"),
            write(right + 14, y + 14, f"{count:,}", "alarm"),
        ]
        title = f"{plural(count, 'value')} that {'is' if count == 1 else 'are'} {name}"
        marks.append(mark(title, area(right + 10, y - 14, 66, 32)))
    if bins and bins.get("sampled"):
        parts.append(write(_WIDE, 11, "a sample", "quiet end"))
    return chart("histogram", (_WIDE, _FLOOR + 20), _told(tensor), "".join(parts), "".join(marks))


def _filled(bins: Mapping[str, Any] | None) -> list[tuple[int, int, int]]:
    """Return sign, power of two and count of each bin that holds a value."""
    return [
        (sign, bins["lowest"] + index, count)
        for sign, side in ((-1, "negative"), (1, "positive"))
        for index, count in enumerate(bins[side] if bins else ())
        if bins and count
    ]


def _ticks(at: Any, has_zero: bool, signs: Iterable[int], low: int, high: int) -> Iterable[str]:
    """Yield ticks at powers of ten, as far as their texts have room."""
    wanted = [0.0] if has_zero else []
    first, last = math.ceil(low * math.log10(2)), math.floor(high * math.log10(2))
    step = max(1, math.ceil((last - first) / 5))
    powers = [10.0**power for power in range(last, first - 1, -1) if power % step == 0]
    ends = [2.0**low, 2.0 ** min(high, 1023)]
    wanted += [sign * value for sign in sorted(signs, reverse=True) for value in powers or ends]
    taken: list[tuple[float, float]] = []
    for value in wanted:
        x, text = at(value), brief(value)
        half = len(text) * LETTER / 2 + 3
        is_free = all(x + half <= start or x - half >= end for start, end in taken)
        yield path(f"M{plain(x)} {_FLOOR}v3", "axis-line")
        if is_free and x - half >= -4 and x + half <= _WIDE + 4:
            taken.append((x - half, x + half))
            yield write(x, _FLOOR + 14, text, "quiet small middle")


def _moments(tensor: Mapping[str, Any]) -> str:
    told = [f"{name} {brief(tensor[name])}" for name in ("mean", "std") if finite(tensor[name])]
    told += [f"{percent(tensor['dead'])} dead"] if finite(tensor["dead"]) else []
    return "  \N{MIDDLE DOT}  ".join(told)


def _told(tensor: Mapping[str, Any]) -> str:
    told = [f"{_called(tensor)}: {plural(tensor['count'], 'value')}"]
    if finite(tensor["min"]) and finite(tensor["max"]):
        told.append(f"from {brief(tensor['min'])} to {brief(tensor['max'])}")
    told += [f"{name} {brief(tensor[name])}" for name in ("mean", "std") if finite(tensor[name])]
    if tensor["count"]:
        told.append(f"{percent((tensor['zeros'] or 0) / tensor['count'])} zeros")
    if finite(tensor["dead"]):
        told.append(f"{percent(tensor['dead'])} of the units dead")
    for key, name in (("nan", "NaN"), ("inf", "infinite")):
        told += [f"{plural(tensor[key], 'value')} {name}"] if tensor[key] else []
    return ", ".join(told)


def _called(tensor: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (words(tensor["role"]), tensor["name"])))


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
        return nothing("course", "No step was recorded.")
    by_statistic: dict[str, list[_Line]] = defaultdict(list)
    for name, statistics in found["layers"].items():
        for statistic, values in statistics.items():
            if any(map(finite, values)):
                by_statistic[statistic].append((name, values))
    top = _ABOVE + _LOSS + _BELOW
    row = _ABOVE + _SMALL + _BELOW
    marks: list[str] = []
    frame = _Frame(0, 0, WIDTH, _LOSS)
    body = [_over_steps("loss", frame, steps, [("", loss)], marks, None)]
    width = (WIDTH - _GAP) / 2
    for index, (statistic, lines) in enumerate(by_statistic.items()):
        frame = _Frame(index % 2 * (width + _GAP), top + index // 2 * row, width, _SMALL)
        body.append(_over_steps(words(statistic), frame, steps, lines, marks, anchor))
    height = top + math.ceil(len(by_statistic) / 2) * row
    return chart("course", (WIDTH, height), _course_told(steps, loss), "".join(body), "".join(marks))


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
    positive = [value for value in known if value > 0]
    is_log = min(known, default=-1) >= 0 and max(positive, default=0) > _LOG_FROM * min(
        positive, default=1
    )
    if is_log:
        vertical = log_scale(positive, bottom - 3, top + 3, 4)
    else:
        vertical = linear_scale(known, bottom - 3, top + 3, 4)
    across = linear_scale(steps, left + 3, right - 3, 8 if frame.width > 400 else 5)

    def place(step: float, value: float) -> tuple[float, float]:
        return across.at(step), bottom if is_log and not value else vertical.at(value)

    parts = []
    for y, text in vertical.ticks:
        parts.append(path(f"M{plain(left)} {plain(y)}H{plain(right)}", "rule"))
        parts.append(write(left - 5, y + 3.5, text, "quiet small end"))
    parts.append(path(f"M{plain(left)} {plain(bottom)}H{plain(right)}", "axis-line"))
    for x, text in across.ticks:
        if "." not in text and (len(lines) > 1 or x <= right - 40):
            parts.append(path(f"M{plain(x)} {plain(bottom)}v3", "axis-line"))
            parts.append(write(x, bottom + 14, text, "quiet small middle"))
    if len(lines) == 1:
        parts.append(write(right, bottom + 14, "step", "quiet small end"))
    else:
        parts.append(write(right, frame.y + 12, plural(len(lines), "layer"), "quiet small end"))
    marks.append(mark(_summary(title, steps, lines), area(left, top, right - left, frame.height)))
    ended = sorted((_last(own), at) for at, (_, own) in enumerate(lines) if any(map(finite, own)))
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
        is_late = x > WIDTH - 160
        parts.append(cross(x, top + 5))
        text = f"NaN or inf from step {bad}"
        parts.append(write(x - 8 if is_late else x + 8, top + 9, text, f"alarm{' end' * is_late}"))
    kind = "loss" if anchor is None else "statistic"
    return write(frame.x, frame.y + 12, title, "strong") + tag("g", *parts, class_=f"panel {kind}")


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
            parts.append(line(run) + alone)
            run = []
    return path("".join(parts), class_)


def _band(steps: Sequence[int], lines: Sequence[_Line], place: Any) -> str:
    """Return the band from the least to the greatest of all layers, and the median."""
    lows, medians, highs = [], [], []
    for index, step in enumerate(steps):
        known = sorted(v for _, values in lines if (v := values[index]) is not None)
        if known:
            lows.append(place(step, known[0]))
            medians.append(place(step, known[len(known) // 2]))
            highs.append(place(step, known[-1]))
    band = f"{line(lows)}L{line(highs[::-1])[1:]}z"
    return path(band, "band") + path(line(medians), "median")


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
        parts.append(write(right + 5, above, fitted(label, 14), f"small coloured {style}"))
        shape = area(right + 2, above - 10, _LABEL - 4, 13)
        marks.append(mark(f"{label}: ends at {brief(end)}", shape, link_to(anchor, name)))
    return "".join(parts)


def _first_bad(steps: Sequence[int], loss: Sequence[float | None]) -> int | None:
    return next((s for s, value in zip(steps, loss, strict=False) if value is None), None)


def _summary(title: str, steps: Sequence[int], lines: Sequence[_Line]) -> str:
    known = [value for value in lines[0][1] if value is not None]
    if len(lines) > 1:
        return f"{title} of {len(lines)} layers, steps {steps[0]} to {steps[-1]}"
    ends = (brief(known[0]), brief(known[-1])) if known else ("no number", "no number")
    return f"{title}: {ends[0]} at first, {ends[1]} at last"


def _course_told(steps: Sequence[int], loss: Sequence[float | None]) -> str:
    known = [value for value in loss if value is not None]
    if not known:
        return f"course of {plural(len(steps), 'step')}; no loss was recorded"
    first, last = known[0], known[-1]
    verb = "rises" if last > first else "falls" if last < first else "stays"
    bad = _first_bad(steps, loss)
    end = f" at step {steps[-1]}" if bad is None else f"; NaN or infinity from step {bad}"
    return f"loss {verb} from {brief(first)} at step {steps[0]} to {brief(last)}{end}"


# Drift

_LABELS, _TALL, _MOST_TENSORS = 250, 66, 30
_SPREAD = 25
"""A range of more stds is drawn on an axis that is logarithmic far from zero."""


def drift(found: Mapping[str, Any], anchor: str) -> Markup:
    """Return what tensors were in the snapshot, above what they are now, each on one axis."""
    sides = [
        {(layer["name"], t["role"], t["name"]): t for layer in found[side] for t in layer["tensors"]}
        for side in ("before", "now")
    ]
    moves: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for item in found["drifts"]:
        moves[item["layer"], item["role"], tensor_of(item)].append(item)
    if not moves:
        return nothing("drift", "Nothing drifted.")
    body, marks = [_drift_legend()], []
    finding = ""
    for index, (key, items) in enumerate(moves.items()):
        layer, role, own = key
        label = layer if own and layer else label_of(items[0])
        what = " ".join(filter(None, (words(role), own)))
        told = [
            f"{words(i['statistic'])} {_spelt(i['before'])} \N{RIGHTWARDS ARROW} {_spelt(i['now'])}"
            for i in items
        ]
        finding = finding or f"first {label} {what}: {told[0]}"
        if index < _MOST_TENSORS:
            y = _ABOVE + index * _TALL
            more = f"  (+{len(told) - 1})" if len(told) > 1 else ""
            body += [
                path(f"M0 {y}H{WIDTH}", "rule"),
                write(0, y + 16, fitted(label, 32), "strong"),
                write(0, y + 31, shorten(what, 36), "quiet"),
                write(0, y + 46, shorten(told[0], 31) + more, "alarm"),
                _both_sides([side.get(key) for side in sides], y),
            ]
            title = "\n".join((f"{label} {what}", *told))
            marks.append(mark(title, area(0, y + 1, WIDTH, _TALL - 2), link_to(anchor, layer)))
    rest = len(moves) - _MOST_TENSORS
    height = _ABOVE + min(len(moves), _MOST_TENSORS) * _TALL
    if rest > 0:
        body.append(write(0, height + 14, f"and {plural(rest, 'tensor')} more", "quiet slanted"))
    finding = f"{plural(len(moves), 'tensor')} drifted; {finding}"
    size = (WIDTH, height + 20 * (rest > 0))
    return chart("drift", size, finding, "".join(body), "".join(marks))


def tensor_of(item: Mapping[str, Any]) -> str:
    """Return ``"weight"`` of a drift labelled ``"head.weight"``, ``""`` where a role is enough."""
    if item["role"] not in ("parameters", "parameter_gradients", "buffers"):
        return ""
    start = f"{item['layer']}." if item["layer"] else ""
    return str(item["label"]).removeprefix(start)


def _spelt(value: object) -> str:
    if value is None:
        return "\N{EN DASH}"
    return brief(value) if isinstance(value, int | float) else str(value)


def _drift_legend() -> str:
    parts = []
    for x, name in ((_LABELS, "before"), (_LABELS + 110, "now")):
        glyph = {"min": x, "max": x + 44.0, "mean": x + 20.0, "std": 11.0}
        parts.append(_range(glyph, float, 9, name))
        parts.append(write(x + 50, 13, name, "quiet"))
    said = "line: least to greatest; bar: mean \N{PLUS-MINUS SIGN} std"
    return "".join((*parts, write(_LABELS + 206, 13, said, "quiet")))


def _both_sides(sides: Sequence[Mapping[str, Any] | None], y: float) -> str:
    start, end = _LABELS + 8, WIDTH - 14
    scale = _drift_scale([side for side in sides if side is not None], start, end)
    parts = []
    for index, (name, side) in enumerate(zip(("before", "now"), sides, strict=True)):
        at = y + 17 + index * 17
        if side is None:
            why = "not there now" if index else "not in the snapshot"
            parts.append(write(start, at + 4, why, "quiet slanted"))
            continue
        if scale is not None and finite(side["min"]) and finite(side["max"]):
            parts.append(_range(side, scale.at, at, name))
        else:
            parts.append(write(start, at + 4, "no finite values", "quiet slanted"))
        if bad := (side.get("nan") or 0) + (side.get("inf") or 0):
            parts.append(cross(WIDTH - 6, at))
            parts.append(write(WIDTH - 16, at + 4, f"{bad:,} NaN or inf", "alarm small end"))
    if scale is not None:
        parts.append(path(f"M{start} {y + 44}H{end}", "rule"))
        taken = -math.inf
        for x, text in sorted(scale.ticks):
            half = len(text) * LETTER / 2 + 2
            parts.append(path(f"M{plain(x)} {y + 44}v3", "axis-line"))
            if x - half >= taken and x + half <= WIDTH:
                taken = x + half
                parts.append(write(x, y + 58, text, "quiet small middle"))
    return "".join(parts)


def _range(side: Mapping[str, Any], at: Any, y: float, name: str) -> str:
    """Return a line from least to greatest, a bar of mean and std, a stroke at the mean."""
    low, high = plain(at(side["min"])), plain(at(side["max"]))
    parts = [path(f"M{low} {y - 4}v8m0 -4H{high}m0 -4v8", "extent")]
    mean, std = side.get("mean"), side.get("std")
    if finite(mean) and mean is not None:
        if finite(std) and std is not None:
            start = at(mean - std)
            width = max(1.0, at(mean + std) - start)
            parts.append(tag("rect", x=start, y=y - 4.5, width=width, height=9, class_="spread"))
        parts.append(path(f"M{plain(at(mean))} {y - 6.5}v13", "mean"))
    return tag("g", *parts, class_=f"range {name}")


def _drift_scale(sides: Sequence[Mapping[str, Any]], start: float, end: float) -> Scale | None:
    """Return an axis of both sides; asinh(x / std) shows extremes that are many stds away."""
    ends: list[float] = []
    stds = [side["std"] for side in sides if side.get("std")]
    for side in sides:
        if finite(side["min"]) and finite(side["max"]):
            ends += (side["min"], side["max"])
            if finite(side["mean"]) and finite(side["std"]):
                ends += (side["mean"] - side["std"], side["mean"] + side["std"])
    if not ends:
        return None
    low, high, unit = min(ends), max(ends), min(stds, default=0.0)
    if not unit or high - low <= _SPREAD * unit:
        return linear_scale(ends, start, end)
    inner = linear_scale([math.asinh(low / unit), math.asinh(high / unit)], start, end)

    def at(value: float) -> float:
        return inner.at(math.asinh(value / unit))

    first, last = math.ceil(math.log10(unit)), math.floor(math.log10(max(-low, high)))
    powers = [10.0**power for power in range(first, last + 1)]
    values = [value for value in (0.0, *powers, *(-p for p in powers)) if low <= value <= high]
    return Scale(at, [(at(value), brief(value)) for value in values])
