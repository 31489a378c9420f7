"""`Ledger`: reads each tensor at once, and makes the statistics of many of them later.

What a small tensor costs is Python: the compiled kernel reads one in a microsecond or two, and
making a `TensorStatistics` of what it found takes several. So what it found stays as the kernel
wrote it, some hundred bytes a tensor, until somebody asks.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from pytest_modelhealth.statistics.exponents import ExponentCounts
from pytest_modelhealth.statistics.kernels import fused
from pytest_modelhealth.statistics.native import Found, Layout, PackedJob, Results
from pytest_modelhealth.statistics.nonfinite import first_nonfinite
from pytest_modelhealth.statistics.reduction import is_plain, reduce, without_dispatch_modes
from pytest_modelhealth.statistics.tensor_statistics import TensorStatistics
from pytest_modelhealth.statistics.units import UnitStatistics


class Entry:
    """What was found in one tensor."""

    __slots__ = ("_found", "_kind", "_place", "_results", "first_nonfinite")

    def __init__(self, kind: _Kind | None, results: Results | None, place: int) -> None:
        self._kind = kind
        self._results = results
        self._place = place
        self._found: TensorStatistics | None = None
        self.first_nonfinite: tuple[int, ...] | None = None

    @classmethod
    def of(cls, statistics: TensorStatistics) -> Entry:
        """Return an entry that holds what is known already."""
        entry = cls(None, None, 0)
        entry._found = statistics
        return entry

    @property
    def has_units(self) -> bool:
        """Whether the tensor's units were looked at."""
        return self.statistics.units is not None if self._kind is None else self._kind.has_units

    @property
    def statistics(self) -> TensorStatistics:
        """The statistics of the tensor as it was when it was added."""
        if self._found is None:
            assert self._kind is not None
            assert self._results is not None
            found = self._results[self._place]
            self._found = _statistics(self._kind, found, self.first_nonfinite)
        return self._found


class Ledger:
    """Statistics of many tensors.

    Tensors are read when they are added, and neither held nor copied. Threads may add at a time.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...], _Kind | None] = {}
        self._results: Results | None = None
        self._looks_again = _MOST_LOOKS_AGAIN
        self._lock = threading.Lock()  # a call of the kernel lets other threads run

    def add(self, tensor: Tensor, unit_dim: int | None = None) -> Entry:
        """Read `tensor`, as `reduce` does, and return where its statistics are to be had.

        Raises:
            UnsupportedTensorError: as `reduce`.
        """
        kind = self._kind(tensor, unit_dim) if tensor.is_cpu and is_plain(tensor) else None
        if kind is not None:
            # unlike data_ptr, this does not make a lazy copy real
            storage = torch._C._data_address(tensor)  # type: ignore[attr-defined]
            address = storage + tensor.storage_offset() * kind.itemsize
            with self._lock:
                results = self._results or self._begin()
                place = results.reduce_packed(kind.job, address)
            if not (kind.may_be_out_of_range and results[place].out_of_range):
                entry = Entry(kind, results, place)
                if results.finite_count(place) != kind.count and self._looks_again > 0:
                    self._looks_again -= 1
                    entry.first_nonfinite = _first_nonfinite(tensor)
                return entry
        return Entry.of(reduce(tensor, unit_dim))

    def _begin(self) -> Results:
        self._results = Results()
        return self._results

    def _kind(self, tensor: Tensor, unit_dim: int | None) -> _Kind | None:
        """Return how the compiled kernel reads a CPU tensor, or ``None`` where it does not."""
        key: tuple[object, ...] = (tensor.shape, tensor.dtype, unit_dim)
        if not tensor.is_contiguous():
            key = (*key, tensor.stride())
        if key not in self._kinds:
            dim = None if unit_dim is None else range(tensor.ndim)[unit_dim]
            job = fused.job(tensor, dim)
            self._kinds[key] = None if job is None else _Kind(tensor, dim, job.layout)
        return self._kinds[key]


class _Kind:
    """What CPU tensors of one shape, dtype and layout have in common."""

    __slots__ = (
        "count",
        "dtype",
        "has_units",
        "itemsize",
        "job",
        "may_be_out_of_range",
        "observations",
        "shape",
    )

    def __init__(self, tensor: Tensor, dim: int | None, layout: Layout) -> None:
        self.job = PackedJob(layout)
        self.shape = tuple(tensor.shape)
        self.count = tensor.numel()
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.itemsize = tensor.itemsize
        self.has_units = dim is not None
        self.observations = math.prod(self.shape[:dim])
        self.may_be_out_of_range = tensor.dtype is torch.float64


_MOST_LOOKS_AGAIN = 64
"""Tensors with values that are not finite in which the first of them is looked for.

That takes a second pass, and what follows a layer that made the first NaN is NaN throughout.
"""


def _first_nonfinite(tensor: Tensor) -> tuple[int, ...] | None:
    with torch._C.DisableTorchFunction(), torch.no_grad(), without_dispatch_modes():
        return first_nonfinite(tensor)


def _statistics(
    kind: _Kind, found: Found, first_nonfinite: tuple[int, ...] | None
) -> TensorStatistics:
    """Make the statistics of one tensor from what the kernel found."""
    units = None
    if found.extremes is not None and found.alive is not None:
        low, high = found.extremes
        units = UnitStatistics(found.alive, low, high, kind.observations)
    return TensorStatistics(
        kind.count,
        found.nans,
        found.positive_infs,
        found.negative_infs,
        found.zeros,
        found.mean,
        found.std,
        found.min,
        found.max,
        ExponentCounts(found.lowest, found.rows),
        units,
        kind.shape,
        kind.dtype,
        "cpu",
        bool(found.is_sampled),
        first_nonfinite,
    )
