"""Mean and standard deviation, and how those of two sets of values combine."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moments:
    """The moments of some finite values, in float64.

    Args:
        count: number of values.
        mean: arithmetic mean; NaN for no values.
        std: population standard deviation, as `numpy.std`; NaN for no values.
    """

    count: int = 0
    mean: float = math.nan
    std: float = math.nan

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both (Chan, Golub and LeVeque 1979).

        The standard deviation stands in for the usual sum of squares, and half the gap between the
        means for the whole: so nothing overflows that the result itself does not.
        """
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        own, others = self.count / count, other.count / count
        half_gap = other.mean / 2 - self.mean / 2
        std = math.hypot(
            self.std * math.sqrt(own),
            other.std * math.sqrt(others),
            half_gap * (2 * math.sqrt(own * others)),
        )
        return Moments(count, self.mean + half_gap * others + half_gap * others, std)
