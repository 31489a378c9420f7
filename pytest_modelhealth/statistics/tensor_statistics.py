"""`TensorStatistics`: what is kept of a tensor after it was seen, and how two of them merge."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pytest_modelhealth.errors import require_kind

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
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))

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


DEAD_RATIO = 2.0**-20
"""A unit that never exceeds this part of its tensor's largest magnitude is dead.

Exact zero alone would miss GELU and SiLU, which die out without reaching it; 2**-20, about 1e-6,
is eight units in the last place of float32 (docs/decisions/0001-statistics.md).
"""


@dataclass(eq=False, slots=True)
class UnitStatistics:
    """What is kept of each unit (channel or feature) of a tensor.

    Args:
        alive: bool, shape ``(units,)``: the unit was ever more than `DEAD_RATIO` of the largest
            finite magnitude in its tensor. A unit with a NaN is alive: it is ill, not silent.
        minimum: float64, shape ``(units,)``; NaN where the unit had one.
        maximum: float64, shape ``(units,)``; likewise.
        observations: how many samples of each unit were seen: the elements of the dimensions before
            the units' own. For channels those are images, for features tokens; the pixels of a
            channel are neighbours, and together one sample.
    """

    alive: npt.NDArray[np.bool_]
    minimum: npt.NDArray[np.float64]
    maximum: npt.NDArray[np.float64]
    observations: int

    @classmethod
    def of_extremes(
        cls,
        minimum: npt.NDArray[np.float64],
        maximum: npt.NDArray[np.float64],
        observations: int,
        tensor_abs_max: float,
    ) -> UnitStatistics:
        """Return the units of one tensor; `tensor_abs_max` is NaN where nothing is finite."""
        silent = np.maximum(np.abs(minimum), np.abs(maximum)) <= DEAD_RATIO * tensor_abs_max
        return cls(~silent, minimum, maximum, observations)

    def merge(self, other: UnitStatistics | None) -> UnitStatistics | None:
        """Return the units of both, or ``None`` where the numbers of units differ.

        A unit alive in one of them is alive.
        """
        if other is None or len(self.alive) != len(other.alive):
            return None
        return UnitStatistics(
            self.alive | other.alive,
            np.minimum(self.minimum, other.minimum),
            np.maximum(self.maximum, other.maximum),
            self.observations + other.observations,
        )


# not frozen, nor are its parts: that takes 1.6 us to make in place of 0.6, four times a layer
@dataclass(eq=False, slots=True, repr=False)
class TensorStatistics:
    """The mergeable summary of every tensor that one layer showed in one role; never changed.

    Moments, extremes and the histogram are of the finite values; `count` includes the others. All
    real numbers are Python floats computed in float64. With no finite value, moments and extremes
    are NaN. A complex tensor counts as its real and its imaginary parts, so twice.

    Args:
        count: number of elements.
        nan_count: number of NaNs.
        positive_inf_count: number of positive infinities.
        negative_inf_count: number of negative infinities (a mask may put them there on purpose).
        zero_count: number of zeros of either sign.
        mean: arithmetic mean.
        std: population standard deviation, as `numpy.std`; exactly 0 where all values are equal.
        min: smallest value.
        max: largest value.
        exponents: counts by sign and binary exponent.
        units: liveliness of each unit, ``None`` for a tensor without units.
        shape: shape of the first tensor seen; of a nested tensor, that of its rows together.
        dtype: dtype of the first tensor seen, for example ``"bfloat16"``.
        device: its device, for example ``"cpu"``.
        histogram_sampled: whether `exponents` come from a sample, scaled to the exact number of
            non-zero values (large tensors only). All else is exact.
        first_nonfinite: index of the first NaN or infinity, in the first tensor that held one;
            ``None`` where there is none, or too many tensors held one to look again.
    """

    count: int
    nan_count: int
    positive_inf_count: int
    negative_inf_count: int
    zero_count: int
    mean: float
    std: float
    min: float
    max: float
    exponents: ExponentCounts
    units: UnitStatistics | None
    shape: tuple[int, ...]
    dtype: str
    device: str
    histogram_sampled: bool = False
    first_nonfinite: tuple[int, ...] | None = None

    @property
    def inf_count(self) -> int:
        """Number of infinities of either sign."""
        return self.positive_inf_count + self.negative_inf_count

    @property
    def nonfinite_count(self) -> int:
        """Number of NaNs and infinities."""
        return self.nan_count + self.positive_inf_count + self.negative_inf_count

    @property
    def finite_count(self) -> int:
        """Number of finite values."""
        nonfinite = self.nan_count + self.positive_inf_count + self.negative_inf_count
        return self.count - nonfinite

    @property
    def mean_of_all(self) -> float:
        """Mean as torch computes it, of values that are not finite too."""
        if self.nan_count or (self.positive_inf_count and self.negative_inf_count):
            return math.nan
        if self.positive_inf_count:
            return math.inf
        return -math.inf if self.negative_inf_count else self.mean

    @property
    def rms(self) -> float:
        """Root mean square."""
        return math.hypot(self.mean, self.std)

    @property
    def norm(self) -> float:
        """L2 norm: the square root of the sum of squares; 0 for no finite value."""
        count = self.finite_count
        return math.hypot(self.mean, self.std) * math.sqrt(count) if count else 0.0

    @property
    def abs_max(self) -> float:
        """Largest magnitude."""
        low, high = -self.min, self.max
        return low if low > high else abs(high)

    @property
    def zero_fraction(self) -> float:
        """Part of all elements that is exactly zero; NaN for an empty tensor."""
        return self.zero_count / self.count if self.count else math.nan

    @property
    def dead_fraction(self) -> float | None:
        """Part of the units that was never alive (`UnitStatistics`); ``None`` without units."""
        if self.units is None or not len(self.units.alive):
            return None
        return 1.0 - int(np.count_nonzero(self.units.alive)) / len(self.units.alive)

    @property
    def histogram(self) -> Histogram:
        """Counts and edges of the finite values, in ascending order; the counts add up to them."""
        return self.exponents.histogram(self.zero_count)

    def merge(self, other: TensorStatistics) -> TensorStatistics:
        """Return the statistics of all elements of both.

        Counts, extremes and histograms are exact, moments right to float64 rounding. Shape, dtype
        and device stay those of `self`. Units survive where both have the same number of them.

        Raises:
            InspectionError: `other` is something else.
        """
        require_kind(other, TensorStatistics)
        mean, std = self._merged_moments(other)
        return replace(
            self,
            count=self.count + other.count,
            nan_count=self.nan_count + other.nan_count,
            positive_inf_count=self.positive_inf_count + other.positive_inf_count,
            negative_inf_count=self.negative_inf_count + other.negative_inf_count,
            zero_count=self.zero_count + other.zero_count,
            mean=mean,
            std=std,
            # a side without finite values has NaN extremes, which fmin and fmax pass over
            min=float(np.fmin(self.min, other.min)),
            max=float(np.fmax(self.max, other.max)),
            exponents=self.exponents.add(other.exponents),
            units=self.units.merge(other.units) if self.units is not None else None,
            histogram_sampled=self.histogram_sampled or other.histogram_sampled,
            first_nonfinite=(self if self.nonfinite_count else other).first_nonfinite,
        )

    def _merged_moments(self, other: TensorStatistics) -> tuple[float, float]:
        """Return mean and standard deviation of both (Chan, Golub and LeVeque 1979).

        The standard deviation stands in for the usual sum of squares, and half the gap between the
        means for the whole: so nothing overflows that the result itself does not.
        """
        if not self.finite_count or not other.finite_count:
            only = self if self.finite_count else other
            return only.mean, only.std
        count = self.finite_count + other.finite_count
        own, others = self.finite_count / count, other.finite_count / count
        half_gap = other.mean / 2 - self.mean / 2
        std = math.hypot(
            self.std * math.sqrt(own),
            other.std * math.sqrt(others),
            half_gap * (2 * math.sqrt(own * others)),
        )
        return self.mean + half_gap * others + half_gap * others, std

    def __repr__(self) -> str:
        parts = [
            f"shape={self.shape}, dtype={self.dtype}, mean={self.mean:.4g}, std={self.std:.4g}",
            f"min={self.min:.4g}, max={self.max:.4g}, zeros={self.zero_fraction:.1%}",
        ]
        if self.nonfinite_count:
            parts.append(f"nan={self.nan_count}, inf={self.inf_count}")
        if self.dead_fraction is not None:
            parts.append(f"dead={self.dead_fraction:.1%}")
        return f"TensorStatistics({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is known of a tensor before any of its values is.

    Args:
        count: number of its real values, those that a sparse layout leaves out apart.
        shape, dtype, device: as in `TensorStatistics`.
        observations: as in `UnitStatistics`; ``None`` for no units.
    """

    count: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    observations: int | None

    @classmethod
    def of(cls, tensor: Tensor, shape: tuple[int, ...], count: int, dim: int | None) -> Subject:
        """Return what is known of `tensor`; `dim` is the dimension of its units, from 0."""
        dtype, device = str(tensor.dtype).removeprefix("torch."), str(tensor.device)
        return cls(count, shape, dtype, device, None if dim is None else math.prod(shape[:dim]))

    def zeros(self, count: int) -> TensorStatistics:
        """Return the statistics of `count` zeros, without units; of no value where it is 0."""
        value = 0.0 if count else math.nan
        return TensorStatistics(
            count=count,
            nan_count=0,
            positive_inf_count=0,
            negative_inf_count=0,
            zero_count=count,
            mean=value,
            std=value,
            min=value,
            max=value,
            exponents=ExponentCounts(),
            units=None,
            shape=self.shape,
            dtype=self.dtype,
            device=self.device,
        )
