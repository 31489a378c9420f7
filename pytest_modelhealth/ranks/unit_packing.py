"""Units of many tensors on many ranks become one row of units each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from pytest_modelhealth.ranks.part import Part
from pytest_modelhealth.ranks.rounds import Reduced, Rounds
from pytest_modelhealth.statistics import TensorStatistics, UnitStatistics

_NONE = np.int64(2**62)

_EXACT = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""The narrowest dtype of extremes, by that of the values; float64 for any other."""

_WIDTHS = (None, *dict.fromkeys([*_EXACT.values(), torch.float64]))
"""Those dtypes in the order of what is sent for them; first what has no extremes sent."""


def count_units(part: Part) -> int:
    """Return how many units the whole tensor has, 0 for none."""
    if part.seen is None or part.seen.units is None or not part.seen.count:
        return 0
    return len(part.seen.units.alive) if part.units is None else part.units[1]


class Units:
    """Puts units that ranks share in a row and merges all others, in two rounds.

    Extremes go in the dtype of the tensor. Where they are not wanted, a bit says of each unit
    whether all its values are zero: then its extremes are, and else they are not known, NaN.

    Args:
        rounds: where reductions are added: the first ones at once, the others by `send`.
        parts: where units begin in the whole.
        seen: what counts on this rank, ``None`` where nothing does.
        is_agreed: whether all ranks have the same numbers of units and dtypes.
    """

    def __init__(
        self,
        rounds: Rounds,
        parts: Sequence[Part],
        seen: Sequence[TensorStatistics | None],
        is_agreed: bool,
    ) -> None:
        self._rounds, self._parts, self._seen = rounds, parts, seen
        samples = [
            one.units.observations
            if one is not None and one.count and one.units is not None and part.counts_samples
            else 0
            for part, one in zip(parts, seen, strict=True)
        ]
        self._samples = rounds.sum(np.array(samples, dtype=np.int64))
        if is_agreed:
            self._own = np.array([(count_units(p), _width(p)) for p in parts], dtype=np.int64)
            self._all = None
        else:
            own = [
                _unequal(part) if one is not None and one.count else (int(_NONE),) * 4
                for part, one in zip(parts, seen, strict=True)
            ]
            self._all = rounds.smallest(np.array(own, dtype=np.int64))

    def send(self, abs_max: npt.NDArray[np.float64]) -> None:
        """Send what units were.

        Args:
            abs_max: the largest magnitude of each tensor over all ranks.
        """
        self._sizes, self._widths = self._settled()
        self._ends = np.cumsum(self._sizes)
        total = int(self._ends[-1])
        alive, ill = np.zeros(total, np.bool_), np.zeros(total, np.bool_)
        moved = np.zeros(total, np.bool_)
        extremes = np.full((2, total), np.inf)
        for index, start in enumerate((self._ends - self._sizes).tolist()):
            part, whole = self._parts[index], self._seen[index]
            if whole is None or whole.units is None or not whole.count or not self._sizes[index]:
                continue
            units = whole.units
            begin = start + (part.units[0] if part.units is not None else 0)
            here = slice(begin, begin + len(units.alive))
            alive[here] = _alive(whole, units, float(abs_max[index]))
            ill[here] = np.isnan(units.minimum)
            moved[here] = (units.minimum != 0.0) | (units.maximum != 0.0)
            extremes[0, here] = np.where(ill[here], np.inf, units.minimum)
            extremes[1, here] = np.where(ill[here], np.inf, -units.maximum)
        self._bits = self._rounds.either(np.packbits(np.stack([alive, ill]), axis=1))
        width = np.repeat(self._widths, self._sizes)
        self._moved = self._rounds.either(np.packbits(moved[width == 0]))
        self._extremes: list[tuple[npt.NDArray[np.bool_], Reduced]] = []
        for code, dtype in enumerate(_WIDTHS):
            where = width == code
            if dtype is not None and where.any():
                own = torch.from_numpy(np.ascontiguousarray(extremes[:, where])).to(dtype)
                self._extremes.append((where, self._rounds.smallest(own)))

    def result(self) -> list[UnitStatistics | None]:
        """Return the units of each tensor, ``None`` where it has none or ranks differ in it."""
        found: list[UnitStatistics | None] = [None] * len(self._parts)
        if not len(self._ends) or not self._ends[-1]:
            return found
        total = int(self._ends[-1])
        alive, ill = np.unpackbits(self._bits.result, axis=1, count=total).astype(np.bool_)
        both = np.full((2, total), np.nan)
        for where, reduced in self._extremes:
            both[:, where] = reduced.tensor.double().numpy()
        silent = np.repeat(self._widths == 0, self._sizes)
        moved = np.unpackbits(self._moved.result, count=int(silent.sum())).astype(np.bool_)
        both[:, silent] = np.where(moved, np.nan, 0.0)
        low, high = np.where(ill, np.nan, both[0]), np.where(ill, np.nan, -both[1])
        edges = pairwise([0, *self._ends.tolist()])
        counts = self._samples.result.tolist()
        for index, ((start, end), count) in enumerate(zip(edges, counts, strict=True)):
            if end > start:
                here = slice(start, end)
                found[index] = UnitStatistics(
                    alive[here].copy(), low[here].copy(), high[here].copy(), count
                )
        return found

    def _settled(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return how many units each tensor has and the width of their extremes.

        There are 0 where ranks have different numbers, or none.
        """
        if self._all is None:
            return self._own[:, 0], self._own[:, 1]
        size, minus_size, width, minus_width = self._all.result.T
        sizes = np.where((size == -minus_size) & (size < _NONE), size, 0)
        mixed = np.where(width == 0, 0, len(_WIDTHS) - 1)
        return sizes, np.where(width == -minus_width, width, mixed)


def _width(part: Part) -> int:
    if not part.has_extremes:
        return 0
    assert part.seen is not None
    return _WIDTHS.index(_EXACT.get(part.seen.dtype, torch.float64))


def _unequal(part: Part) -> tuple[int, int, int, int]:
    """Return numbers of which the smallest over all ranks tells whether these have the same."""
    size, width = count_units(part), _width(part)
    return size, -size, width, -width


def _alive(seen: TensorStatistics, units: UnitStatistics, abs_max: float) -> npt.NDArray[np.bool_]:
    """Return which units live, by the largest magnitude of all ranks where one tensor was seen."""
    if math.prod(seen.shape) != seen.count:
        return units.alive
    return UnitStatistics.of_extremes(units.minimum, units.maximum, 1, abs_max).alive
