"""The charts of a tensor's values, and of what they were in a snapshot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.notation import percent, plural, shorten

Tensor = Mapping[str, Any]
"""Statistics of a tensor, as in the file of a run."""

# Histograms

_WIDE, _TOP, _FLOOR = 360, 44, 120
_NAMES, _NUMBERS, _ROW = 190, 150, 24
_ZERO, _WIDEST = 16.0, 22.0
"""Pixels: the bar of zeros, and the widest other one."""


class _Axis(NamedTuple):
    """Powers of two of either sign, and zero between them.

    Args:
        start: where the least number stands.
        end: where the greatest does.
        zero: the middle of the zeros.
        gap: half of the room that they take.
        step: pixels of a power.
        low: the least power.
        high: the greatest.
        group: powers in a bar.
    """

    start: float
    end: float
    zero: float
    gap: float
    step: float
    low: int
    high: int
    group: int

    def at(self, value: float) -> float:
        """Return where a number stands."""
        if not value:
            return self.zero
        along = min(max(math.log2(abs(value)) - self.low, 0.0), self.high - self.low) * self.step
        return self.zero + math.copysign(self.gap + along, value)


def _axis(tensors: Sequence[Tensor], left: float, right: float) -> _Axis:
    """Return an axis for all values of these tensors between two places."""
    sides = [(sign, power) for one in tensors for sign, power, _ in _bins(one)]
    powers, signs = [power for _, power in sides], {sign for sign, _ in sides}
    low, high = min(powers, default=0), max(powers, default=-1) + 1
    has_zero = -1 in signs or any(one["zeros"] for one in tensors)
    gap, count = has_zero * _ZERO / 2 + 2, (high - low) * len(signs)
    step = min((right - left - 2 * gap) / count, _WIDEST) if count else 0.0
    start = left + (right - left - step * count - 2 * gap) / 2
    zero = start + gap + (high - low) * step * (-1 in signs)
    end = zero + gap + (high - low) * step * (1 in signs)
    group = math.ceil(2.5 / step) if step else 1
    return _Axis(start, end, zero, gap, step, low, high, group)


def _bins(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield sign, power of two and count of each bin that holds a value."""
    bins = tensor.get("bins")
    for sign, side in ((-1, "negative"), (1, "positive")):
        for index, count in enumerate(bins[side] if bins else ()):
            if bins and count:
                yield sign, bins["lowest"] + index, count


class _Bar(NamedTuple):
    left: float
    width: float
    number: int
    title: str
    kind: str


def _bars(axis: _Axis, tensor: Tensor) -> list[_Bar]:
    """Return the bars of a tensor; powers share one where each would be too narrow."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for sign, power, count in _bins(tensor):
        counts[sign, (power - axis.low) // axis.group] += count
    bars = []
    for (sign, place), count in counts.items():
        ends = (min(axis.low + (place + n) * axis.group, axis.high, 1023) for n in (0, 1))
        low, high = sorted(sign * 2.0**power for power in ends)
        title = f"{plural(count, 'value')} of {svg.brief(low)} to {svg.brief(high)}"
        bars.append(_Bar(axis.at(low), axis.at(high) - axis.at(low), count, title, "bin"))
    if zeros := tensor["zeros"]:
        bars.append(_Bar(axis.zero - _ZERO / 2, _ZERO, zeros, plural(zeros, "zero"), "zeros"))
    return bars


def _ticks(axis: _Axis, tensors: Sequence[Tensor], floor: float) -> Iterator[str]:
    """Yield zero and powers of ten below an axis, as far as their texts have room."""
    signs = sorted({sign for one in tensors for sign, *_ in _bins(one)}, reverse=True)
    tens = range(math.floor(axis.high * math.log10(2)), math.floor(axis.low * math.log10(2)), -1)
    sizes = [10.0**power for power in tens] or [2.0**axis.low] * bool(signs)
    taken: list[tuple[float, float]] = []
    for value in [*[0.0] * (axis.gap > 2), *(sign * size for sign in signs for size in sizes)]:
        x, text = axis.at(value), svg.brief(value)
        half = len(text) * svg.LETTER / 2 + 3
        if all(x + half <= left or x - half >= right for left, right in taken):
            taken.append((x - half, x + half))
            yield svg.path(f"M{svg.plain(x)} {floor}v3", "axis-line")
            yield svg.write(x, floor + 14, text, "quiet small middle")


def histogram(tensor: Tensor) -> Markup:
    """Return the values of a tensor by sign and power of two; what is not finite is counted."""
    bad = [(name, tensor[key]) for name, key in (("NaN", "nan"), ("inf", "inf")) if tensor[key]]
    right = _WIDE - (76 if bad else 8)
    axis = _axis([tensor], 4, right)
    bars = _bars(axis, tensor)
    told = [f"{key} {svg.brief(tensor[key])}" for key in ("mean", "std") if svg.finite(tensor[key])]
    told += [f"{percent(tensor['dead'])} dead"] if svg.finite(tensor["dead"]) else []
    parts, marks = [svg.write(0, 11, "  \N{MIDDLE DOT}  ".join(told), "quiet")], []
    if not bars:
        why = "no finite values" if bad else "the values were not counted by size"
        parts.append(svg.write(0, 70, why if tensor["count"] else "no values", "quiet slanted"))
    most = max((bar.number for bar in bars if bar.kind == "bin"), default=0) * 2
    tallest = max((min(bar.number, most or bar.number) for bar in bars), default=1)
    for bar in bars:  # zeros are cut, their part is written
        height = max(1.5, min(bar.number / tallest, 1.0) * (_FLOOR - _TOP))
        space = 1 if bar.width > 5 and bar.kind == "bin" else 0
        x, width = bar.left + space / 2, bar.width - space
        parts.append(svg.rect(x, _FLOOR - height, width, height, bar.kind))
        area = svg.rect(bar.left, _TOP - 4, bar.width, _FLOOR - _TOP + 4, "mark")
        marks.append(svg.mark(bar.title, area))
        if bar.kind == "zeros" and bar.number >= 0.005 * tensor["count"]:
            share, x = percent(bar.number / tensor["count"]), axis.zero
            parts.append(svg.write(x, _FLOOR - height - 3, share, "quiet small middle"))
    parts += [svg.path(f"M4 {_FLOOR}H{right + 4}", "axis-line"), *_ticks(axis, [tensor], _FLOOR)]
    for y, (name, count) in zip((94, 60), reversed(bad), strict=False):
        parts.append(svg.cross(right + 18, y - 4))
        parts.append(svg.write(right + 27, y, name, "alarm strong"))
        parts.append(svg.write(right + 14, y + 14, f"{count:,}", "alarm"))
    if tensor.get("bins") and tensor["bins"].get("sampled"):
        parts.append(svg.write(_WIDE, 11, "a sample", "quiet end"))
    told.insert(0, f"{svg.words(tensor['role'])} {tensor['name']}".strip())
    if svg.finite(tensor["min"]) and svg.finite(tensor["max"]):
        told.append(f"from {svg.brief(tensor['min'])} to {svg.brief(tensor['max'])}")
    told += [f"{plural(count, 'value')} {name}" for name, count in bad]
    size = _WIDE, _FLOOR + 20
    return svg.chart("histogram", size, ", ".join(told), "".join(parts), "".join(marks))


def histograms(named: Sequence[tuple[str, Tensor]], left_out: str) -> Markup:
    """Return the values of tensors on one axis, a row each, scaled to its own highest bar.

    Args:
        named: names and tensors.
        left_out: a sentence below.
    """
    tensors, right = [tensor for _, tensor in named], svg.WIDTH - _NUMBERS
    axis, floor = _axis(tensors, _NAMES + 4, right - 4), _ROW * len(named)
    parts = [svg.path(f"M{_NAMES} {floor}H{right}", "axis-line"), *_ticks(axis, tensors, floor)]
    for row, (name, tensor) in enumerate(named, start=1):
        bars, y = _bars(axis, tensor), row * _ROW
        tallest = max((bar.number for bar in bars), default=1)
        for bar in bars:
            height = max(1.0, bar.number / tallest * (_ROW - 4))
            parts.append(svg.rect(bar.left, y - height, bar.width, height, bar.kind))
        bad = tensor["nan"] + tensor["inf"]
        told = f"{svg.brief(tensor['mean'])} \N{PLUS-MINUS SIGN} {svg.brief(tensor['std'])}"
        told += f", {bad:,} not finite" if bad else ""
        parts.append(svg.write(_NAMES - 8, y - 5, svg.fitted(name, 26), "end name"))
        parts.append(svg.write(right + 8, y - 5, told, "quiet small"))
    parts.append(svg.write(0, floor + 32, left_out, "quiet slanted"))
    told = f"values of {plural(len(named), 'layer')}"
    return svg.chart("histograms", (svg.WIDTH, floor + 40), told, "".join(parts))


# Drift

_HEAD, _LABELS, _TALL, _MOST_TENSORS = 24, 250, 66, 30


def drift(result: Mapping[str, Any], anchor: str) -> Markup:
    """Return what tensors were in the snapshot, above what they are now, each on one axis."""
    sides = [
        {(one["name"], t["role"], t["name"]): t for one in result[side] for t in one["tensors"]}
        for side in ("before", "now")
    ]
    moves: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for item in result["drifts"]:
        moves[item["layer"], item["role"], tensor_of(item)].append(item)
    if not moves:
        return svg.nothing("drift", "Nothing drifted.")
    key = "above before, below now; line: least to greatest; bar: mean \N{PLUS-MINUS SIGN} std"
    body, marks, said = [svg.write(_LABELS, 13, key, "quiet")], [], []
    for index, ((layer, role, own), items) in enumerate([*moves.items()][:_MOST_TENSORS]):
        y = _HEAD + index * _TALL
        label = layer if own and layer else svg.label_of(items[0])
        what = f"{svg.words(role)} {own}".strip()
        told = [
            f"{svg.words(i['statistic'])} {_spelt(i['before'])} \u2192 {_spelt(i['now'])}"
            for i in items
        ]
        said.append(f"{label} {what}: {told[0]}")
        more = f"  (+{len(told) - 1})" if len(told) > 1 else ""
        body += [
            svg.path(f"M0 {y}H{svg.WIDTH}", "rule"),
            svg.write(0, y + 16, svg.fitted(label, 32), "strong"),
            svg.write(0, y + 31, shorten(what, 36), "quiet"),
            svg.write(0, y + 46, shorten(told[0], 31) + more, "alarm"),
            *_both_sides([side.get((layer, role, own)) for side in sides], y),
        ]
        area = svg.rect(0, y + 1, svg.WIDTH, _TALL - 2, "mark")
        title = "\n".join((f"{label} {what}", *told))
        marks.append(svg.mark(title, area, svg.link_to(anchor, layer)))
    height = _HEAD + len(said) * _TALL
    if rest := len(moves) - len(said):
        body.append(svg.write(0, height + 14, f"and {plural(rest, 'tensor')} more", "quiet"))
    finding = f"{plural(len(moves), 'tensor')} drifted; first {said[0]}"
    size = svg.WIDTH, height + 20 * bool(rest)
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


def _both_sides(sides: Sequence[Tensor | None], y: float) -> Iterator[str]:
    start, end = _LABELS + 8, svg.WIDTH - 14
    known = [s for s in sides if s is not None and svg.finite(s["min"]) and svg.finite(s["max"])]
    ends = [end for side in known for end in (side["min"], side["max"], *_spread(side))]
    scale = svg.linear_scale(ends, start, end)
    for at, name, own in zip((y + 17, y + 34), ("before", "now"), sides, strict=True):
        if own is not None and own in known:
            yield _range(own, scale.at, at, name)
        else:
            missing = "not in the snapshot" if name == "before" else "not there now"
            why = missing if own is None else "no finite values"
            yield svg.write(start, at + 4, why, "quiet slanted")
        if own is not None and (bad := (own["nan"] or 0) + (own["inf"] or 0)):
            yield svg.cross(svg.WIDTH - 6, at)
            yield svg.write(svg.WIDTH - 16, at + 4, f"{bad:,} NaN or inf", "alarm small end")
    if known:
        yield svg.path(f"M{start} {y + 44}H{end}", "rule")
        for x, text in scale.ticks:
            yield svg.path(f"M{svg.plain(x)} {y + 44}v3", "axis-line")
            yield svg.write(x, y + 58, text, "quiet small middle")


def _range(side: Tensor, at: Callable[[float], float], y: float, name: str) -> str:
    """Return a line from least to greatest, a bar of mean and std, a stroke at the mean."""
    low, high = svg.plain(at(side["min"])), svg.plain(at(side["max"]))
    parts = [svg.path(f"M{low} {y - 4}v8m0 -4H{high}m0 -4v8", "extent")]
    for left, right in [map(at, _spread(side))] if _spread(side) else []:
        parts.append(svg.rect(left, y - 4.5, max(1.0, right - left), 9, f"spread {name}"))
    if svg.finite(side["mean"]):
        parts.append(svg.path(f"M{svg.plain(at(side['mean']))} {y - 6.5}v13", f"mean {name}"))
    return svg.tag("g", *parts, class_=f"range {name}")


def _spread(side: Tensor) -> list[float]:
    mean, std = side["mean"], side["std"]
    return [mean - std, mean + std] if svg.finite(mean) and svg.finite(std) else []
