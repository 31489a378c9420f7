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
from pytest_modelhealth.statistics.kernels import fused
from pytest_modelhealth.statistics.nonfinite import first_nonfinite
from pytest_modelhealth.statistics.tensor_statistics import TensorStatistics
from pytest_modelhealth.statistics.units import UnitStatistics

if TYPE_CHECKING:
    from pytest_modelhealth.statistics.kernels.fused import Extremes
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
    with torch._C.DisableTorchFunction():
        statistics = _reduce_compiled(tensor, unit_dim)
        if statistics is not None:
            return statistics
        with torch.no_grad(), without_dispatch_modes():
            return _reduce(tensor, unit_dim)


def _reduce_compiled(tensor: Tensor, unit_dim: int | None) -> TensorStatistics | None:
    """Return the statistics of a plain dense tensor, without one call that torch could see."""
    if not is_plain(tensor):
        return None
    dim = None if unit_dim is None else range(tensor.ndim)[unit_dim]
    found = fused.summarize_compiled(tensor, dim)
    if found is None:
        return None
    return _statistics(tensor, DenseValues(tensor, tuple(tensor.shape)), dim, *found)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has nothing about it that `dense_values` would have to look at."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and tensor.untyped_storage().nbytes() > 0
    )


_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})


def _reduce(tensor: Tensor, unit_dim: int | None) -> TensorStatistics:
    dense = dense_values(tensor)
    dim = _unit_dimension(dense, unit_dim)
    found = fused.summarize_units(dense.values, dim)
    statistics = _statistics(tensor, dense, dim, *found)
    if dense.implicit_zeros:
        return statistics.merge(_zeros(dense.implicit_zeros, like=statistics))
    return statistics


def _statistics(
    tensor: Tensor,
    dense: DenseValues,
    dim: int | None,
    found: KernelResult,
    extremes: Extremes | None,
) -> TensorStatistics:
    return TensorStatistics(
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
        units=_units(dense, dim, found, extremes),
        shape=dense.shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        histogram_sampled=found.histogram_sampled,
        first_nonfinite=_first_nonfinite(tensor, dense, found),
    )


def _first_nonfinite(
    tensor: Tensor, dense: DenseValues, found: KernelResult
) -> tuple[int, ...] | None:
    """Look again at a tensor that holds what is not finite, where its dimensions are its own."""
    if not found.nan_count + found.positive_inf_count + found.negative_inf_count:
        return None
    if not dense.keeps_dimensions or tensor.is_complex():
        return None
    with torch.no_grad(), without_dispatch_modes():
        return first_nonfinite(dense.values)


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Keep the modes that see or replace torch calls off; free where there are none."""
    if torch._C._len_torch_dispatch_stack():
        return cast(AbstractContextManager[object], _disable_current_modes())
    return nullcontext()


def _unit_dimension(dense: DenseValues, unit_dim: int | None) -> int | None:
    if unit_dim is None or not dense.keeps_dimensions:
        return None
    # by the shape, because complex values have one dimension more
    return range(len(dense.shape))[unit_dim]


def _units(
    dense: DenseValues, dim: int | None, found: KernelResult, extremes: Extremes | None
) -> UnitStatistics | None:
    if dim is None or extremes is None:
        return None
    observations = math.prod(dense.shape[:dim])
    abs_max = max(abs(found.min), abs(found.max))
    return UnitStatistics.of_extremes(*extremes, observations, abs_max)


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
