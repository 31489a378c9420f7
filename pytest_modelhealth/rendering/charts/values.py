"""The charts of a tensor's values, and of what they were in a snapshot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from pytest_modelhealth.rendering.charts import svg
from pytest_modelhealth.rendering.evidence import normal_exponents
from pytest_modelhealth.rendering.notation import percent, plural, shorten

# Histogram

_WIDE, _FLOOR, _TOP = 360, 120, 44
_MOST_ZEROS = 2
"""Times the greatest other bar; a higher bar of zeros is cut."""


class _Axis(NamedTuple):
    """Where numbers stand, the place and width of the zeros, and the powers of two that are shown.

    So many of them share a bar.
    """

    at: Callable[[float], float]
    zero_at: float
    zero_width: float
    low: int
    high: int
    group: int


def histogram(tensor: Mapping[str, Any]) -> Markup:
    """Return the values of a tensor by sign and power of two."""
    bad = [(name, tensor[key]) for name, key in (("NaN", "nan"), ("inf", "inf")) if tensor[key]]
    right = _WIDE - (76 if bad else 8)
    filled, zeros = _filled(tensor.get("bins")), tensor["zeros"] or 0
    axis = _axis(filled, zeros, right)
    parts, marks = [svg.write(0, 11, "  \N{MIDDLE DOT}  ".join(_moments(tensor)), "quiet")], []
    if not filled and not zeros:
        why = "no finite values" if bad else "the values were not counted by size"
        parts.append(svg.write(0, 70, why if tensor["count"] else "no values", "quiet slanted"))
    bars = _bars(axis, filled, zeros)
    most = max((count for *_, count, _, kind in bars if kind == "bin"), default=0)
    tallest = max(1, most, min(zeros, (most or zeros) * _MOST_ZEROS))
    for start, end, count, title, kind in bars:
        top = _FLOOR - max(1.5, min(count, tallest) / tallest * (_FLOOR - _TOP))
        space = 1 if end - start > 5 and kind == "bin" else 0
        shape = {"x": start + space / 2, "y": top, "width": end - start - space}
        parts.append(svg.tag("rect", **shape, height=_FLOOR - top, class_=kind))
        marks.append(svg.mark(title, svg.area(start, _TOP - 4, end - start, _FLOOR - _TOP + 4)))
        if count > tallest:
            parts.append(
                svg.path(f"M{svg.plain(start - 2)} {_TOP + 11}l{end - start + 4:g} -6", "broken")
            )
        if kind == "zeros" and count >= 0.005 * tensor["count"]:
            share = percent(count / tensor["count"])
            parts.append(svg.write((start + end) / 2, top - 3, share, "quiet small middle"))
    parts += [svg.path(f"M4 {_FLOOR}H{right + 4}", "axis-line"), *_ticks(axis, filled)]
    parts += _mean_and_std(axis, tensor)
    parts += _strained(axis, filled, tensor["dtype"], right)
    for y, (name, count) in zip((94, 60), reversed(bad), strict=False):
        parts += [
            svg.cross(right + 18, y - 4),
            svg.write(right + 27, y, name, "alarm strong"),
            svg.write(right + 14, y + 14, f"{count:,}", "alarm"),
        ]
    if tensor.get("bins") and tensor["bins"].get("sampled"):
        parts.append(svg.write(_WIDE, 11, "a sample", "quiet end"))
    told = [f"{svg.words(tensor['role'])} {tensor['name']}".strip(), *_moments(tensor)]
    if svg.finite(tensor["min"]) and svg.finite(tensor["max"]):
        told.append(f"from {svg.brief(tensor['min'])} to {svg.brief(tensor['max'])}")
    told += [f"{plural(count, 'value')} {name}" for name, count in bad]
    size = _WIDE, _FLOOR + 20
    return svg.chart("histogram", size, ", ".join(told), "".join(parts), "".join(marks))


def _mean_and_std(axis: _Axis, tensor: Mapping[str, Any]) -> Iterable[str]:
    mean, std = tensor["mean"], tensor["std"]
    if svg.finite(mean) and svg.finite(std):
        start, end = svg.plain(axis.at(mean - std)), svg.plain(axis.at(mean + std))
        yield svg.path(f"M{start} 23v6m0 -3H{end}m0 -3v6", "spread")
    if svg.finite(mean):
        yield svg.path(f"M{svg.plain(axis.at(mean) - 4)} 21h8l-4 7z", "mean")


def _strained(
    axis: _Axis, filled: Sequence[tuple[int, int, int]], dtype: str, right: float
) -> Iterable[str]:
    """Yield shades where the dtype holds values with less precision, or nearly cannot hold them."""
    smallest, largest = normal_exponents(dtype)
    powers = [power for _, power, _ in filled]
    if not powers or (min(powers) >= smallest and max(powers) < largest):
        return
    low, high = min(powers), max(powers) + 1
    for start, end in ((low, min(smallest, high)), (max(largest, low), high)):
        for sign in {sign for sign, _, _ in filled} if start < end else ():
            left, to = sorted(axis.at(sign * 2.0 ** min(power, 1023)) for power in (start, end))
            shape = {"x": left, "y": _TOP - 4, "width": to - left, "height": _FLOOR - _TOP + 4}
            yield svg.tag("rect", **shape, class_="culprit-band")
    what = f"subnormal {dtype}" if min(powers) < smallest else f"near {dtype}'s maximum"
    yield svg.write(right, _TOP - 7, what, "alarm small end")


def histograms(named: Sequence[tuple[str, Mapping[str, Any]]], left_out: str) -> Markup:
    """Return the values of tensors on one axis, a row each, scaled to its own highest bar.

    Args:
        named: names and tensors.
        left_out: a sentence below.
    """
    filled = [_filled(tensor.get("bins")) for _, tensor in named]
    every = sorted({(sign, power, 0) for row in filled for sign, power, _ in row})
    right = svg.WIDTH - _NAMES - _NUMBERS
    inner = _axis(every, sum(tensor["zeros"] or 0 for _, tensor in named), right)
    axis = inner._replace(at=lambda x: _NAMES + inner.at(x), zero_at=_NAMES + inner.zero_at)
    floor = _ROW * len(named)
    parts = [svg.path(f"M{_NAMES} {floor}h{svg.plain(right)}", "axis-line")]
    for row, ((name, tensor), own) in enumerate(zip(named, filled, strict=True)):
        y = (row + 1) * _ROW
        bars = _bars(axis, own, tensor["zeros"])
        tallest = max((count for _, _, count, *_ in bars), default=1)
        for start, end, count, _, kind in bars:
            height = max(1.0, count / tallest * (_ROW - 4))
            shape = {"x": start, "y": y - height, "width": end - start, "height": height}
            parts.append(svg.tag("rect", **shape, class_=kind))
        bad = tensor["nan"] + tensor["inf"]
        told = f"{svg.brief(tensor['mean'])} \N{PLUS-MINUS SIGN} {svg.brief(tensor['std'])}"
        told += f", {bad:,} not finite" if bad else ""
        parts.append(svg.write(_NAMES - 8, y - 5, svg.fitted(name, 26), "end name"))
        parts.append(svg.write(svg.WIDTH - _NUMBERS + 8, y - 5, told, "quiet small"))
    parts += _ticks(axis, every, floor, _NAMES + right)
    parts.append(svg.write(0, floor + 32, left_out, "quiet slanted"))
    told = f"values of {plural(len(named), 'layer')}"
    return svg.chart("histograms", (svg.WIDTH, floor + 40), told, "".join(parts))


_NAMES, _NUMBERS, _ROW = 190, 150, 24


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

    return _Axis(at, zero_at, zero_width, low, high, max(1, math.ceil(2.5 / step)) if step else 1)


def _bars(
    axis: _Axis, filled: Sequence[tuple[int, int, int]], zeros: int | None
) -> list[tuple[float, float, int, str, str]]:
    """Return from where to where each bar is, how many values it holds, in words, and its class."""
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for sign, power, count in filled:
        counts[sign, (power - axis.low) // axis.group] += count
    bars = []
    for (sign, place), count in counts.items():
        ends = (min(axis.low + (place + n) * axis.group, axis.high, 1023) for n in (0, 1))
        start, end = sorted(sign * 2.0**power for power in ends)
        title = f"{plural(count, 'value')} of {svg.brief(start)} to {svg.brief(end)}"
        bars.append((axis.at(start), axis.at(end), count, title, "bin"))
    if zeros:
        end = axis.zero_at + axis.zero_width
        bars.append((axis.zero_at, end, zeros, plural(zeros, "zero"), "zeros"))
    return bars


def _filled(bins: Mapping[str, Any] | None) -> list[tuple[int, int, int]]:
    """Return sign, power of two and count of each bin that holds a value."""
    return [
        (sign, bins["lowest"] + index, count)
        for sign, side in ((-1, "negative"), (1, "positive"))
        for index, count in enumerate(bins[side] if bins else ())
        if bins and count
    ]


def _ticks(
    axis: _Axis, filled: Sequence[tuple[int, int, int]], floor: float = _FLOOR, end: float = _WIDE
) -> Iterable[str]:
    """Yield ticks at powers of ten, as far as their texts have room."""
    low, high = axis.low, axis.high
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
        yield svg.path(f"M{svg.plain(x)} {floor}v3", "axis-line")
        if is_free and x - half >= -4 and x + half <= end + 4:
            taken.append((x - half, x + half))
            yield svg.write(x, floor + 14, text, "quiet small middle")


def _moments(tensor: Mapping[str, Any]) -> list[str]:
    told = [f"{key} {svg.brief(tensor[key])}" for key in ("mean", "std") if svg.finite(tensor[key])]
    return [*told, f"{percent(tensor['dead'])} dead"] if svg.finite(tensor["dead"]) else told


# Drift

_HEAD, _LABELS, _TALL, _MOST_TENSORS = 24, 250, 66, 30


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
    body, marks, said = [], [], []
    for x, name in ((_LABELS, "before"), (_LABELS + 110, "now")):
        glyph = {"min": x, "max": x + 44.0, "mean": x + 20.0, "std": 11.0}
        body += [_range(glyph, float, 9, name), svg.write(x + 50, 13, name, "quiet")]
    key = "line: least to greatest; bar: mean \N{PLUS-MINUS SIGN} std"
    body.append(svg.write(_LABELS + 206, 13, key, "quiet"))
    for index, ((layer, role, own), items) in enumerate(moves.items()):
        y = _HEAD + index * _TALL
        if index == _MOST_TENSORS:
            rest = f"and {plural(len(moves) - index, 'tensor')} more"
            body.append(svg.write(0, y + 14, rest, "quiet slanted"))
            break
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
        shape = svg.area(0, y + 1, svg.WIDTH, _TALL - 2)
        title = "\n".join((f"{label} {what}", *told))
        marks.append(svg.mark(title, shape, svg.link_to(anchor, layer)))
    finding = f"{plural(len(moves), 'tensor')} drifted; first {said[0]}"
    height = _HEAD + len(said) * _TALL + 20 * (len(moves) > len(said))
    return svg.chart("drift", (svg.WIDTH, height), finding, "".join(body), "".join(marks))


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


def _both_sides(sides: Sequence[Mapping[str, Any] | None], y: float) -> Iterator[str]:
    start, end = _LABELS + 8, svg.WIDTH - 14
    known = [s for s in sides if s is not None and svg.finite(s["min"]) and svg.finite(s["max"])]
    ends = [side[key] for side in known for key in ("min", "max")]
    for side in known:
        if svg.finite(side["mean"]) and svg.finite(side["std"]):
            ends += (side["mean"] - side["std"], side["mean"] + side["std"])
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


def _range(side: Mapping[str, Any], at: Callable[[float], float], y: float, name: str) -> str:
    """Return a line from least to greatest, a bar of mean and std, a stroke at the mean."""
    low, high = svg.plain(at(side["min"])), svg.plain(at(side["max"]))
    parts = [svg.path(f"M{low} {y - 4}v8m0 -4H{high}m0 -4v8", "extent")]
    mean, std = side["mean"], side["std"]
    if svg.finite(mean):
        if svg.finite(std):
            start = at(mean - std)
            shape = {"x": start, "y": y - 4.5, "width": max(1.0, at(mean + std) - start)}
            parts.append(svg.tag("rect", **shape, height=9, class_=f"spread {name}"))
        parts.append(svg.path(f"M{svg.plain(at(mean))} {y - 6.5}v13", f"mean {name}"))
    return svg.tag("g", *parts, class_=f"range {name}")
