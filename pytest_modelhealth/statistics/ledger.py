"""`Ledger`: reads each tensor at once, and makes the statistics of many of them later.

What a small tensor costs is Python: the compiled kernel reads one in a microsecond or two, and
making a `TensorStatistics` of what it found takes several. So what it found stays as the kernel
wrote it, some hundred bytes a tensor, until somebody asks. Of tensors on other devices the results
stay there, so that nobody waits for the device, and are fetched all at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelhealth.statistics import queued
from pytest_modelhealth.statistics.dense import dense_values, first_nonfinite, unseen
from pytest_modelhealth.statistics.native import (
    COMPARED_SAMPLES,
    EQUAL_SAMPLES,
    NOT_ALL_FINITE,
    PLACE,
    PLAIN_TYPES,
    REMARKS_FROM_BIT,
    Results,
    is_plain,
    library,
)
from pytest_modelhealth.statistics.queued import Queued
from pytest_modelhealth.statistics.tensor_statistics import Subject, TensorStatistics

MOST_QUEUED = 1 << 26
"""Bytes of results that wait on a device before they are fetched, all the same."""

MOST_LOOKS_AGAIN = 64
"""Tensors with values that are not finite in which the first of them is looked for.

That takes a second pass, and what follows a layer that made the first NaN is NaN throughout.
"""

_AS_FLOAT = {
    torch.bool: torch.bfloat16,
    torch.int8: torch.bfloat16,
    torch.uint8: torch.bfloat16,
    torch.int16: torch.float32,
    torch.int32: torch.float64,
    torch.int64: torch.float64,
}
"""The shortest dtype of the compiled kernel that holds all integers of another, or float64."""


_COUNTS = ("nan_count", "positive_inf_count", "negative_inf_count", "zero_count", "finite_count")
MOMENTS = (*_COUNTS, "mean", "std", "min", "max")


class Entry:
    """What was found in one tensor; what is not set is read off the class.

    Args:
        source: what has it: its ``statistics(subject, place, first_nonfinite)`` makes it.
        subject, place: as the source wants them.
        has_units: whether the tensor's units were looked at.

    Attributes:
        samples_equal: whether all samples of the tensor hold equal values; ``None`` where nobody
            looked.
        waits: whether what was found is still on another device.
        made_by: the vertex that the tensor is, alone in a tuple, where a flow shows it.
    """

    samples_equal: bool | None = None
    made_by: tuple[int, ...] | None = None
    waits = False
    _first_nonfinite: tuple[int, ...] | None = None
    _known: TensorStatistics | None = None
    _zeros: int | None = None

    def __init__(self, source: Any, subject: Any, place: int, has_units: bool) -> None:
        self._source, self._subject, self._place = source, subject, place
        self.has_units = has_units

    @property
    def statistics(self) -> TensorStatistics:
        """The statistics of the tensor as it was when it was added."""
        if self._known is None:
            self._known = self._source.statistics(self._subject, self._place, self._first_nonfinite)
        return self._known

    @property
    def zero_count(self) -> int | None:
        """How many values are zero, without the other statistics; ``None`` on another device."""
        if self._zeros is None and not self.waits:
            self._zeros = int(self.moments[3])
        return self._zeros

    @property
    def moments(self) -> tuple[float, ...]:
        """Counts and moments as `MOMENTS` has them, without the rest of the statistics."""
        if self._known is None and type(self._source) is Results:
            return self._source.moments(self._place)
        return tuple(getattr(self.statistics, name) for name in MOMENTS)

    @property
    def reach(self) -> tuple[float, int] | None:
        """The finite value of the largest magnitude, and how many are NaN or positive infinity.

        The value is NaN where none is finite; ``None`` on another device.
        """
        if self.waits:
            return None
        nans, infs, *_, low, high = self.moments
        return high if high >= -low else low, int(nans + infs)

    @staticmethod
    def of(statistics: TensorStatistics) -> Entry:
        """Return an entry that holds what is known already."""
        entry = Entry(None, None, 0, statistics.units is not None)
        entry._known = statistics
        return entry

    def of_dtype(self, dtype: torch.dtype) -> Entry:
        """Return the entry of a tensor of this dtype, which another one was made of to be read."""
        name = str(dtype).removeprefix("torch.")
        return self._changed(lambda seen: replace(seen, dtype=name), self.has_units)

    def reshaped(self, shape: tuple[int, ...]) -> Entry:
        """Return the entry, without units, of a tensor of the same values in the same order."""

        def change(seen: TensorStatistics) -> TensorStatistics:
            first = seen.first_nonfinite
            if first is not None:
                place = np.ravel_multi_index(first, seen.shape)
                first = tuple(map(int, np.unravel_index(place, shape)))
            return replace(seen, units=None, shape=shape, first_nonfinite=first)

        return self._changed(change, has_units=False)

    def _changed(
        self, change: Callable[[TensorStatistics], TensorStatistics], has_units: bool
    ) -> Entry:
        made_later = SimpleNamespace(statistics=lambda *_: change(self.statistics))
        entry = Entry(made_later, None, 0, has_units)
        entry.waits = self.waits
        return entry


class Entries:
    """What was found in tensors that were read together, each made an entry when asked for.

    Args:
        found: of each tensor its entry, the place of its result, or ``None`` where it was not read.
        results: what the kernel wrote to.
        columns: of each tensor the zeros and the largest magnitude, as `Results` has them.
    """

    def __init__(
        self,
        found: Iterable[Entry | int | None],
        results: Results | None = None,
        columns: tuple[Sequence[int], Sequence[float]] | None = None,
    ) -> None:
        self._found, self._results = [*found], results
        count = len(self._found)
        self._zeros, self._largest = columns or ([0] * count, [0.0] * count)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Entry | None]:
        return map(self.__getitem__, range(len(self._found)))

    def __getitem__(self, index: int) -> Entry | None:
        found = self._found[index]
        if isinstance(found, int):
            entry = Entry(self._results, None, found, has_units=False)
            entry._zeros = self._zeros[index]
            self._found[index] = found = entry
        return found

    def __setitem__(self, index: int, entry: Entry | None) -> None:
        self._found[index] = entry

    @property
    def unread(self) -> list[int]:
        """The indices of tensors that were not read."""
        return [index for index, found in enumerate(self._found) if found is None]

    def zeros(self) -> list[int | None]:
        """Return how many zeros each tensor has, as `Entry` has it; ``None`` of one not read."""
        return [
            one.zero_count if isinstance(one, Entry) else None if one is None else zeros
            for one, zeros in zip(self._found, self._zeros, strict=True)
        ]

    def largest(self) -> list[float | None]:
        """Return the largest magnitude of each, as `Entry.reach`; ``None`` of one not read."""
        reaches = [one.reach if isinstance(one, Entry) else one for one in self._found]
        return [
            abs(one[0]) if isinstance(one, tuple) else None if one is None else largest
            for one, largest in zip(reaches, self._largest, strict=True)
        ]


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
        self._is_compiled = library() is not None and not queue_all
        self.has_queued = False
        """Whether statistics of a tensor stayed on its device, at least for a while."""

    def add(self, tensor: Tensor, unit_dim: int | None = None, samples: int = 0) -> Entry:
        """Read `tensor`, as `reduce` does, and return where its statistics are to be had.

        Args:
            tensor, unit_dim: as of `reduce`.
            samples: compare the samples of a tensor that has as many in dimension 0; 0 for none.

        Raises:
            UnsupportedTensorError, IndexError: as `reduce`.
        """
        # as `is_plain` has it: this runs for every tensor of a step
        if self._is_compiled and type(tensor) in PLAIN_TYPES and not tensor.is_neg():
            results = self._by_thread.get(get_ident()) or self._begin()
            found = results.read(tensor, unit_dim, samples)
            if found >= 0:
                entry = Entry(results, None, found & PLACE, unit_dim is not None)
                remarks = found >> REMARKS_FROM_BIT
                if remarks & COMPARED_SAMPLES:
                    entry.samples_equal = remarks & EQUAL_SAMPLES > 0
                if remarks & NOT_ALL_FINITE:
                    entry._first_nonfinite = self._first_nonfinite(tensor)
                return entry
        with unseen():
            return self._add_unusual(tensor, unit_dim)

    def add_many(self, tensors: Sequence[Tensor], less: Sequence[Tensor] = ()) -> Entries:
        """Read tensors, without units, in one call of the kernel, plain ones `less` subtracted.

        Returns:
            The entry of each, ``None`` for one that the kernel does not read: it is left to `add`.
        """
        if not self._is_compiled or not tensors:
            return Entries([None] * len(tensors))
        results = self._by_thread.get(get_ident()) or self._begin()
        read = results.read_many(tensors, less) if less else results.read_many(tensors)
        found = [place & PLACE if place >= 0 else None for place in read.tolist()]
        entries = Entries(found, results, results.columns(read))
        for index in np.flatnonzero((read >= 0) & (read >> REMARKS_FROM_BIT != 0)).tolist():
            entry = entries[index]
            assert entry is not None
            tensor = tensors[index] - less[index] if less else tensors[index]
            entry._first_nonfinite = self._first_nonfinite(tensor)
        return entries

    def turn_over(self) -> None:
        """Write to new memory from here on: the old goes when no entry needs it any longer."""
        self._by_thread.clear()

    def _begin(self) -> Results:
        results = self._by_thread[get_ident()] = Results()
        return results

    def _first_nonfinite(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Find the first value that is not finite, if that was not done too often."""
        if not self._looks_again:
            return None
        self._looks_again -= 1
        with unseen():
            return first_nonfinite(tensor)

    def _add_unusual(self, tensor: Tensor, unit_dim: int | None) -> Entry:
        """Read a tensor that the kernel does not read as it lies in memory."""
        dense = dense_values(tensor)
        dim = dense.unit_dimension(unit_dim)
        subject = Subject.of(tensor, dense.shape, dense.values.numel(), dim)
        if self._queue_all or not dense.values.is_cpu:  # it stays there until somebody asks
            return self._enqueue(subject, queued.queue(dense.values, dim))
        found = self._read_now(dense.values, dim, subject)
        if found.nonfinite_count and dense.keeps_dimensions and not tensor.is_complex():
            found.first_nonfinite = self._first_nonfinite(dense.values)
        if dense.implicit_zeros:
            found = found.merge(subject.zeros(dense.implicit_zeros))
        return Entry.of(found)

    def _read_now(self, values: Tensor, dim: int | None, subject: Subject) -> TensorStatistics:
        floats = values.to(_AS_FLOAT.get(values.dtype, values.dtype))
        if self._is_compiled and is_plain(floats):
            results = self._by_thread.get(get_ident()) or self._begin()
            found = results.read(floats, dim)
            if found >= 0:
                return results.statistics(subject, found & PLACE)
        wanted = queued.queue(values, dim)
        return queued.decode(wanted, wanted.numbers.numpy(), subject)

    def _enqueue(self, subject: Subject, wanted: Queued) -> Entry:
        with self._lock:
            if self._queue.size > MOST_QUEUED:
                self._queue.fetch()
            if self._queue.is_fetched:
                self._queue = _Queue()
            self.has_queued = True
            place = self._queue.add(wanted)
            entry = Entry(self._queue, subject, place, subject.observations is not None)
            entry.waits = True
            return entry


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

    def statistics(self, subject: Subject, place: int, first: object) -> TensorStatistics:
        """Return the statistics of the tensor at an index; those of all are fetched before."""
        self.fetch()
        return queued.decode(self._queued[place], self._numbers[place], subject)

    def fetch(self) -> None:
        """Fetch all results, in one transfer from each device."""
        if self.is_fetched:
            return
        self.is_fetched = True
        with unseen():
            self._numbers = queued.fetch_all(self._queued)


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
        return Ledger().add(tensor, unit_dim).statistics
