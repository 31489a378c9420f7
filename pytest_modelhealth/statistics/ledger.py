"""`Ledger`: reads each tensor at once, and makes the statistics of many of them together, later."""

from __future__ import annotations

from torch import Tensor

from pytest_modelhealth.statistics.reduction import reduce
from pytest_modelhealth.statistics.tensor_statistics import TensorStatistics


class Entry:
    """What was found in one tensor.

    Attributes:
        has_units: whether its units were looked at.
    """

    __slots__ = ("_found", "has_units")

    def __init__(self, statistics: TensorStatistics) -> None:
        self.has_units = statistics.units is not None
        self._found = statistics

    @property
    def statistics(self) -> TensorStatistics:
        """The statistics of the tensor as it was when it was added."""
        return self._found


class Ledger:
    """Statistics of many tensors, which are read when they are added and not held."""

    def add(self, tensor: Tensor, unit_dim: int | None = None) -> Entry:
        """Read `tensor`, as `reduce` does, and return where its statistics are to be had.

        Raises:
            UnsupportedTensorError: as `reduce`.
        """
        return Entry(reduce(tensor, unit_dim))
