"""Liveliness of units: which channels or features of a tensor ever said anything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
