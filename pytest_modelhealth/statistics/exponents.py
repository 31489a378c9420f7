"""Counts by sign and power of two: a histogram whose bins need no range agreed beforehand."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LOWEST_EXPONENT = -127
"""The row of everything smaller than 2**-126, which float32 holds as subnormals or not at all."""

HIGHEST_EXPONENT = 128
"""The row of everything from 2**128 on, which overflows float32."""

_SMALLEST_POSITIVE = 2.0**-1074
_LARGEST_FINITE = sys.float_info.max


class Histogram(NamedTuple):
    """Counts of finite values in sign and power-of-two bins.

    A positive bin holds ``low <= x < high``, a negative one ``low < x <= high``; the middle bin
    holds the zeros and nothing else.

    Args:
        counts: int64, shape ``(bins,)``.
        edges: float64, shape ``(bins + 1,)``, ascending and symmetric about zero.
    """

    counts: npt.NDArray[np.int64]
    edges: npt.NDArray[np.float64]


def _no_rows() -> npt.NDArray[np.int64]:
    return np.zeros((0, 2), dtype=np.int64)


@dataclass(eq=False, slots=True)
class ExponentCounts:
    """How many non-zero finite values had each sign and each binary exponent.

    A value ``x`` has exponent ``floor(log2(abs(x)))``. Bins without a shared range make any two of
    them addable. Exponents are clipped to `LOWEST_EXPONENT` and `HIGHEST_EXPONENT`.

    Args:
        lowest: the exponent of the first row.
        counts: int64, shape ``(exponents, 2)``; column 0 counts negative values, 1 positive ones.
            First and last row are not empty.
    """

    lowest: int = 0
    counts: npt.NDArray[np.int64] = field(default_factory=_no_rows)

    @classmethod
    def of_rows(cls, lowest: int, counts: npt.NDArray[np.int64]) -> ExponentCounts:
        """Return the counts without their empty first and last rows."""
        filled = np.flatnonzero(counts.any(axis=1))
        if not len(filled):
            return cls()
        first, last = int(filled[0]), int(filled[-1])
        return cls(lowest + first, counts[first : last + 1].copy())

    @property
    def highest(self) -> int:
        """The exponent of the last row."""
        return self.lowest + len(self.counts) - 1

    def add(self, other: ExponentCounts) -> ExponentCounts:
        """Return the counts of both."""
        if not len(self.counts) or not len(other.counts):
            return self if len(self.counts) else other
        lowest = min(self.lowest, other.lowest)
        counts = np.zeros((max(self.highest, other.highest) - lowest + 1, 2), dtype=np.int64)
        for part in (self, other):
            start = part.lowest - lowest
            counts[start : start + len(part.counts)] += part.counts
        return ExponentCounts(lowest, counts)

    def histogram(self, zero_count: int) -> Histogram:
        """Return counts and edges in ascending order of value: negatives, the zeros, positives."""
        magnitudes = np.ldexp(1.0, self.lowest + np.arange(len(self.counts) + 1))
        if magnitudes[0] < 2.0**-126:
            magnitudes[0] = _SMALLEST_POSITIVE
        if magnitudes[-1] > 2.0**HIGHEST_EXPONENT:
            magnitudes[-1] = _LARGEST_FINITE
        counts = np.concatenate([self.counts[::-1, 0], [zero_count], self.counts[:, 1]])
        return Histogram(counts, np.concatenate([-magnitudes[::-1], magnitudes]))
