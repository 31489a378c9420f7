"""`reduce`: from a tensor to its `TensorStatistics`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pytest_modelhealth.statistics.dense import DenseValues, dense_values
from pytest_modelhealth.statistics.exponents import ExponentCounts
from pytest_modelhealth.statistics.kernels import fused
from pytest_modelhealth.statistics.kinds import find_kind
from pytest_modelhealth.statistics.nonfinite import first_nonfinite
from pytest_modelhealth.statistics.tensor_statistics import TensorStatistics
from pytest_modelhealth.statistics.units import UnitStatistics

if TYPE_CHECKING:
    from pytest_modelhealth.statistics.kernels.kernel import Extremes, KernelResult


@dataclass(frozen=True, slots=True)
class Subject:
    """What is known of a tensor before any of its values is.

    Args:
        count: number of its real values.
        shape, dtype, device: as in `TensorStatistics`.
        dim: the dimension of its units; ``None`` for no units.
        implicit_zeros: how many zeros its layout leaves out.
    """

    count: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    dim: int | None
    implicit_zeros: int = 0

    @classmethod
    def of(cls, tensor: Tensor, dense: DenseValues, unit_dim: int | None) -> Subject:
        """Return what is known of `tensor`.

        Raises:
            IndexError: the tensor has no dimension `unit_dim`.
        """
        return cls(
            dense.values.numel(),
            dense.shape,
            str(tensor.dtype).removeprefix("torch."),
            str(tensor.device),
            _unit_dimension(dense, unit_dim),
            dense.implicit_zeros,
        )

    def statistics(
        self,
        found: KernelResult,
        extremes: Extremes | None,
        first_nonfinite: tuple[int, ...] | None = None,
    ) -> TensorStatistics:
        """Return the tensor's statistics, from what a kernel found."""
        statistics = TensorStatistics(
            count=self.count,
            nan_count=found.nan_count,
            positive_inf_count=found.positive_inf_count,
            negative_inf_count=found.negative_inf_count,
            zero_count=found.zero_count,
            mean=found.moments.mean,
            std=found.moments.std,
            min=found.min,
            max=found.max,
            exponents=found.exponents,
            units=self._units(found, extremes),
            shape=self.shape,
            dtype=self.dtype,
            device=self.device,
            histogram_sampled=found.histogram_sampled,
            first_nonfinite=first_nonfinite,
        )
        if self.implicit_zeros:
            return statistics.merge(_zeros(self.implicit_zeros, like=statistics))
        return statistics

    def _units(self, found: KernelResult, extremes: Extremes | None) -> UnitStatistics | None:
        if self.dim is None or extremes is None:
            return None
        observations = math.prod(self.shape[: self.dim])
        abs_max = max(abs(found.min), abs(found.max))
        return UnitStatistics.of_extremes(*extremes, observations, abs_max)


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
        with unseen():
            return _reduce(tensor, unit_dim)


def _reduce_compiled(tensor: Tensor, unit_dim: int | None) -> TensorStatistics | None:
    """Return the statistics of a plain dense tensor, without one call that torch could see."""
    kind, address = find_kind(tensor, unit_dim)
    if kind is None:
        return None
    dense = DenseValues(tensor, tuple(tensor.shape))
    subject = Subject.of(tensor, dense, unit_dim)
    found = fused.summarize_packed(kind.job, address)
    if found is None:
        return None
    return subject.statistics(*found, _first_nonfinite(tensor, dense, found[0]))


def _reduce(tensor: Tensor, unit_dim: int | None) -> TensorStatistics:
    dense = dense_values(tensor)
    subject = Subject.of(tensor, dense, unit_dim)
    found = fused.summarize_units(dense.values, subject.dim)
    return subject.statistics(*found, _first_nonfinite(tensor, dense, found[0]))


@contextmanager
def unseen() -> Iterator[None]:
    """Let neither autograd nor the modes that see or replace torch calls see what runs inside."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), _without_dispatch_modes():
        yield


def _first_nonfinite(
    tensor: Tensor, dense: DenseValues, found: KernelResult
) -> tuple[int, ...] | None:
    """Look again at a tensor that holds what is not finite, where its dimensions are its own."""
    if not found.nan_count + found.positive_inf_count + found.negative_inf_count:
        return None
    if not dense.keeps_dimensions or tensor.is_complex():
        return None
    with unseen():
        return first_nonfinite(dense.values)


def _without_dispatch_modes() -> AbstractContextManager[object]:
    if torch._C._len_torch_dispatch_stack():
        return cast(AbstractContextManager[object], _disable_current_modes())
    return nullcontext()


def _unit_dimension(dense: DenseValues, unit_dim: int | None) -> int | None:
    if unit_dim is None or not dense.keeps_dimensions:
        return None
    # by the shape, because complex values have one dimension more
    return range(len(dense.shape))[unit_dim]


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
