"""The charts of a tensor's values, and of what they were in a snapshot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.notation import percent, plural, shorten, some

Tensor = Mapping[str, Any]
"""Statistics of a tensor, as in the file of a run."""

# Histograms

_NAMES, _NUMBERS = 190, 150
_MOST_BARS, _WIDEST, _APART = 60, 22.0, 58
"""Bars of all values; pixels of a bar at most, and between two numbers of the axis at least."""


def histograms(tensors: Sequence[tuple[str, Tensor]], left_out: str = "", row: int = 26) -> Markup:
    """Return the values of tensors by sign and power of two, a row each.

    All are on one axis, on which powers share a bar where there are many, and each row is scaled to
    its own highest bar.

    Args:
        tensors: names and tensors.
        left_out: a sentence below.
        row: pixels of a row; a high one says more of a tensor.
    """
    sides = [(sign, power) for _, tensor in tensors for sign, power, _ in _bins(tensor)]
    powers, signs = [power for _, power in sides], {sign for sign, _ in sides}
    low, high = min(powers, default=0), max(powers, default=-1) + 1
    group = math.ceil((high - low) * len(signs) / _MOST_BARS) or 1
    starts = range(low, high, group)
    slots = [(-1, start) for start in reversed(starts) if -1 in signs] + [(0, 0)]
    slots += [(1, start) for start in starts if 1 in signs]
    right, floor = svg.WIDTH - _NUMBERS, row * len(tensors)
    width = min((right - _NAMES) / len(slots), _WIDEST)
    left = (_NAMES + right - width * len(slots)) / 2
    at = {slot: left + index * width for index, slot in enumerate(slots)}
    parts = [svg.path(f"M{_NAMES} {floor}H{right}", "axis-line")]
    every = math.ceil(_APART / width)
    ticks = [(at[0, 0] + width / 2, 0.0)]
    for edge in range(min(every, len(starts)), len(starts) + 1, every) if starts else ():
        size = 2.0 ** min(low + edge * group, 1023)
        ticks += [(at[0, 0] + (1 + edge) * width, size)] * (1 in signs)
        ticks += [(at[0, 0] - edge * width, -size)] * (-1 in signs)
    for x, value in ticks:
        parts.append(svg.path(f"M{svg.plain(x)} {floor}v3", "axis-line"))
        parts.append(svg.write(x, floor + 14, svg.brief(value), "quiet small middle"))
    for number, (name, tensor) in enumerate(tensors, start=1):
        y = number * row
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for sign, power, count in _bins(tensor):
            counts[sign, low + (power - low) // group * group] += count
        zeros, most = tensor["zeros"] or 0, max(counts.values(), default=0)
        tallest = max(1, most, min(zeros, 2 * most or zeros))
        counts |= {(0, 0): zeros} if zeros else {}
        for slot, count in counts.items():  # that of zeros is cut where no other could be seen
            tall = max(1.5, min(count / tallest, 1.0) * (row - 4))
            kind = "bin" if slot[0] else "zeros"
            parts.append(svg.rect(at[slot], y - tall, width - (width > 5), tall, kind))
        parts.append(svg.write(_NAMES - 8, y - 5, svg.fitted(name, 26), "end name"))
        for above, (text, class_) in enumerate(reversed([*_labels(tensor, is_high=row > 50)])):
            parts.append(svg.write(right + 8, y - 4 - 11 * above, text, class_))
    parts.append(svg.write(0, floor + 32, left_out, "quiet slanted"))
    finding = f"values of {some([name for name, _ in tensors], 3)}"
    return svg.chart("histograms", (svg.WIDTH, floor + 40), finding, "".join(parts))


def _bins(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield sign, power of two and count of each bin that holds a value."""
    bins = tensor.get("bins")
    for sign, side in ((-1, "negative"), (1, "positive")):
        for power, count in enumerate(bins[side], bins["lowest"]) if bins else ():
            if count:
                yield sign, power, count


def _labels(tensor: Tensor, *, is_high: bool) -> Iterator[tuple[str, str]]:
    """Yield what stands beside a row, and its class."""
    if tensor.get("bins") or tensor["zeros"]:
        mean, std = svg.brief(tensor["mean"]), svg.brief(tensor["std"])
        yield f"{mean} \N{PLUS-MINUS SIGN} {std}", "quiet small"
    else:
        yield "not counted by size" if tensor["count"] else "no values", "quiet small"
    if is_high:
        yield f"{percent((tensor['zeros'] or 0) / max(1, tensor['count']))} zeros", "quiet small"
        if svg.finite(tensor["dead"]):
            yield f"{percent(tensor['dead'])} dead", "quiet small"
    bad = [f"{tensor[key.lower()]:,} {key}" for key in ("NaN", "inf") if tensor[key.lower()]]
    if bad:
        yield ", ".join(bad), "alarm small"


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
        change = f"{svg.words(first['statistic'])} {before} \u2192 {now}"
        body.append(svg.path(f"M0 {y}H{svg.WIDTH}", "rule"))
        body.append(svg.write(0, y + 16, svg.fitted(label, 32), "strong"))
        body.append(svg.write(0, y + 30, shorten(what, 36), "quiet"))
        body.append(svg.write(0, y + 44, shorten(change, 36), "alarm"))
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
