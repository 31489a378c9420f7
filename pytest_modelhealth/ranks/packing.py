"""Statistics of many tensors on many ranks become one of each: packed numbers, all-reduced.

The arrays have a row a tensor, the same rows on every rank, so what goes over the wire grows with
the tensors of a rank and not with the ranks. Counts, extremes and histograms are exact; a mean is
the sum of shares, and the deviation is of squares about the common mean, as
`TensorStatistics.merge` has it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.ranks.company import Company, digest
from pytest_modelhealth.ranks.part import Joined, Part
from pytest_modelhealth.ranks.unit_packing import joined_units
from pytest_modelhealth.statistics import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    ExponentCounts,
    TensorStatistics,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_NONE = np.int64(2**62)
_MOST_DIMENSIONS = 16


def join(company: Company, parts: Sequence[Part], samples: int) -> list[Joined]:
    """Return each tensor of all ranks; every rank gives the same tensors in the same order.

    Args:
        company: the ranks.
        parts: what this rank has.
        samples: size of the batch on this rank: a tensor that is as long along dimension 0 is one
            of samples, and longer when all are put together.
    """
    return _Joining(company, parts, samples).result() if parts else []


class _Joining:
    """The rounds in which statistics are put together, each a reduction or two."""

    def __init__(self, company: Company, parts: Sequence[Part], samples: int) -> None:
        self._company, self._parts = company, parts
        self._held = np.array([part.seen is not None for part in parts])
        self._counting = self._held & self._who_counts()
        self._seen = [
            _scaled(part.seen, part.scale) if part.seen is not None and counting else None
            for part, counting in zip(parts, self._counting.tolist(), strict=True)
        ]
        self._samples = samples
        self._counted()
        self._ranged()

    def result(self) -> list[Joined]:
        mean, std = self._moments()
        rows = self._rows()
        firsts, ill = self._ill()
        shapes = self._shapes()
        largest = self._largest()
        kinds = self._kinds()
        units = joined_units(self._company, self._parts, self._seen, self._abs_max)
        counts, sampled = self._counts.tolist(), (self._counts[:, 6] > 0).tolist()
        found = []
        for index in range(len(self._parts)):
            if not self._counts[index, 7]:
                found.append(Joined(None, counts[index][8], (), None))
                continue
            dtype, device = kinds[index]
            count, nan, positive, negative, zero = counts[index][:5]
            seen = TensorStatistics(
                count, nan, positive, negative, zero,
                mean[index], std[index], self._low_list[index], self._high_list[index],
                rows[index], units[index], shapes[index], dtype, device,
                sampled[index], firsts[index],
            )  # fmt: skip
            found.append(Joined(seen, counts[index][8], ill[index], largest[index]))
        return found

    def _who_counts(self) -> Bools:
        """Return which tensors this rank counts: of replicas the first rank that may."""
        may = np.array([part.seen is not None and part.counts for part in self._parts])
        replica = np.array([part.is_replica for part in self._parts])
        rank = self._company.rank
        first = self._company.smallest(np.where(may, rank, _NONE).astype(np.int64))
        result: Bools = may & (~replica | (first == rank))
        return result

    def _counted(self) -> None:
        """Add up what is a count."""
        none = (0,) * 8
        table = np.array(
            [
                none
                if seen is None
                else (
                    seen.count,
                    seen.nan_count,
                    seen.positive_inf_count,
                    seen.negative_inf_count,
                    seen.zero_count,
                    (part.whole or seen.shape or (0,))[0] if part.adds_rows else 0,
                    seen.histogram_sampled,
                    1,
                )
                for part, seen in zip(self._parts, self._seen, strict=True)
            ],
            dtype=np.int64,
        )
        own = np.concatenate([table, self._held[:, None].astype(np.int64)], axis=1)
        self._own = own
        self._counts = self._company.sum(own)
        ill = own[:, 1] + own[:, 2] + own[:, 3]
        self._own_finite = own[:, 0] - ill
        all_ill = self._counts[:, 1] + self._counts[:, 2] + self._counts[:, 3]
        self._finite = self._counts[:, 0] - all_ill
        self._is_ill, self._own_ill = all_ill > 0, ill > 0

    def _ranged(self) -> None:
        """Find extremes of values and exponents, the first rank of each, and what all share."""
        rank = self._company.rank
        low, high, whole = [], [], []
        for part, seen, finite in zip(
            self._parts, self._seen, self._own_finite.tolist(), strict=True
        ):
            low.append(seen.min if seen is not None and finite else math.inf)
            high.append(-seen.max if seen is not None and finite else math.inf)
            whole.append(self._ranges_of(part, seen))
        floats = self._company.smallest(np.array([low, high]).T.copy())
        has_finite = self._finite > 0
        self._low = np.where(has_finite, floats[:, 0], np.nan)
        self._high = np.where(has_finite, -floats[:, 1], np.nan)
        self._abs_max = np.maximum(np.abs(self._low), np.abs(self._high))
        self._low_list, self._high_list = self._low.tolist(), self._high.tolist()
        counting = np.where(self._counting, rank, _NONE)[:, None]
        ill = np.where(self._own_ill, rank, _NONE)[:, None]
        ints = np.concatenate([np.array(whole, dtype=np.int64), counting, ill], axis=1)
        self._ranges = self._company.smallest(ints)
        self._first, self._first_ill = self._ranges[:, 6], self._ranges[:, 7]

    def _ranges_of(self, part: Part, seen: TensorStatistics | None) -> tuple[int, ...]:
        none = int(_NONE)
        if seen is None:
            return (none,) * 6
        rows = seen.exponents
        lowest, highest = (rows.lowest, -rows.highest) if len(rows.counts) else (none, none)
        shape = part.whole or seen.shape
        kind = zlib.crc32(f"{shape} {seen.dtype} {seen.device}".encode())
        of_samples = part.grows and bool(shape) and shape[0] == self._samples
        tail = zlib.crc32(f"{shape[1:]} {seen.dtype} {seen.device}".encode())
        return lowest, highest, kind, -kind, tail if of_samples else -1, -tail

    def _moments(self) -> tuple[list[float], list[float]]:
        """Return means and standard deviations over all ranks."""
        own_mean = np.array([0.0 if s is None else s.mean for s in self._seen])
        own_std = np.array([0.0 if s is None else s.std for s in self._seen])
        has = self._own_finite > 0
        share = np.where(has, self._own_finite / np.maximum(self._finite, 1), 0.0)
        mean = self._company.sum(np.where(has, own_mean, 0.0) * share)
        mean = np.clip(mean, self._low, self._high)
        with np.errstate(all="ignore"):
            # by its largest magnitude, so that no square overflows or vanishes
            unit = np.where(self._abs_max > 0, self._abs_max, 1.0)
            unit = np.ldexp(1.0, np.frexp(unit)[1] - 1)
            gap = (own_mean - mean) / unit
            squares = np.where(has, share * ((own_std / unit) ** 2 + gap**2), 0.0)
            std = np.sqrt(self._company.sum(squares)) * unit
        std = np.where(self._low == self._high, 0.0, std)
        none = self._finite == 0
        mean, std = np.where(none, np.nan, mean), np.where(none, np.nan, std)
        return mean.tolist(), std.tolist()

    def _rows(self) -> list[ExponentCounts]:
        """Add histograms up, each over the exponents that some rank has."""
        lowest, highest = self._ranges[:, 0], -self._ranges[:, 1]
        has = lowest < _NONE
        sizes = np.where(has, highest - lowest + 1, 0)
        ends = np.cumsum(sizes)
        narrow = int(self._counts[:, 0].max(initial=0)) < 2**31
        flat = np.zeros((int(ends[-1]), 2), dtype=np.int32 if narrow else np.int64)
        starts, lows = (ends - sizes).tolist(), lowest.tolist()
        for seen, start, low in zip(self._seen, starts, lows, strict=True):
            if seen is not None and len(seen.exponents.counts):
                begin = start + seen.exponents.lowest - low
                flat[begin : begin + len(seen.exponents.counts)] = seen.exponents.counts
        whole = self._company.sum(flat).astype(np.int64)
        return [
            ExponentCounts(low, whole[start:end].copy()) if end > start else ExponentCounts()
            for low, start, end in zip(lows, starts, ends.tolist(), strict=True)
        ]

    def _ill(self) -> tuple[list[tuple[int, ...] | None], list[tuple[int, ...]]]:
        """Return where the first NaN or infinity of each stands in the whole, and on which ranks.

        Sent only of tensors that have one.
        """
        count = len(self._parts)
        firsts: list[tuple[int, ...] | None] = [None] * count
        ranks: list[tuple[int, ...]] = [()] * count
        where = np.flatnonzero(self._is_ill)
        if not len(where):
            return firsts, ranks
        members = self._company.ranks
        mask = np.zeros((len(where), len(members)), dtype=np.bool_)
        mask[:, members.index(self._company.rank)] = self._own_ill[where]
        packed = self._company.either(np.packbits(mask, axis=1))
        bits = np.unpackbits(packed, axis=1, count=len(members))
        own = [self._own_first(index) for index in where.tolist()]
        found = _from_owner(self._company, own)
        for row, index in enumerate(where.tolist()):
            firsts[index] = found[row]
            ranks[index] = tuple(members[bit] for bit in np.flatnonzero(bits[row]))
        return firsts, ranks

    def _own_first(self, index: int) -> tuple[int, ...] | None:
        seen, part = self._seen[index], self._parts[index]
        if seen is None or self._first_ill[index] != self._company.rank:
            return None
        first = seen.first_nonfinite
        if first is None or len(part.offset) != len(first):
            return first
        return tuple(a + b for a, b in zip(first, part.offset, strict=True))

    def _shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the whole tensors; those of samples grow along dimension 0."""
        shapes: list[tuple[int, ...]] = []
        for part, seen in zip(self._parts, self._seen, strict=True):
            shapes.append(part.whole or (() if seen is None else seen.shape))
        grows = self._ranges[:, 4] == -self._ranges[:, 5]
        differ = np.flatnonzero((self._ranges[:, 2] != -self._ranges[:, 3]) | ~self._all_count)
        owner = self._first == self._company.rank
        own = [shapes[index] if owner[index] else None for index in differ.tolist()]
        for index, shape in zip(differ.tolist(), _from_owner(self._company, own), strict=True):
            shapes[index] = shape or ()
        lengths = self._counts[:, 5].tolist()
        return [
            (length, *shape[1:]) if growing and shape else shape
            for shape, growing, length in zip(shapes, grows.tolist(), lengths, strict=True)
        ]

    @property
    def _all_count(self) -> Bools:
        result: Bools = self._counts[:, 7] == self._company.size
        return result

    def _kinds(self) -> list[tuple[str, str]]:
        """Return dtype and device of each; those that differ, or are not here, are the first's."""
        kinds = [("", "") if s is None else (s.dtype, s.device) for s in self._seen]
        lacking = ~self._all_count | (self._ranges[:, 2] != -self._ranges[:, 3])
        lacking &= self._counts[:, 7] > 0
        return _texts(self._company, kinds, np.flatnonzero(lacking), self._first)

    def _largest(self) -> list[int | None]:
        """Return the first rank that has the largest magnitude of each."""
        own = np.array([math.nan if s is None else s.abs_max for s in self._seen])
        mine = np.where(own == self._abs_max, self._company.rank, _NONE).astype(np.int64)
        found = self._company.smallest(mine)
        return [None if rank == _NONE else int(rank) for rank in found.tolist()]


def _from_owner(
    company: Company, own: Sequence[tuple[int, ...] | None]
) -> list[tuple[int, ...] | None]:
    """Return the index or shape that one rank has of each; ``None`` where no rank has one."""
    table = np.zeros((len(own), _MOST_DIMENSIONS + 1), dtype=np.int64)
    for row, value in enumerate(own):
        if value is not None:
            kept = value[:_MOST_DIMENSIONS]
            table[row, 0] = len(kept) + 1
            table[row, 1 : len(kept) + 1] = kept
    whole = company.sum(table)
    return [tuple(row[1 : row[0]]) if row[0] else None for row in whole.tolist()]


def _texts(
    company: Company, kinds: list[tuple[str, str]], lacking: Ints, first: Ints
) -> list[tuple[str, str]]:
    """Fill in what this rank does not have, of the first rank that does: few different words."""
    if not len(lacking):
        return kinds
    mine = [kinds[i] if first[i] == company.rank else ("", "") for i in lacking.tolist()]
    words = sorted({kind for kind in mine if kind != ("", "")})
    known = sorted(
        {kind for _, some in company.distinct(words, digest(repr(words))) for kind in some}
    )
    codes = np.array([known.index(k) + 1 if k != ("", "") else 0 for k in mine], dtype=np.int64)
    result = list(kinds)
    for index, code in zip(lacking.tolist(), company.sum(codes).tolist(), strict=True):
        result[index] = known[code - 1]
    return result


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
