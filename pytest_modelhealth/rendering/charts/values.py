"""The charts of a tensor's values, and of what they were in a snapshot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.notation import percent, plural, shorten, some

Tensor = Mapping[str, Any]
"""Statistics of a tensor, as in the file of a run."""

# Histograms

_NAMES, _NUMBERS = 190, 150
_ZERO, _WIDEST = 16.0, 22.0
"""Pixels: the bar of zeros, and the widest other one."""


class _Axis(NamedTuple):
    """Powers of two of either sign, and zero between them."""

    zero: float  # where its middle stands
    gap: float  # half of the room that it takes
    step: float  # pixels of a power
    low: int
    high: int
    signs: Sequence[int]

    def at(self, value: float) -> float:
        """Return where a number stands."""
        if not value:
            return self.zero
        along = min(max(math.log2(abs(value)) - self.low, 0.0), self.high - self.low) * self.step
        return self.zero + math.copysign(self.gap + along, value)


def _axis(tensors: Sequence[Tensor], left: float, right: float) -> _Axis:
    """Return an axis for all values of these tensors between two places."""
    sides = [(sign, power) for one in tensors for sign, power, _ in _bins(one)]
    signs = sorted({sign for sign, _ in sides})
    low = min((power for _, power in sides), default=0)
    high = max((power for _, power in sides), default=-1) + 1
    has_zero = -1 in signs or any(one["zeros"] for one in tensors)
    gap, count = has_zero * _ZERO / 2 + 2, (high - low) * len(signs)
    step = min((right - left - 2 * gap) / max(count, 1), _WIDEST)
    start = left + (right - left - step * count - 2 * gap) / 2
    return _Axis(start + gap + (high - low) * step * (-1 in signs), gap, step, low, high, signs)


def _bins(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield sign, power of two and count of each bin that holds a value."""
    bins = tensor.get("bins")
    for sign, side in ((-1, "negative"), (1, "positive")):
        for power, count in enumerate(bins[side], bins["lowest"]) if bins else ():
            if count:
                yield sign, power, count


def _bars(axis: _Axis, tensor: Tensor, floor: float, room: float) -> Iterator[str]:
    """Yield the bars of a tensor; powers share one where it would be too narrow.

    A bar of zeros is cut where others could not be seen beside it.
    """
    counts: dict[tuple[int, int], int] = defaultdict(int)
    group = math.ceil(2.5 / axis.step)
    for sign, power, count in _bins(tensor):
        counts[sign, (power - axis.low) // group] += count
    zeros, most = tensor["zeros"] or 0, max(counts.values(), default=0)
    tallest = max(1, most, min(zeros, 2 * most or zeros))
    for (sign, place), count in counts.items():
        ends = (min(axis.low + (place + n) * group, axis.high, 1023) for n in (0, 1))
        left, right = sorted(axis.at(sign * 2.0**power) for power in ends)
        height = max(1.5, count / tallest * room)
        space = int(right - left > 5)
        yield svg.rect(left, floor - height, right - left - space, height, "bin")
    if zeros:
        height = max(1.5, min(zeros / tallest, 1.0) * room)
        yield svg.rect(axis.zero - _ZERO / 2, floor - height, _ZERO, height, "zeros")


def _ticks(axis: _Axis, floor: float) -> Iterator[str]:
    """Yield zero and powers of ten below an axis, as far as their texts have room."""
    tens = range(math.floor(axis.high * math.log10(2)), math.floor(axis.low * math.log10(2)), -1)
    sizes = [10.0**power for power in tens] or [2.0**axis.low]
    taken: list[tuple[float, float]] = []
    for value in [*[0.0] * (axis.gap > 2), *(s * size for s in axis.signs[::-1] for size in sizes)]:
        x, text = axis.at(value), svg.brief(value)
        half = len(text) * svg.LETTER / 2 + 3
        if all(x + half <= left or x - half >= right for left, right in taken):
            taken.append((x - half, x + half))
            yield svg.path(f"M{svg.plain(x)} {floor}v3", "axis-line")
            yield svg.write(x, floor + 14, text, "quiet small middle")


def histograms(named: Sequence[tuple[str, Tensor]], left_out: str = "", row: int = 26) -> Markup:
    """Return the values of tensors on one axis, a row each, scaled to its own highest bar.

    Args:
        named: names and tensors.
        left_out: a sentence below.
        row: pixels of a row; a high one says more of a tensor.
    """
    right, floor = svg.WIDTH - _NUMBERS, row * len(named)
    axis = _axis([tensor for _, tensor in named], _NAMES + 4, right - 4)
    parts = [svg.path(f"M{_NAMES} {floor}H{right}", "axis-line"), *_ticks(axis, floor)]
    for number, (name, tensor) in enumerate(named, start=1):
        y = number * row
        bars = [*_bars(axis, tensor, y, row - 4)]
        parts.append(svg.write(_NAMES - 8, y - 5, svg.fitted(name, 26), "end name"))
        bad = [f"{tensor[key.lower()]:,} {key}" for key in ("NaN", "inf") if tensor[key.lower()]]
        told = [f"{svg.brief(tensor['mean'])} \N{PLUS-MINUS SIGN} {svg.brief(tensor['std'])}"]
        if row > 50:
            told += [f"{percent((tensor['zeros'] or 0) / max(1, tensor['count']))} zeros"]
            told += [f"{percent(tensor['dead'])} dead"] if svg.finite(tensor["dead"]) else []
        if not bars:
            told = ["no finite values" if bad or not tensor["count"] else "not counted by size"]
        lines = [(text, "quiet small") for text in told]
        lines += [(", ".join(bad), "alarm small")] if bad else []
        for at, (text, class_) in enumerate(reversed(lines)):
            parts.append(svg.write(right + 8, y - 4 - 11 * at, text, class_))
        parts += bars
    parts.append(svg.write(0, floor + 32, left_out, "quiet slanted"))
    finding = f"values of {some([name for name, _ in named], 3)}"
    return svg.chart("histograms", (svg.WIDTH, floor + 40), finding, "".join(parts))


# Drift

_HEAD, _LEFT, _TALL, _MOST_TENSORS = 24, 250, 52, 30


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
    body, marks = [svg.write(_LEFT, 13, key, "quiet")], []
    rows = [*moves.items()][:_MOST_TENSORS]
    for index, ((layer, role, own), items) in enumerate(rows):
        y = _HEAD + index * _TALL
        label = layer if own and layer else svg.label_of(items[0])
        what, first = f"{svg.words(role)} {own}".strip(), items[0]
        before, now = (
            svg.brief(v) if svg.finite(v) else str(v) for v in (first["before"], first["now"])
        )
        told = f"{svg.words(first['statistic'])} {before} \u2192 {now}"
        body.append(svg.path(f"M0 {y}H{svg.WIDTH}", "rule"))
        body.append(svg.write(0, y + 16, svg.fitted(label, 32), "strong"))
        body.append(svg.write(0, y + 30, shorten(what, 36), "quiet"))
        body.append(svg.write(0, y + 44, shorten(told, 36), "alarm"))
        body += _sides([side.get((layer, role, own)) for side in sides], y)
        area = svg.rect(0, y + 1, svg.WIDTH, _TALL - 2, "mark")
        marks.append(svg.mark(f"{label} {what}", area, svg.link_to(anchor, layer)))
    height = _HEAD + len(rows) * _TALL
    rest = len(moves) - len(rows)
    body += [svg.write(0, height + 14, f"and {plural(rest, 'tensor')} more", "quiet")] * bool(rest)
    finding = f"{plural(len(moves), 'tensor')} drifted"
    size = svg.WIDTH, height + 20 * bool(rest)
    return svg.chart("drift", size, finding, "".join(body), "".join(marks))


def tensor_of(item: Mapping[str, Any]) -> str:
    """Return ``"weight"`` of a drift labelled ``"head.weight"``, ``""`` where a role is enough."""
    if item["role"] not in ("parameters", "parameter_gradients", "buffers"):
        return ""
    start = f"{item['layer']}." if item["layer"] else ""
    return str(item["label"]).removeprefix(start)


def _sides(sides: Sequence[Tensor | None], y: float) -> Iterator[str]:
    """Yield a line from least to greatest, a bar of mean and std, a stroke at the mean; of each."""
    ranges = [() if side is None else _range(side) for side in sides]
    scale = svg.linear_scale([*chain(*ranges)], _LEFT + 8, svg.WIDTH - 14)
    for at, name, own in zip((y + 11, y + 25), ("before", "now"), ranges, strict=True):
        if not own:
            yield svg.write(_LEFT + 8, at + 4, "no finite values", "quiet slanted")
            continue
        low, high, left, mean, right = map(scale.at, own)
        line = f"M{svg.plain(low)} {at - 4}v8m0 -4H{svg.plain(high)}m0 -4v8"
        bar = svg.rect(left, at - 4.5, max(1.0, right - left), 9, f"spread {name}")
        stroke = svg.path(f"M{svg.plain(mean)} {at - 6.5}v13", f"mean {name}")
        yield svg.tag("g", svg.path(line, "extent"), bar, stroke, class_=f"range {name}")
    for x, text in scale.ticks if any(ranges) else ():
        yield svg.path(f"M{svg.plain(x)} {y + 34}v3", "axis-line")
        yield svg.write(x, y + 47, text, "quiet small middle")


def _range(side: Tensor) -> Sequence[float]:
    """Return least, greatest, mean minus std, mean, and mean plus std; nothing if not finite."""
    low, high, mean, std = (side[key] for key in ("min", "max", "mean", "std"))
    ends = (low, high, mean - std, mean, mean + std) if svg.finite(mean) and svg.finite(std) else ()
    return ends if svg.finite(low) and svg.finite(high) else ()
