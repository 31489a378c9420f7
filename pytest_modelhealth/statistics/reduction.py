"""`reduce`: from a tensor to its `TensorStatistics`."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pytest_modelhealth.statistics.dense import DenseValues, dense_values
from pytest_modelhealth.statistics.exponents import ExponentCounts
from pytest_modelhealth.statistics.kernels import plain
from pytest_modelhealth.statistics.tensor_statistics import TensorStatistics
from pytest_modelhealth.statistics.units import UnitStatistics

if TYPE_CHECKING:
    from pytest_modelhealth.statistics.kernels.kernel import KernelResult


def reduce(tensor: Tensor, unit_dim: int | None = None) -> TensorStatistics:
    """Return the statistics of `tensor`, which is read and never changed.

    Autograd and the modes that see or replace torch calls are off meanwhile: nothing enters the
    caller's graph or counters, and the numbers are the same wherever this is called. Autocast needs
    no switch, as it leaves float64 alone.

    Args:
        tensor: any dtype, layout, stride and device.
        unit_dim: the dimension of the units; ``None`` keeps no units. Nested and sparse tensors
            have none in any case.

    Raises:
        UnsupportedTensorError: the tensor has no values, or none that are real numbers.
        IndexError: the tensor has no dimension `unit_dim`.
    """
    with torch._C.DisableTorchFunction(), torch.no_grad(), _without_dispatch_modes():
        dense = dense_values(tensor)
        found = plain.summarize(dense.values)
        statistics = TensorStatistics(
            count=dense.values.numel(),
            nan_count=found.nan_count,
            positive_inf_count=found.positive_inf_count,
            negative_inf_count=found.negative_inf_count,
            zero_count=found.zero_count,
            mean=found.moments.mean,
            std=found.moments.std,
            min=found.min,
            max=found.max,
            exponents=found.exponents,
            units=_units(dense, unit_dim, found),
            shape=dense.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            device=str(tensor.device),
        )
    if dense.implicit_zeros:
        return statistics.merge(_zeros(dense.implicit_zeros, like=statistics))
    return statistics


def _without_dispatch_modes() -> AbstractContextManager[object]:
    if torch._C._len_torch_dispatch_stack():
        return cast(AbstractContextManager[object], _disable_current_modes())
    return nullcontext()


def _units(dense: DenseValues, unit_dim: int | None, found: KernelResult) -> UnitStatistics | None:
    if unit_dim is None or not dense.keeps_dimensions:
        return None
    # by the shape, because complex values have one dimension more
    dim = range(len(dense.shape))[unit_dim]
    if not dense.values.numel():
        return None
    minimum, maximum = plain.unit_extremes(dense.values, dim)
    observations = math.prod(dense.shape[:dim])
    abs_max = max(abs(found.min), abs(found.max))
    return UnitStatistics.of_extremes(minimum, maximum, observations, abs_max)


def _zeros(count: int, *, like: TensorStatistics) -> TensorStatistics:
    return TensorStatistics(
        count=count,
        nan_count=0,
        positive_inf_count=0,
        negative_inf_count=0,
        zero_count=count,
        mean=0.0,
        std=0.0,
        min=0.0,
        max=0.0,
        exponents=ExponentCounts(),
        units=None,
        shape=like.shape,
        dtype=like.dtype,
        device=like.device,
    )
