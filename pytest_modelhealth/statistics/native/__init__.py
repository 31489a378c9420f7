"""The compiled part: loads ``fused.c`` as built for this CPU and calls it through ctypes.

``hatch_build.py`` compiles it when the package is built. The GIL is released during a call. A large
tensor is read by as many of torch's own threads as torch uses for its operations.

Many tensors cost little more than their memory when their results are read out later::

    results = Results()
    job = PackedJob(layout)
    place, remarks = results.reduce_packed(job, address)  # 1 microsecond and the tensor itself
    several = results.reduce_many([job, job], addresses)  # one call for all of them
    found = results[place]  # 2 microseconds, whenever it is wanted

`fused.job` makes a job of a tensor, and `fused.decode` what kernels return of a `Found`.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pytest_modelhealth.statistics.exponents import HIGHEST_EXPONENT, LOWEST_EXPONENT
from pytest_modelhealth.statistics.native import forks

_SOURCES = ("fused.c", "block.h", "vectors.h", "samples.h")  # as in hatch_build.py
_LEVELS = {"AVX512": ("avx512", "avx2", "base"), "AVX2": ("avx2", "base")}

_JOB = struct.Struct("=11q")
_RESULT = struct.Struct("=7q4d4q")
_RESULT_WORDS = 16
_ROWS = 2 * (HIGHEST_EXPONENT - LOWEST_EXPONENT + 1)
_PAGE_WORDS = 1 << 16
_PLACE_BITS = 40  # of a place, for the word in its page; the rest is the number of the page

# What the kernel remarks on a tensor, from bit 48 of what it returns.
_REMARKS_FROM_BIT = 48
_WORDS = (1 << _REMARKS_FROM_BIT) - 1
OUT_OF_RANGE = 1
NOT_ALL_FINITE = 2
EQUAL_SAMPLES = 4


class Layout:
    """Where elements lie, in the order in which they are read; the same for tensors of one kind.

    Args:
        dtype: 0 to 3 for float32, float64, bfloat16, float16.
        elements: how many there are.
        sizes, strides: in elements, widest stride first; empty where memory is dense.
        units: number of units; 0 where their extremes are not wanted.
        cells: number of places where extremes are gathered, one or several a unit.
        run: how many elements of one cell follow each other.
        one_in: how many values there are for each that enters the histogram; 1 for all.
        part: about how many elements are summarized by themselves. Threads share parts; another
            length may give other last bits.
        samples: how many slices of dense memory are compared with each other; 0 for none.
    """

    __slots__ = ("_dimensions", "is_shared", "room", "samples", "words")

    def __init__(
        self,
        dtype: int,
        elements: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        units: int,
        cells: int,
        run: int,
        one_in: int,
        part: int,
        samples: int = 0,
    ) -> None:
        self._dimensions = np.array([*sizes, *strides], dtype=np.int64) if sizes else None
        address = 0 if self._dimensions is None else self._dimensions.ctypes.data
        counts = (units, run, cells, one_in, part, samples)
        self.words = (dtype, elements, len(sizes), address, *counts)
        self.samples = samples
        self.is_shared = elements >= 2 * part  # by threads, as count_threads of fused.c
        self.room = _RESULT_WORDS + _whole(units, 8) * 2 + _whole(units, 64) // 8 + _ROWS


def _whole(count: int, of: int) -> int:
    return -(-count // of) * of


class Job(NamedTuple):
    """A tensor to reduce; whoever makes a job keeps the tensor's memory until it is done.

    Args:
        address: where the tensor's first element is in memory.
        layout: where its elements are from there.
    """

    address: int
    layout: Layout


class PackedJob:
    """A job for many tensors of one layout; threads may share it."""

    __slots__ = ("_memory", "address", "is_shared", "packed", "room")

    def __init__(self, layout: Layout) -> None:
        self.room = layout.room
        self.is_shared = layout.is_shared
        self.packed = _JOB.pack(0, *layout.words)
        self._memory = ctypes.create_string_buffer(self.packed, _JOB.size)
        self.address = ctypes.addressof(self._memory)


class Found(NamedTuple):
    """What the kernel found in a tensor: ``Result`` of ``fused.c``.

    Args:
        out_of_range: 1 where moments left the range of float64, and `plain` has to find them.
        nans, positive_infs, negative_infs, zeros, finite: counts.
        mean, std, min, max: of the finite values; NaN where there are none.
        is_sampled: 1 where `rows` is a sample, scaled to the exact number of non-zero values.
        lowest: the exponent of the first row.
        rows: int64, shape ``(exponents, 2)``, without empty first and last rows.
        extremes: float64, shape ``(2, units)``: least and greatest value of each unit; ``None``
            where units were not wanted.
        alive: bool, shape ``(units,)``, as in `UnitStatistics`.
    """

    out_of_range: int
    nans: int
    positive_infs: int
    negative_infs: int
    zeros: int
    finite: int
    mean: float
    std: float
    min: float
    max: float
    is_sampled: int
    lowest: int
    rows: npt.NDArray[np.int64]
    extremes: npt.NDArray[np.float64] | None
    alive: npt.NDArray[np.bool_] | None


class _Page:
    """Memory that results are written to, one after the other."""

    def __init__(self, words: int, first_place: int) -> None:
        memory = np.empty(words + 8, dtype=np.int64)  # pages that nobody writes to cost nothing
        start = -memory.ctypes.data % 64 // 8
        self.integers = memory[start : start + words]
        self.reals = self.integers.view(np.float64)
        self.pairs = self.integers.reshape(-1, 2)
        self.bytes = self.integers.view(np.bool_)
        self.memory = self.bytes.data
        self.address = int(self.integers.ctypes.data)
        self.words = words
        self.first_place = first_place
        self.used = 0


class Results:
    """What the kernel finds in tensors: kept as it wrote it, and read out when asked for.

    Not for two threads at once. Arrays of a `Found` are views of this memory and keep it.

    Args:
        words: of 8 bytes, in the first page of memory.
        threads: how many read a large tensor; ``None`` for as many as torch uses, which alone
            leaves torch's pool of threads as it is. The results are the same to the last bit.

    Raises:
        RuntimeError: there is no compiled library for this machine.
    """

    def __init__(self, words: int = _PAGE_WORDS, threads: int | None = None) -> None:
        if library() is None:
            raise RuntimeError("the kernel is not compiled for this machine: use the plain one")
        self._page = _Page(words, 0)
        self._pages = [self._page]
        self._reduce = library().modelhealth_reduce
        self._reduce_one = library().modelhealth_reduce_one
        self._threads = threads

    def reduce_packed(self, job: PackedJob, address: int) -> tuple[int, int]:
        """Reduce the tensor whose first element is at `address`.

        Returns:
            The place of the result, and what is to be known at once: `OUT_OF_RANGE`,
            `NOT_ALL_FINITE` and `EQUAL_SAMPLES`, those that are true added up.
        """
        page = self._page
        used = page.used
        if used + job.room > page.words:
            page = self._new_page(job.room)
            used = 0
        threads = self._thread_count() if job.is_shared else 1
        done = self._reduce_one(job.address, address, page.address + 8 * used, threads)
        page.used = used + (done & _WORDS)
        return page.first_place + used, done >> _REMARKS_FROM_BIT

    def reduce_many(
        self, jobs: Sequence[PackedJob], addresses: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Reduce tensors in one call; return of each what `reduce_packed` does."""
        if not jobs:
            return []
        room = sum([job.room for job in jobs])
        if room > _PAGE_WORDS and len(jobs) > 1:
            half = len(jobs) // 2
            return [
                *self.reduce_many(jobs[:half], addresses[:half]),
                *self.reduce_many(jobs[half:], addresses[half:]),
            ]
        page = self._page
        if page.used + room > page.words:
            page = self._new_page(room)
        packed = np.frombuffer(bytearray().join([job.packed for job in jobs]), dtype=np.int64)
        packed.reshape(len(jobs), -1)[:, 0] = addresses
        places = np.empty(len(jobs), dtype=np.int64)
        where = page.address + 8 * page.used
        threads = self._thread_count()
        words = self._reduce(packed.ctypes.data, len(jobs), where, places.ctypes.data, threads)
        first = page.first_place + page.used
        page.used += words
        return [(first + (done & _WORDS), done >> _REMARKS_FROM_BIT) for done in places.tolist()]

    def _thread_count(self) -> int:
        if forks.is_child:
            return 1
        return self._threads or torch.get_num_threads()

    def _new_page(self, room: int) -> _Page:
        self._page = _Page(max(room, _PAGE_WORDS), len(self._pages) << _PLACE_BITS)
        self._pages.append(self._page)
        return self._page

    def numbers(self, place: int) -> tuple[Any, ...]:
        """Return the fields of a `Found` up to `lowest`, without reading out its arrays."""
        page = self._pages[place >> _PLACE_BITS]
        return _RESULT.unpack_from(page.memory, 8 * (place & (1 << _PLACE_BITS) - 1))[1:-2]

    def __getitem__(self, place: int) -> Found:
        page = self._pages[place >> _PLACE_BITS]
        start = place & (1 << _PLACE_BITS) - 1
        fields = _RESULT.unpack_from(page.memory, 8 * start)
        row_count, units = fields[-2:]
        at = start + _RESULT_WORDS
        extremes = alive = None
        if units:
            padded = _whole(units, 8)
            extremes = page.reals[at : at + 2 * padded].reshape(2, padded)[:, :units]
            at += 2 * padded
            alive = page.bytes[8 * at : 8 * at + units]
            at += _whole(units, 64) // 8
        rows = page.pairs[at // 2 : at // 2 + row_count]
        return Found._make((*fields[1:-2], rows, extremes, alive))

    def clear(self) -> None:
        """Forget all results; their memory is written to again."""
        del self._pages[1:]
        self._page = self._pages[0]
        self._page.used = 0


@cache
def library() -> Any:
    """Return the compiled library for this CPU, or ``None`` where there is none.

    torch is asked for the CPU's level, so ``ATEN_CPU_CAPABILITY`` counts here as well.
    """
    for level in _LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("base",)):
        path = Path(__file__).with_name(f"{level}.so")
        if path.exists():
            return load(path)
    return None


def load(path: Path) -> Any:
    """Return the library at `path`, or ``None`` where it is built for another system.

    Nor is one taken that was built from other sources than those beside it: its arguments may be
    others, and a wrong one crashes the interpreter.
    """
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:
        return None
    loaded.modelhealth_source.restype = ctypes.c_char_p
    if loaded.modelhealth_source().decode() != _checksum():
        return None
    # numbers are given as pointers, which ctypes makes of an int at a third of the time
    word = ctypes.c_void_p
    for function, arguments in ((loaded.modelhealth_reduce, 5), (loaded.modelhealth_reduce_one, 4)):
        function.restype = ctypes.c_int64
        function.argtypes = [word] * arguments
    return loaded


def _checksum() -> str:
    """Return the checksum of the sources, as ``hatch_build.py`` compiles it in."""
    here = Path(__file__).parent
    text = b"".join((here / name).read_bytes() for name in _SOURCES)
    return hashlib.sha256(text).hexdigest()[:16]
