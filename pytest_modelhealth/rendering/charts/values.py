"""The chart of a tensor's values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pytest_modelhealth.alignment.result import listed
from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.notation import percent

Tensor = Mapping[str, Any]  # statistics of a tensor, as in the file of a run

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
    finding = f"values of {listed([name for name, _ in tensors], 3)}"
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
