"""Statistics of many tensors on many ranks become one of each: packed numbers, all-reduced.

The arrays have a row a tensor, the same rows on every rank, so what goes over the wire grows with
the tensors of a rank and not with the ranks. Counts, extremes and histograms are exact; a mean is
the sum of shares, and the deviation is of squares about the common mean, as
`TensorStatistics.merge` has it.

Two rounds do: the second needs the common mean, the range of exponents and the largest magnitude,
which the first one finds. Where ranks may have different tensors, one goes before these, and what
differs is sent by itself.
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
from pytest_modelhealth.ranks.rounds import Rounds, Steps, in_rounds
from pytest_modelhealth.ranks.unit_packing import Units, count_units
from pytest_modelhealth.statistics import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    ExponentCounts,
    TensorStatistics,
    UnitStatistics,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_NONE = np.int64(2**62)
_MOST_DIMENSIONS = 16
_TINY = 2.0**-63
"""A count times this is no more than 1, so that a mean times it does not overflow."""


def join(company: Company, parts: Sequence[Part], samples: int) -> list[Joined]:
    """Return each tensor of all ranks; every rank gives the same tensors in the same order.

    Args:
        company: the ranks.
        parts: what this rank has.
        samples: size of the batch on this rank: a tensor that is as long along dimension 0 is one
            of samples, and longer when all are put together.
    """
    found: list[Joined]
    (found,) = in_rounds(company, lambda rounds: joining(rounds, company, parts, samples))
    return found


def joining(
    rounds: Rounds,
    company: Company,
    parts: Sequence[Part],
    samples: int,
    device: str | None = None,
) -> Steps[list[Joined]]:
    """Do the same beside other parts of a report.

    Args:
        rounds: what they send together.
        company, parts, samples: as in `join`.
        device: where the tensors are. It is given where `layout_of` is the same on all ranks, so
            that no shape, type or number of units needs to be sent.
    """
    if not parts:
        return []
    return (yield from _Joining(rounds, company, parts, samples, device).result())


def layout_of(parts: Sequence[Part], samples: int) -> str:
    """Return what the tensors are, beside numbers and devices; ``""`` where some are not here."""
    told = []
    for part in parts:
        if part.seen is None or not part.seen.count:
            return ""
        grows = _is_of_samples(part, samples)
        shape = part.full_shape[1:] if grows else part.full_shape
        kind = (part.is_replica, part.how, part.has_extremes)
        told.append((shape, grows, part.seen.dtype, *kind, count_units(part)))
    return digest(repr(told))


def _is_of_samples(part: Part, samples: int) -> bool:
    shape = part.full_shape
    return part.grows and bool(shape) and shape[0] == samples


class _Joining:
    """The rounds in which statistics are put together."""

    def __init__(
        self,
        rounds: Rounds,
        company: Company,
        parts: Sequence[Part],
        samples: int,
        device: str | None,
    ) -> None:
        self._rounds, self._company, self._parts = rounds, company, parts
        self._samples, self._device = samples, device
        self._held = np.array([part.seen is not None for part in parts])

    def result(self) -> Steps[list[Joined]]:
        """Return each tensor of all ranks."""
        self._counting = self._held & (yield from self._who_counts())
        self._seen = [
            _scaled(part.seen, part.scale) if part.seen is not None and counting else None
            for part, counting in zip(self._parts, self._counting.tolist(), strict=True)
        ]
        units = Units(self._rounds, self._parts, self._seen, self._device is not None)
        counts = self._rounds.sum(self._own_counts())
        lows = self._rounds.smallest(self._own_extremes())
        ranges = self._rounds.smallest(self._own_ranges())
        sums = self._rounds.sum(self._own_sums())
        yield
        self._counts, self._ranges = counts.result, ranges.result
        self._note_extremes(lows.result)
        mean = self._means(sums.result)
        units.send(self._abs_max)
        squares = self._rounds.sum(self._own_squares(mean))
        rows = self._rounds.sum(self._own_rows())
        largest = self._rounds.smallest(self._own_largest())
        ill = np.flatnonzero(self._is_ill)
        masks = self._rounds.either(self._own_masks(ill))
        firsts = self._rounds.sum(_table_of([self._own_first(one) for one in ill.tolist()]))
        shapes, differing = self._shapes()
        true_shapes = self._rounds.sum(
            _table_of([shapes[index] if owns else None for index, owns in differing])
        )
        yield
        std = self._deviations(squares.result)
        for (index, _), shape in zip(differing, _tuples_of(true_shapes.result), strict=True):
            shapes[index] = shape or ()
        where = dict(zip(ill.tolist(), self._where(masks.result, firsts.result), strict=True))
        return self._joined(
            mean,
            std,
            self._histograms(rows.result),
            shapes,
            where,
            largest.result.tolist(),
            units.result(),
        )

    def _joined(
        self,
        mean: Floats,
        std: Floats,
        rows: list[ExponentCounts],
        shapes: list[tuple[int, ...]],
        where: dict[int, tuple[tuple[int, ...] | None, tuple[int, ...]]],
        largest: list[int],
        units: list[UnitStatistics | None],
    ) -> list[Joined]:
        kinds = self._kinds()
        shapes = self._grown(shapes)
        found = []
        numbers = zip(
            mean.tolist(), std.tolist(), self._low.tolist(), self._high.tolist(), rows, strict=True
        )
        rest = (numbers, units, shapes, kinds, largest)
        for index, (counted, of_values, unit, shape, (dtype, device), rank) in enumerate(
            zip(self._counts.tolist(), *rest, strict=True)
        ):
            if not counted[7]:
                found.append(Joined(None, counted[8], (), None))
                continue
            count, nan, positive, negative, zero, _, sampled = counted[:7]
            first, ranks = where.get(index, (None, ()))
            average, deviation, low, high, histogram = of_values
            seen = TensorStatistics(
                count, nan, positive, negative, zero, average, deviation, low, high, histogram,
                unit, shape, dtype, device, sampled > 0, first,
            )  # fmt: skip
            found.append(Joined(seen, counted[8], ranks, None if rank == _NONE else rank))
        return found

    def _who_counts(self) -> Steps[Bools]:
        """Return which tensors this rank counts: of replicas the first rank that may."""
        may = np.array([part.seen is not None and part.counts for part in self._parts])
        replica = np.array([part.is_replica for part in self._parts])
        rank = self._company.rank
        if self._device is not None:  # each rank has them all
            return may & (~replica | (rank == self._company.ranks[0]))
        first = self._rounds.smallest(np.where(may, rank, _NONE).astype(np.int64))
        yield
        result: Bools = may & (~replica | (first.result == rank))
        return result

    def _own_counts(self) -> Ints:
        """Return what adds up: a row a tensor."""
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
                    (part.full_shape or (0,))[0] if part.adds_rows else 0,
                    seen.histogram_sampled,
                    1,
                )
                for part, seen in zip(self._parts, self._seen, strict=True)
            ],
            dtype=np.int64,
        )
        ill = table[:, 1] + table[:, 2] + table[:, 3]
        self._own_finite, self._own_ill = table[:, 0] - ill, ill > 0
        return np.concatenate([table, self._held[:, None].astype(np.int64)], axis=1)

    def _own_extremes(self) -> Floats:
        low, high = [], []
        for seen, finite in zip(self._seen, self._own_finite.tolist(), strict=True):
            low.append(seen.min if seen is not None and finite else math.inf)
            high.append(-seen.max if seen is not None and finite else math.inf)
        return np.array([low, high])

    def _own_ranges(self) -> Ints:
        """Return the first rank with a NaN, the exponents, and where it is not known what is equal.

        Each is such that the smallest over all ranks tells it.
        """
        rank, none = self._company.rank, int(_NONE)
        ends = [
            (none, none)
            if seen is None or not len(seen.exponents.counts)
            else (seen.exponents.lowest, -seen.exponents.highest)
            for seen in self._seen
        ]
        columns = [np.where(self._own_ill, rank, _NONE), *np.array(ends).T]
        if self._device is None:
            columns.append(np.where(self._counting, rank, _NONE))
            pairs = zip(self._parts, self._seen, strict=True)
            columns.extend(np.array([self._kind(*pair) for pair in pairs]).T)
        return np.stack(columns).astype(np.int64)

    def _kind(self, part: Part, seen: TensorStatistics | None) -> tuple[int, ...]:
        """Return numbers of shape, type and place, and of all but the rows of what has samples."""
        if seen is None:
            return (int(_NONE),) * 4
        shape = part.full_shape
        kind = zlib.crc32(f"{shape} {seen.dtype} {seen.device}".encode())
        tail = zlib.crc32(f"{shape[1:]} {seen.dtype} {seen.device}".encode())
        return kind, -kind, tail if _is_of_samples(part, self._samples) else -1, -tail

    def _own_sums(self) -> Floats:
        """Return sums of values, and the same times a number that no sum overflows with."""
        self._own_mean = np.array([0.0 if s is None else s.mean for s in self._seen])
        self._own_mean[self._own_finite == 0] = 0.0
        with np.errstate(over="ignore"):
            sums: Floats = self._own_mean * np.stack([self._own_finite, self._own_finite * _TINY])
        return sums

    def _note_extremes(self, lows: Floats) -> None:
        all_ill = self._counts[:, 1] + self._counts[:, 2] + self._counts[:, 3]
        self._finite, self._is_ill = self._counts[:, 0] - all_ill, all_ill > 0
        self._low = np.where(self._finite > 0, lows[0], np.nan)
        self._high = np.where(self._finite > 0, -lows[1], np.nan)
        self._abs_max = np.maximum(np.abs(self._low), np.abs(self._high))

    def _means(self, sums: Floats) -> Floats:
        count = np.maximum(self._finite, 1)
        exact = np.isfinite(sums[0])
        mean = np.where(exact, sums[0] / count, sums[1] / (count * _TINY))
        return np.where(self._finite > 0, np.clip(mean, self._low, self._high), np.nan)

    def _own_squares(self, mean: Floats) -> Floats:
        """Return this rank's share of the mean square about the common mean."""
        own_std = np.array([0.0 if s is None else s.std for s in self._seen])
        has = self._own_finite > 0
        share = np.where(has, self._own_finite / np.maximum(self._finite, 1), 0.0)
        with np.errstate(all="ignore"):
            # by its largest magnitude, so that no square overflows or vanishes
            unit = np.where(self._abs_max > 0, self._abs_max, 1.0)
            self._unit = np.ldexp(1.0, np.frexp(unit)[1] - 1)
            gap = (self._own_mean - mean) / self._unit
            return np.where(has, share * ((own_std / self._unit) ** 2 + gap**2), 0.0)

    def _deviations(self, squares: Floats) -> Floats:
        std = np.where(self._low == self._high, 0.0, np.sqrt(squares) * self._unit)
        return np.where(self._finite > 0, std, np.nan)

    def _own_rows(self) -> npt.NDArray[np.int32] | Ints:
        """Return histograms, each over the exponents that some rank has."""
        self._lowest = self._ranges[1]
        has = self._lowest < _NONE
        sizes = np.where(has, -self._ranges[2] - self._lowest + 1, 0)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        narrow = int(self._counts[:, 0].max(initial=0)) < 2**31
        flat = np.zeros((int(self._ends[-1]), 2), dtype=np.int32 if narrow else np.int64)
        for seen, start, low in zip(
            self._seen, self._starts.tolist(), self._lowest.tolist(), strict=True
        ):
            if seen is not None and len(seen.exponents.counts):
                begin = start + seen.exponents.lowest - low
                flat[begin : begin + len(seen.exponents.counts)] = seen.exponents.counts
        return flat

    def _histograms(self, flat: npt.NDArray[np.int32] | Ints) -> list[ExponentCounts]:
        whole = flat.astype(np.int64)
        places = zip(self._lowest.tolist(), self._starts.tolist(), self._ends.tolist(), strict=True)
        return [
            ExponentCounts(low, whole[start:end].copy()) if end > start else ExponentCounts()
            for low, start, end in places
        ]

    def _own_masks(self, ill: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
        """Return a bit a rank for each tensor that has a NaN or infinity somewhere."""
        members = self._company.ranks
        mask = np.zeros((len(ill), len(members)), dtype=np.bool_)
        mask[:, members.index(self._company.rank)] = self._own_ill[ill]
        return np.packbits(mask, axis=1)

    def _own_first(self, index: int) -> tuple[int, ...] | None:
        """Return where the first NaN or infinity stands in the whole, if this rank has it."""
        seen, part = self._seen[index], self._parts[index]
        if seen is None or self._ranges[0, index] != self._company.rank:
            return None
        first = seen.first_nonfinite
        if first is None or len(part.offset) != len(first):
            return first
        return tuple(a + b for a, b in zip(first, part.offset, strict=True))

    def _where(
        self, masks: npt.NDArray[np.uint8], firsts: Ints
    ) -> list[tuple[tuple[int, ...] | None, tuple[int, ...]]]:
        """Return of what is ill where it first is, and on which ranks."""
        members = self._company.ranks
        bits = np.unpackbits(masks, axis=1, count=len(members))
        ranks = [tuple(members[bit] for bit in np.flatnonzero(row)) for row in bits]
        return list(zip(_tuples_of(firsts), ranks, strict=True))

    def _shapes(self) -> tuple[list[tuple[int, ...]], list[tuple[int, bool]]]:
        """Return the shapes that this rank knows, and the places of those that it may not know.

        With each such place stands whether this rank is the one that says its shape.
        """
        shapes = [part.full_shape for part in self._parts]
        if self._device is not None:
            return shapes, []
        owner = self._ranges[3] == self._company.rank
        return shapes, [(index, bool(owner[index])) for index in self._differing().tolist()]

    def _differing(self) -> npt.NDArray[np.intp]:
        all_count = self._counts[:, 7] == self._company.size
        return np.flatnonzero((self._ranges[4] != -self._ranges[5]) | ~all_count)

    def _grown(self, shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return shapes with those of samples as long as all ranks have them together."""
        if self._device is None:
            grows = (self._ranges[6] == -self._ranges[7]).tolist()
        else:
            grows = [_is_of_samples(part, self._samples) for part in self._parts]
        return [
            (length, *shape[1:]) if growing and shape else shape
            for shape, growing, length in zip(
                shapes, grows, self._counts[:, 5].tolist(), strict=True
            )
        ]

    def _kinds(self) -> list[tuple[str, str]]:
        """Return dtype and device of each; those that differ, or are not here, are the first's."""
        if self._device is not None:
            return [("" if p.seen is None else p.seen.dtype, self._device) for p in self._parts]
        kinds = [("", "") if s is None else (s.dtype, s.device) for s in self._seen]
        lacking = self._differing()
        lacking = lacking[self._counts[lacking, 7] > 0]
        return _texts(self._company, kinds, lacking, self._ranges[3])

    def _own_largest(self) -> Ints:
        """Return this rank where it has the largest magnitude."""
        own = np.array([math.nan if s is None else s.abs_max for s in self._seen])
        return np.where(own == self._abs_max, self._company.rank, _NONE).astype(np.int64)


def _table_of(own: Sequence[tuple[int, ...] | None]) -> Ints:
    """Return the index or shape that this rank has of each, ``None`` for none, as numbers."""
    table = np.zeros((len(own), _MOST_DIMENSIONS + 1), dtype=np.int64)
    for row, value in enumerate(own):
        if value is not None:
            kept = value[:_MOST_DIMENSIONS]
            table[row, 0] = len(kept) + 1
            table[row, 1 : len(kept) + 1] = kept
    return table


def _tuples_of(table: Ints) -> list[tuple[int, ...] | None]:
    """Return the same of the sum over ranks, of which one has each; ``None`` where none has."""
    return [tuple(row[1 : row[0]]) if row[0] else None for row in table.tolist()]


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
