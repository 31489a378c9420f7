"""The compiled part: loads ``fused.c`` as built for this CPU and calls it through ctypes.

``hatch_build.py`` compiles it when the package is built. The GIL is released during a call. A large
tensor is read by as many of torch's own threads as torch uses for its operations. Why C, and what
it costs: docs/decisions/0005-fused-kernel.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytest_modelhealth.statistics.tensor_statistics import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    ExponentCounts,
    Subject,
    TensorStatistics,
    UnitStatistics,
)

_SOURCES = ("fused.c", "block.h", "vectors.h", "samples.h")  # as in hatch_build.py
_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")  # as in hatch_build.py
_LEVELS = {"AVX512": ("avx512", "avx2", "base"), "AVX2": ("avx2", "base")}

_JOB = struct.Struct("=11q")
_RESULT = struct.Struct("=7q4d4q")
_RESULT_WORDS = 16
_NANS, _ZERO_COUNT, _MIN, _MAX = 2, 5, 9, 10  # the words of a result that have it
_ROWS = 2 * (HIGHEST_EXPONENT - LOWEST_EXPONENT + 1)
_PAGE_WORDS = 1 << 16
_PLACE_BITS = 40  # of a place, for the word in its page; the rest is the number of the page

# What the kernel remarks on a tensor, from bit 48 of what it returns.
_REMARKS_FROM_BIT = 48
_WORDS = (1 << _REMARKS_FROM_BIT) - 1
OUT_OF_RANGE = 1
"""Moments left the range of float64; another kernel has to find them."""
NOT_ALL_FINITE = 2
EQUAL_SAMPLES = 4


class Job:
    """How the kernel reads tensors of one kind; threads may share it.

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

    __slots__ = ("_dimensions", "_memory", "address", "is_shared", "packed", "room")

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
        samples: int,
    ) -> None:
        self._dimensions = np.array([*sizes, *strides], dtype=np.int64)
        where = self._dimensions.ctypes.data
        counts = (units, run, cells, one_in, part, samples)
        self.packed = _JOB.pack(0, dtype, elements, len(sizes), where, *counts)
        self._memory = ctypes.create_string_buffer(self.packed, _JOB.size)
        self.address = ctypes.addressof(self._memory)
        self.is_shared = elements >= 2 * part  # by threads, as count_threads of fused.c
        self.room = _RESULT_WORDS + _whole(units, 8) * 2 + _whole(units, 64) // 8 + _ROWS


def _whole(count: int, of: int) -> int:
    return -(-count // of) * of


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

    def read_out(
        self, start: int, observations: int | None
    ) -> tuple[ExponentCounts, UnitStatistics | None]:
        """Return the histogram of the result at `start`, and its units."""
        lowest, rows, count = _RESULT.unpack_from(self.memory, 8 * start)[-3:]
        at, units = start + _RESULT_WORDS, None
        if observations is not None:
            low, high = self.reals[at:], self.reals[at + _whole(count, 8) :]
            at += 2 * _whole(count, 8)
            alive = self.bytes[8 * at : 8 * at + count]
            at += _whole(count, 64) // 8
            units = UnitStatistics(alive, low[:count], high[:count], observations)
        return ExponentCounts(lowest, self.pairs[at // 2 : at // 2 + rows]), units


class Results:
    """What the kernel finds in tensors: kept as it wrote it, and read out when asked for.

    Not for two threads at once.

    Args:
        words: of 8 bytes, in the first page of memory.
        threads: how many read a large tensor; ``None`` for as many as torch uses, which alone
            leaves torch's pool of threads as it is. The results are the same to the last bit.
    """

    def __init__(self, words: int = _PAGE_WORDS, threads: int | None = None) -> None:
        self._page = _Page(words, 0)
        self._pages = [self._page]
        self._library = library()
        self._reduce_one = self._library.modelhealth_reduce_one
        self._threads = threads

    def reduce(self, job: Job, address: int) -> tuple[int, int]:
        """Reduce the tensor whose first element is at `address`.

        Returns:
            The place of the result, and what is to be known at once: `OUT_OF_RANGE`,
            `NOT_ALL_FINITE` and `EQUAL_SAMPLES`, those that are true added up.
        """
        page = self._page
        if page.used + job.room > page.words:
            page = self._new_page(job.room)
        used = page.used
        threads = self._thread_count() if job.is_shared else 1
        done = self._reduce_one(job.address, address, page.address + 8 * used, threads)
        page.used = used + (done & _WORDS)
        return page.first_place + used, done >> _REMARKS_FROM_BIT

    def reduce_many(
        self, jobs: Sequence[Job], addresses: Sequence[int]
    ) -> tuple[list[int], tuple[list[int], list[int], list[float]]]:
        """Reduce tensors in one call.

        Returns:
            The remarks on each, as `reduce` has them; and the places of the results, the numbers
            of zeros, and the largest magnitudes of finite values, NaN where there is none.
        """
        page, room = self._page, sum([job.room for job in jobs])
        if page.used + room > page.words:
            page = self._new_page(room)
        packed = np.frombuffer(bytearray().join([job.packed for job in jobs]), dtype=np.int64)
        packed.reshape(len(jobs), -1)[:, 0] = addresses
        places = np.empty(len(jobs), dtype=np.int64)
        where = page.address + 8 * page.used
        words = self._library.modelhealth_reduce(
            packed.ctypes.data, len(jobs), where, places.ctypes.data, self._thread_count()
        )
        starts = page.used + (places & _WORDS)
        zeros = page.integers[starts + _ZERO_COUNT].tolist()
        largest = np.maximum(-page.reals[starts + _MIN], page.reals[starts + _MAX]).tolist()
        page.used += words
        remarks = (places >> _REMARKS_FROM_BIT).tolist()
        return remarks, ((page.first_place + starts).tolist(), zeros, largest)

    def _thread_count(self) -> int:
        return 1 if _is_forked(os.getpid()) else self._threads or torch.get_num_threads()

    def _new_page(self, room: int) -> _Page:
        self._page = _Page(max(room, _PAGE_WORDS), len(self._pages) << _PLACE_BITS)
        self._pages.append(self._page)
        return self._page

    def zero_count(self, place: int) -> int:
        """Return how many zeros the tensor holds whose result is at `place`."""
        page = self._pages[place >> _PLACE_BITS]
        return int(page.integers[(place & (1 << _PLACE_BITS) - 1) + _ZERO_COUNT])

    def reach(self, place: int) -> tuple[float, int]:
        """Return the finite value of the largest magnitude of the result at `place`.

        Besides, how many of its values are NaN or positive infinity.
        """
        page = self._pages[place >> _PLACE_BITS]
        found = _RESULT.unpack_from(page.memory, 8 * (place & (1 << _PLACE_BITS) - 1))
        low, high = found[_MIN], found[_MAX]
        return high if high >= -low else low, found[_NANS] + found[_NANS + 1]

    def statistics(
        self, subject: Subject, place: int, first_nonfinite: tuple[int, ...] | None = None
    ) -> TensorStatistics:
        """Return the statistics of the tensor whose result is at `place`."""
        page = self._pages[place >> _PLACE_BITS]
        start = place & (1 << _PLACE_BITS) - 1
        made = _ReadOutLater.__new__(_ReadOutLater)
        (
            _,
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
            *_,
        ) = _RESULT.unpack_from(page.memory, 8 * start)
        made.count = subject.count
        made.shape = subject.shape
        made.dtype = subject.dtype
        made.device = subject.device
        made.histogram_sampled = bool(is_sampled)
        made.first_nonfinite = first_nonfinite
        if subject.observations is None:
            made.units = None
        made._page, made._start, made._observations = page, start, subject.observations
        return made


class _ReadOutLater(TensorStatistics):
    """Statistics whose exponents and units are read out when somebody asks for them.

    Most are asked for neither, and making both takes three times as long as all the rest. A copy
    and a pickle have them.
    """

    __slots__ = ("_observations", "_page", "_start")

    _observations: int | None
    _page: _Page
    _start: int

    def __getattr__(self, name: str) -> Any:
        """Fill the two, which alone are not set from the start."""
        if name not in ("exponents", "units"):
            raise AttributeError(name)
        self.exponents, self.units = self._page.read_out(self._start, self._observations)
        return getattr(self, name)

    def __reduce__(self) -> tuple[type[TensorStatistics], tuple[Any, ...]]:
        return TensorStatistics, tuple(getattr(self, field.name) for field in fields(self))


@cache
def _is_forked(process: int) -> bool:
    """Whether this process was forked: torch's threads stayed with the parent then.

    An OpenMP runtime that had threads before a fork waits for them forever in the child. Without a
    ``/proc`` the kernel has no threads to share work with.
    """
    try:
        after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2]
    except OSError:
        return False
    return bool(int(after_name.split()[6]) & _FORKED_NOT_EXECUTED)


_FORKED_NOT_EXECUTED = 0x40  # PF_FORKNOEXEC of Linux


@cache
def library() -> Any:
    """Return the compiled library for this CPU, or ``None`` where there is none.

    torch is asked for the CPU's level, so ``ATEN_CPU_CAPABILITY`` counts here as well.
    """
    for level in _LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("base",)):
        path = Path(__file__).with_name(f"{level}{_SUFFIX}")
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
