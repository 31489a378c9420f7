"""The chart of a tensor's values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pytest_modelhealth.alignment.result import listed
from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.notation import number, percent

Tensor = Mapping[str, Any]  # statistics of a tensor, as in the file of a run

_NAMES, _NUMBERS, _HIGH = 190, 150, 50
# bars of all values; pixels of a bar at most, and between two numbers of the axis at least
_MOST_BARS, _WIDEST, _APART = 60, 22.0, 58


def histograms(tensors: Sequence[tuple[str, Tensor]], left_out: str = "", row: int = 26) -> Markup:
    """Return the values of tensors by sign and power of two, a row each, of so many pixels.

    All are on one axis, on which powers share a bar where there are many, and each row is scaled to
    its own highest bar. A row of `_HIGH` or more says more of a tensor, `left_out` stands below.
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
    parts, is_cut = [svg.path(f"M{_NAMES} {floor}H{right}", "axis-line")], False
    every = math.ceil(_APART / width)
    ticks = [(at[0, 0] + width / 2, 0.0)]
    for edge in range(min(every, len(starts)), len(starts) + 1, every) if starts else ():
        size = 2.0 ** min(low + edge * group, 1023)
        ticks += [(at[0, 0] + (1 + edge) * width, size)] * (1 in signs)
        ticks += [(at[0, 0] - edge * width, -size)] * (-1 in signs)
    parts.append(svg.write(right + 8, floor + 14, "value", "quiet small"))
    for x, value in ticks:
        parts.append(svg.path(f"M{svg.plain(x)} {floor}v3", "axis-line"))
        parts.append(svg.write(x, floor + 14, svg.brief(value), "quiet small middle"))
    for place, (name, tensor) in enumerate(tensors, start=1):
        y = place * row
        counts: dict[tuple[int, int], int] = defaultdict(int)
        for sign, power, count in _bins(tensor):
            counts[sign, low + (power - low) // group * group] += count
        zeros, most = tensor["zeros"] or 0, max(counts.values(), default=0)
        tallest = max(1, most, min(zeros, 2 * most or zeros))
        is_cut = is_cut or zeros > tallest  # where no other bar could be seen
        counts |= {(0, 0): zeros} if zeros else {}
        for slot, count in counts.items():
            tall = max(1.5, min(count / tallest, 1.0) * (row - 4))
            kind = "bin" if slot[0] else "zeros"
            parts.append(svg.rect(at[slot], y - tall, width - (width > 5), tall, kind))
        parts.append(svg.write(_NAMES - 8, y - 5, svg.fitted(name, 26), "end name"))
        if row > _HIGH and counts:
            share = percent(tallest / max(1, tensor["count"]))
            parts.append(svg.path(f"M{_NAMES - 3} {y - row + 4}h3V{y}", "axis-line"))
            parts.append(svg.write(_NAMES - 8, y - row + 12, share, "quiet small end"))
        for above, (text, class_) in enumerate(reversed([*_labels(tensor, is_high=row > _HIGH)])):
            parts.append(svg.write(right + 8, y - 4 - 11 * above, text, class_))
    between = "two powers of two" if group == 1 else f"powers of two, {group} a bar"
    said = f"\u25a0 part of the values between {between}; each row to its own highest bar"
    parts.append(svg.write(0, floor + 34, said, "small coloured first"))
    zero = "\u25a0 zeros" + ", cut" * is_cut
    parts.append(svg.write(len(said) * svg.LETTER * 0.93, floor + 34, zero, "small quiet"))
    parts.append(svg.write(0, floor + 50, left_out, "quiet slanted") if left_out else "")
    finding = f"values of {listed([name for name, _ in tensors], 3)}"
    height = floor + 42 + 16 * bool(left_out)
    return svg.chart("histograms", (svg.WIDTH, height), finding, "".join(parts))


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
        mean, std = number(tensor["mean"]), number(tensor["std"])
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
