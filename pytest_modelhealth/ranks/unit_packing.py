"""Units of many tensors on many ranks become one row of units each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.part import Part
from pytest_modelhealth.statistics import TensorStatistics, UnitStatistics

_NONE = np.int64(2**62)


def joined_units(
    company: Company,
    parts: Sequence[Part],
    seen: Sequence[TensorStatistics | None],
    abs_max: npt.NDArray[np.float64],
) -> list[UnitStatistics | None]:
    """Return the units of each tensor: those that ranks share put in a row, all others merged.

    Extremes are sent as float32, which holds those of all dtypes but float64 and integers.

    Args:
        company: the ranks.
        parts: where units begin in the whole.
        seen: what counts on this rank, ``None`` where nothing does.
        abs_max: the largest magnitude of each tensor over all ranks.
    """
    held = [one.units if one is not None and one.count else None for one in seen]
    sizes = _sizes(company, parts, seen)
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    result: list[UnitStatistics | None] = [None] * len(parts)
    if not total:
        return result
    alive, ill = np.zeros(total, np.bool_), np.zeros(total, np.bool_)
    extremes = np.full((2, total), np.inf)
    samples = np.zeros(len(parts), dtype=np.int64)
    for index, start in enumerate((ends - sizes).tolist()):
        units, part, whole = held[index], parts[index], seen[index]
        if units is None or whole is None or not sizes[index]:
            continue
        begin = start + (part.units[0] if part.units is not None else 0)
        here = slice(begin, begin + len(units.alive))
        alive[here] = _alive(whole, units, float(abs_max[index]))
        ill[here] = np.isnan(units.minimum)
        extremes[0, here] = np.where(ill[here], np.inf, units.minimum)
        extremes[1, here] = np.where(ill[here], np.inf, -units.maximum)
        samples[index] = units.observations if part.counts_samples else 0
    bits = company.either(np.packbits(np.stack([alive, ill]), axis=1))
    alive, ill = np.unpackbits(bits, axis=1, count=total).astype(np.bool_)
    low, high = _extremes(company, extremes, seen, sizes)
    low, high = np.where(ill, np.nan, low), np.where(ill, np.nan, -high)
    for index, (end, size, count) in enumerate(
        zip(ends.tolist(), sizes.tolist(), company.sum(samples).tolist(), strict=True)
    ):
        if size:
            here = slice(end - size, end)
            result[index] = UnitStatistics(
                alive[here].copy(), low[here].copy(), high[here].copy(), count
            )
    return result


def _sizes(
    company: Company, parts: Sequence[Part], seen: Sequence[TensorStatistics | None]
) -> npt.NDArray[np.int64]:
    """Return how many units each tensor has; 0 where ranks have different numbers, or none."""
    own = []
    for part, one in zip(parts, seen, strict=True):
        if one is None or not one.count:
            own.append((int(_NONE), int(_NONE)))
            continue
        size = 0 if one.units is None else len(one.units.alive)
        size = part.units[1] if part.units is not None and size else size
        own.append((size, -size))
    both = company.smallest(np.array(own, dtype=np.int64))
    equal = (both[:, 0] == -both[:, 1]) & (both[:, 0] < _NONE)
    sizes: npt.NDArray[np.int64] = np.where(equal, both[:, 0], 0)
    return sizes


def _alive(seen: TensorStatistics, units: UnitStatistics, abs_max: float) -> npt.NDArray[np.bool_]:
    """Return which units live, by the largest magnitude of all ranks where one tensor was seen."""
    if math.prod(seen.shape) != seen.count:
        return units.alive
    return UnitStatistics.of_extremes(units.minimum, units.maximum, 1, abs_max).alive


def _extremes(
    company: Company,
    extremes: npt.NDArray[np.float64],
    seen: Sequence[TensorStatistics | None],
    sizes: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """Return the smallest of both rows over all ranks, in float64 where float32 would round."""
    wide = np.array([one is not None and one.dtype not in _NARROW for one in seen], dtype=np.int64)
    is_wide = np.repeat(company.largest(wide).astype(np.bool_), sizes)
    whole = np.empty_like(extremes)
    narrow = np.ascontiguousarray(extremes[:, ~is_wide], dtype=np.float32)
    whole[:, ~is_wide] = company.smallest(narrow)
    whole[:, is_wide] = company.smallest(np.ascontiguousarray(extremes[:, is_wide]))
    return whole


_NARROW = frozenset({"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "bool"})
