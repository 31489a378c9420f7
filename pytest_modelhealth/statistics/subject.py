"""`Subject`: what is known of a tensor before any of its values is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from pytest_modelhealth.statistics.exponents import ExponentCounts
from pytest_modelhealth.statistics.tensor_statistics import TensorStatistics


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
