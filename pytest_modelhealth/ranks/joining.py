"""Statistics of what several ranks have of a tensor become those of the whole one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import get_args

import numpy as np

from pytest_modelhealth.ranks.placing import Part
from pytest_modelhealth.report.ranks import Assembly, How
from pytest_modelhealth.statistics import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    ExponentCounts,
    TensorStatistics,
    UnitStatistics,
)

_HOWS: tuple[How, ...] = ("units", "pieces", "replicas")
assert set(_HOWS) < set(get_args(How))


@dataclass(frozen=True)
class Joined:
    """One tensor of all ranks.

    Args:
        seen: its statistics; ``None`` where no rank that has it counts.
        assembly: how it became one.
    """

    seen: TensorStatistics | None
    assembly: Assembly


def joined(parts: Mapping[int, Part]) -> Joined:
    """Return the tensor of which several ranks have parts, merged in their order.

    Args:
        parts: by rank, in order, at least one.
    """
    how: How = min((part.how for part in parts.values()), key=_HOWS.index)
    how = "one rank" if len(parts) == 1 else how
    counting = {rank: part for rank, part in parts.items() if part.counts}
    if any(part.is_replica for part in counting.values()):
        counting = dict([*counting.items()][:1])
    if not counting:
        return Joined(None, Assembly(how, len(parts)))
    each = {rank: _scaled(part.seen, part.scale) for rank, part in counting.items()}
    sizes = {rank: seen.abs_max for rank, seen in each.items() if seen.finite_count}
    largest = max(sizes, key=sizes.__getitem__, default=None)
    abs_max = math.nan if largest is None else sizes[largest]
    placed = [_placed(each[rank], part, abs_max) for rank, part in counting.items()]
    whole = reduce(TensorStatistics.merge, [one for one in placed if one.count] or placed[:1])
    shapes = [part.full_shape for part in counting.values()]
    shape = shapes[0]
    if all(part.grows for part in counting.values()) and len({s[1:] for s in shapes}) == 1:
        rows = sum(part.full_shape[0] for part in counting.values() if part.adds_rows)
        shape = (rows, *shape[1:])
    ill = tuple(rank for rank, seen in each.items() if seen.nonfinite_count)
    return Joined(replace(whole, shape=shape), Assembly(how, len(parts), ill, largest))


def _placed(seen: TensorStatistics, part: Part, abs_max: float) -> TensorStatistics:
    """Return the statistics with units and the first NaN where they are in the whole."""
    first = seen.first_nonfinite
    if first is not None and len(first) == len(part.offset):
        first = tuple(a + b for a, b in zip(first, part.offset, strict=True))
    units = seen.units
    if units is not None and seen.count:
        units = _row_of_units(seen, units, part, abs_max)
    return replace(seen, units=units, first_nonfinite=first)


def _row_of_units(
    seen: TensorStatistics, units: UnitStatistics, part: Part, abs_max: float
) -> UnitStatistics:
    """Return the units of the whole, where others than these are neither alive nor seen.

    Units live by the largest magnitude of all ranks where one tensor was seen.
    """
    alive = units.alive
    if math.prod(seen.shape) == seen.count:
        alive = UnitStatistics.of_extremes(units.minimum, units.maximum, 1, abs_max).alive
    begin, size = part.units or (0, len(alive))
    here = slice(begin, begin + len(alive))
    row = UnitStatistics(
        np.zeros(size, np.bool_),
        np.full(size, np.inf),
        np.full(size, -np.inf),
        units.observations if part.counts_samples else 0,
    )
    row.alive[here], row.minimum[here], row.maximum[here] = alive, units.minimum, units.maximum
    return row


def _scaled(seen: TensorStatistics, by: int) -> TensorStatistics:
    """Return the statistics of all values divided by a number.

    Exponents move by whole steps where it is a power of two; else each row goes to two in the
    share that values spread evenly over its logarithms would have, and counts as sampled.
    """
    if by == 1:
        return seen
    units = seen.units
    if units is not None:
        units = replace(units, minimum=units.minimum / by, maximum=units.maximum / by)
    return replace(
        seen,
        mean=seen.mean / by,
        std=seen.std / by,
        min=seen.min / by,
        max=seen.max / by,
        exponents=_moved(seen.exponents, by),
        units=units,
        histogram_sampled=seen.histogram_sampled or by & (by - 1) != 0,
    )


def _moved(rows: ExponentCounts, by: int) -> ExponentCounts:
    if not len(rows.counts):
        return rows
    steps = by.bit_length() - 1
    further = np.rint(rows.counts * (math.log2(by) - steps)).astype(np.int64)
    counts = np.zeros((len(rows.counts) + 1, 2), dtype=np.int64)
    counts[1:] = rows.counts - further
    counts[:-1] += further
    lowest = rows.lowest - steps - 1
    below = max(0, LOWEST_EXPONENT - lowest)
    if below:
        below = min(below, len(counts) - 1)
        counts[below] += counts[:below].sum(axis=0)
        counts, lowest = counts[below:], lowest + below
    return ExponentCounts.of_rows(min(lowest, HIGHEST_EXPONENT), counts)
