"""How far the units of a tensor spread over the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_modelhealth.statistics import TensorStatistics, UnitStatistics

FEWEST_UNITS = 6
HEALTHY_SPREAD = 1e-2


def units_of(statistics: TensorStatistics | None) -> UnitStatistics | None:
    """Return the units of a tensor, where enough samples were seen, all finite."""
    units = None if statistics is None or statistics.nonfinite_count else statistics.units
    if units is None or len(units.minimum) == 0 or units.observations < FEWEST_UNITS:
        return None
    return units


def spread_of(statistics: TensorStatistics | None) -> float:
    """Return the largest range of a unit relative to the largest magnitude, 0 to 2."""
    if statistics is None or statistics.units is None or statistics.nonfinite_count:
        return 0.0
    if not statistics.abs_max > 0.0:
        return 0.0
    ranges = statistics.units.maximum - statistics.units.minimum
    return float(ranges.max()) / statistics.abs_max if len(ranges) else 0.0
