"""`Ledger`: reads each tensor at once, and makes the statistics of many of them later.

What a small tensor costs is Python: the compiled kernel reads one in a microsecond or two, and
making a `TensorStatistics` of what it found takes several. So what it found stays as the kernel
wrote it, some hundred bytes a tensor, until somebody asks. Of tensors on other devices the results
stay there, so that nobody waits for the device, and are fetched all at once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace
from threading import get_ident
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelhealth.statistics.dense import dense_values
from pytest_modelhealth.statistics.exponents import ExponentCounts
from pytest_modelhealth.statistics.kernels import queued
from pytest_modelhealth.statistics.kernels.queued import Queued
from pytest_modelhealth.statistics.kinds import Kind, find_kind
from pytest_modelhealth.statistics.native import (
    EQUAL_SAMPLES,
    NOT_ALL_FINITE,
    OUT_OF_RANGE,
    Results,
)
from pytest_modelhealth.statistics.nonfinite import first_nonfinite
from pytest_modelhealth.statistics.reduction import Subject, reduce, unseen
from pytest_modelhealth.statistics.tensor_statistics import TensorStatistics
from pytest_modelhealth.statistics.units import UnitStatistics

MOST_QUEUED = 1 << 26
"""Bytes of results that wait on a device before they are fetched, all the same."""


MOST_LOOKS_AGAIN = 64
"""Tensors with values that are not finite in which the first of them is looked for.

That takes a second pass, and what follows a layer that made the first NaN is NaN throughout.
"""


class Entry(ABC):
    """What was found in one tensor."""

    __slots__ = ()

    samples_equal: bool | None
    """Whether all samples of the tensor hold equal values; ``None`` where nobody looked."""

    waits: ClassVar[bool] = False
    """Whether what was found is still on another device."""

    @property
    @abstractmethod
    def statistics(self) -> TensorStatistics:
        """The statistics of the tensor as it was when it was added."""

    @property
    @abstractmethod
    def has_units(self) -> bool:
        """Whether the tensor's units were looked at."""

    @staticmethod
    def of(statistics: TensorStatistics) -> Entry:
        """Return an entry that holds what is known already."""
        return _Known(statistics)

    def of_dtype(self, dtype: torch.dtype) -> Entry:
        """Return the entry of a tensor of this dtype, which another one was made of to be read."""
        return _Renamed(self, str(dtype).removeprefix("torch."))

    def reshaped(self, shape: tuple[int, ...]) -> Entry:
        """Return the entry, without units, of a tensor of the same values in the same order."""
        return _Reshaped(self, shape)


class Ledger:
    """Statistics of many tensors.

    Tensors are read when they are added, and neither held nor copied. Threads may add at a time.

    Args:
        queue_all: whether CPU tensors are treated as those of other devices; for tests.
    """

    def __init__(self, *, queue_all: bool = False) -> None:
        self._by_thread: dict[int, Results] = {}  # the kernel lets other threads run
        self._looks_again = MOST_LOOKS_AGAIN
        self._lock = threading.Lock()  # of the queue
        self._queue = _Queue()
        self._queue_all = queue_all
        self._has_queued = False

    def add(self, tensor: Tensor, unit_dim: int | None = None, samples: int = 0) -> Entry:
        """Read `tensor`, as `reduce` does, and return where its statistics are to be had.

        Args:
            tensor, unit_dim: as of `reduce`.
            samples: compare the samples of a tensor that has as many in dimension 0; 0 for none.

        Raises:
            UnsupportedTensorError: as `reduce`.
        """
        if not tensor.is_cpu or self._queue_all:
            return self._add_queued(tensor, unit_dim)
        kind, address = find_kind(tensor, unit_dim, samples)
        if kind is not None:
            results = self._by_thread.get(get_ident()) or self._begin()
            place, remarks = results.reduce_packed(kind.job, address)
            if not remarks & OUT_OF_RANGE:
                equal = remarks >= EQUAL_SAMPLES if kind.compares_samples else None
                entry = _Compiled(kind, results, place, equal)
                if remarks & NOT_ALL_FINITE:
                    self._look_again(entry, tensor)
                return entry
        return _Known(reduce(tensor, unit_dim))

    def add_many(self, tensors: Sequence[Tensor]) -> list[Entry | None]:
        """Read tensors, without units, in one call of the kernel.

        Returns:
            The entry of each, ``None`` for one that the kernel does not read: it is left to `add`.
        """
        found: list[Entry | None] = [None] * len(tensors)
        places, kinds, addresses = [], [], []
        for place, tensor in enumerate(() if self._queue_all else tensors):
            kind, address = find_kind(tensor, None)
            if kind is not None:
                places.append(place)
                kinds.append(kind)
                addresses.append(address)
        if not kinds:
            return found
        results = self._by_thread.get(get_ident()) or self._begin()
        done = results.reduce_many([kind.job for kind in kinds], addresses)
        for place, kind, (where, remarks) in zip(places, kinds, done, strict=True):
            if not remarks & OUT_OF_RANGE:
                entry = found[place] = _Compiled(kind, results, where, None)
                if remarks & NOT_ALL_FINITE:
                    self._look_again(entry, tensors[place])
        return found

    def _look_again(self, entry: _Compiled, tensor: Tensor) -> None:
        """Find the first value that is not finite, if that was not done too often."""
        if self._looks_again > 0:
            self._looks_again -= 1
            with unseen():
                entry.first_nonfinite = first_nonfinite(tensor)

    @property
    def has_queued(self) -> bool:
        """Whether statistics of a tensor stayed on its device, at least for a while."""
        return self._has_queued

    def queues(self, tensor: Tensor) -> bool:
        """Whether the statistics of `tensor` stay on its device until somebody asks for them."""
        return not tensor.is_cpu or self._queue_all

    def _begin(self) -> Results:
        results = self._by_thread[get_ident()] = Results()
        return results

    def _add_queued(self, tensor: Tensor, unit_dim: int | None) -> Entry:
        with unseen():
            dense = dense_values(tensor)
            subject = Subject.of(tensor, dense, unit_dim)
            wanted = queued.queue(dense.values, subject.dim)
        with self._lock:
            if self._queue.size > MOST_QUEUED:
                self._queue.fetch()
            if self._queue.is_fetched:
                self._queue = _Queue()
            self._has_queued = True
            return _Waiting(subject, self._queue, self._queue.add(wanted))


class _Known(Entry):
    samples_equal = None
    __slots__ = ("_statistics",)

    def __init__(self, statistics: TensorStatistics) -> None:
        self._statistics = statistics

    @property
    def statistics(self) -> TensorStatistics:
        return self._statistics

    @property
    def has_units(self) -> bool:
        return self._statistics.units is not None


class _Renamed(Entry):
    samples_equal = None
    __slots__ = ("_dtype", "_entry")

    def __init__(self, entry: Entry, dtype: str) -> None:
        self._entry = entry
        self._dtype = dtype

    @property
    def statistics(self) -> TensorStatistics:
        return replace(self._entry.statistics, dtype=self._dtype)

    @property
    def has_units(self) -> bool:
        return self._entry.has_units


class _Reshaped(Entry):
    samples_equal = None
    __slots__ = ("_entry", "_shape")

    def __init__(self, entry: Entry, shape: tuple[int, ...]) -> None:
        self._entry = entry
        self._shape = shape

    @property
    def statistics(self) -> TensorStatistics:
        seen = self._entry.statistics
        first = seen.first_nonfinite
        if first is not None:
            place = np.ravel_multi_index(first, seen.shape)
            first = tuple(map(int, np.unravel_index(place, self._shape)))
        return replace(seen, units=None, shape=self._shape, first_nonfinite=first)

    @property
    def has_units(self) -> bool:
        return False


# ---- read by the compiled kernel ---------------------------------------------------------------


class _Compiled(Entry):
    __slots__ = ("_kind", "_known", "_place", "_results", "first_nonfinite", "samples_equal")

    def __init__(self, kind: Kind, results: Results, place: int, equal: bool | None) -> None:
        self._kind = kind
        self._results = results
        self._place = place
        self._known: TensorStatistics | None = None
        self.samples_equal = equal
        self.first_nonfinite: tuple[int, ...] | None = None

    @property
    def statistics(self) -> TensorStatistics:
        if self._known is None:
            self._known = _statistics(self._kind, self._results, self._place, self.first_nonfinite)
        return self._known

    @property
    def has_units(self) -> bool:
        return self._kind.has_units


class _ReadOutLater(TensorStatistics):
    """Statistics whose exponents and units are read out when somebody asks for them.

    Most are asked for neither, and making both takes four times as long as all the rest. A copy and
    a pickle have them.
    """

    __slots__ = ("_observations", "_place", "_results")

    _observations: int
    _place: int
    _results: Results

    def __getattr__(self, name: str) -> Any:
        """Fill one of the two, which alone are not set from the start."""
        if name not in ("exponents", "units"):
            raise AttributeError(name)
        found = self._results[self._place]
        self.exponents = ExponentCounts(found.lowest, found.rows)
        self.units = None
        if found.extremes is not None and found.alive is not None:
            low, high = found.extremes
            self.units = UnitStatistics(found.alive, low, high, self._observations)
        return getattr(self, name)

    def __reduce__(self) -> tuple[type[TensorStatistics], tuple[Any, ...]]:
        return TensorStatistics, tuple(getattr(self, field.name) for field in fields(self))


def _statistics(
    kind: Kind, results: Results, place: int, first_nonfinite: tuple[int, ...] | None
) -> TensorStatistics:
    """Make the statistics of one tensor from what the kernel found."""
    made = _ReadOutLater.__new__(_ReadOutLater)
    (
        _,
        made.nan_count,
        made.positive_inf_count,
        made.negative_inf_count,
        made.zero_count,
        _,
        made.mean,
        made.std,
        made.min,
        made.max,
        is_sampled,
        _,
    ) = results.numbers(place)
    made.count = kind.count
    made.shape = kind.shape
    made.dtype = kind.dtype
    made.device = "cpu"
    made.histogram_sampled = bool(is_sampled)
    made.first_nonfinite = first_nonfinite
    if not kind.has_units:
        made.units = None
    made._results, made._place, made._observations = results, place, kind.observations
    return made


# ---- waiting on a device -----------------------------------------------------------------------


class _Queue:
    """Results that wait on their devices until one of them is asked for.

    Attributes:
        size: how many bytes they have.
        is_fetched: whether they were; then nothing is added.
    """

    def __init__(self) -> None:
        self.size = 0
        self.is_fetched = False
        self._queued: list[Queued] = []
        self._numbers: list[npt.NDArray[np.int64]] = []

    def add(self, wanted: Queued) -> int:
        """Add one tensor's results; return their index."""
        self._queued.append(wanted)
        self.size += wanted.numbers.numel() * wanted.numbers.itemsize
        return len(self._queued) - 1

    def statistics(self, index: int, subject: Subject) -> TensorStatistics:
        """Return one tensor's statistics; those of all are fetched before."""
        self.fetch()
        return subject.statistics(*queued.decode(self._queued[index], self._numbers[index]))

    def fetch(self) -> None:
        """Fetch all results, in one transfer from each device."""
        if self.is_fetched:
            return
        self.is_fetched = True
        with unseen():
            self._numbers = queued.fetch_all(self._queued)


class _Waiting(Entry):
    samples_equal = None
    waits = True
    __slots__ = ("_index", "_known", "_queue", "_subject")

    def __init__(self, subject: Subject, queue: _Queue, index: int) -> None:
        self._subject = subject
        self._queue = queue
        self._index = index
        self._known: TensorStatistics | None = None

    @property
    def statistics(self) -> TensorStatistics:
        if self._known is None:
            self._known = self._queue.statistics(self._index, self._subject)
        return self._known

    @property
    def has_units(self) -> bool:
        return self._subject.dim is not None
