"""The compiled part: makes a function of Python of ``fused.c``, as it is built for this CPU.

``hatch_build.py`` compiles it when the package is built. A large tensor is read by as many of
torch's own threads as torch uses for its operations, without the GIL. Why C, and what it costs:
docs/decisions/0005-fused-kernel.md.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelhealth.statistics.tensor_statistics import (
    ExponentCounts,
    Subject,
    TensorStatistics,
    UnitStatistics,
)

_SOURCES = ("fused.c", "block.h", "vectors.h", "samples.h")  # as in hatch_build.py
_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")  # as in hatch_build.py
_LEVELS = {"AVX512": ("avx512", "avx2", "base"), "AVX2": ("avx2", "base")}

_RESULT = struct.Struct("=7q4d4q")
_RESULT_WORDS = 16
_NANS, _ZERO_COUNT, _MIN, _MAX, _LOWEST = 2, 5, 9, 10, 12  # the words of a result that have it
_PAGE_WORDS = 1 << 16
_PLACE_BITS = 40  # of a place, for the word in its page; the rest is the number of the page

# What the kernel returns: where a result is and remarks on it, or why there is none.
REMARKS_FROM_BIT = 56
PLACE = (1 << REMARKS_FROM_BIT) - 1
NOT_ALL_FINITE = 1
COMPARED_SAMPLES = 2
EQUAL_SAMPLES = 4
NOT_READ, _NO_ROOM = -1, -2

EXACT_HISTOGRAM = 1 << 14
"""A tensor of up to this many elements has all of them in its histogram. Counting bins takes three
times as long as all the rest."""

LEAST_SAMPLED = 1 << 13
"""A larger tensor has at least this many."""

MOST_SKIPPED = 64
"""At least one value in this many is in the histogram of a large tensor."""

PART = 1 << 15
"""About as many elements are summarized by themselves, so that threads can share a tensor of two
such parts or more: as torch, which gives each thread at least 32768 elements. Another length may
give other last bits."""

_DTYPES = ("float32", "float64", "bfloat16", "float16")
_NO_UNITS = -(1 << 31)
PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_DESCRIPTION = struct.Struct("=QiiiBBHQQQ")  # DLTensor of DLPack 1
_FORMATS = {
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
}
"""The code and the bits of each dtype, as DLPack has them."""


def is_plain(*tensors: Tensor) -> bool:
    """Whether tensors are of no subclass, and none a view that is yet to be negated.

    What else the kernel does not read as it lies in memory has no description: what is on another
    device, quantised, sparse, of a functional transform, or freed by FSDP.
    """
    return PLAIN_TYPES.issuperset(map(type, tensors)) and not any(map(Tensor.is_neg, tensors))


@cache
def _torchs_description() -> int:
    """Return the address of torch's function that describes a tensor; 0 in an older torch.

    It is the fourth of DLPack's table of functions, which follows a version and an address.
    """
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if table is None:
        return 0
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(table, b"dlpack_exchange_api")
    if ctypes.c_uint32.from_address(address).value != 1:  # the major version
        return 0
    return ctypes.c_void_p.from_address(address + 5 * 8).value or 0


class _Reader(ctypes.Structure):
    """What is the same for all tensors that one thread reads, as `Reader` of ``fused.c``."""

    _fields_ = (
        ("describe", ctypes.c_void_p),
        ("page", ctypes.c_int64),
        ("words", ctypes.c_int64),
        ("used", ctypes.c_int64),
        ("first_place", ctypes.c_int64),
        ("exact", ctypes.c_int64),
        ("least_sampled", ctypes.c_int64),
        ("most_skipped", ctypes.c_int64),
        ("part", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("process", ctypes.c_int64),
        ("room", ctypes.c_int64),
    )


class _Method(ctypes.Structure):
    """A function in C as Python's `PyMethodDef` has it, which says the same in all versions."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("documentation", ctypes.c_char_p),
    )


_METH_FASTCALL = 0x80


class _Python(ctypes.Structure):
    """What the kernel calls of Python, as `modelhealth_python` of ``fused.c``."""

    _fields_ = (
        ("PyLong_AsLongLong", ctypes.c_void_p),
        ("PyLong_FromLongLong", ctypes.c_void_p),
        ("PyErr_Occurred", ctypes.c_void_p),
        ("PyEval_SaveThread", ctypes.c_void_p),
        ("PyEval_RestoreThread", ctypes.c_void_p),
    )


class _Page:
    """Memory that results are written to, one after the other."""

    def __init__(self, words: int) -> None:
        memory = np.empty(words + 8, dtype=np.int64)  # pages that nobody writes to cost nothing
        start = -memory.ctypes.data % 64 // 8
        self.integers = memory[start : start + words]
        self.reals = self.integers.view(np.float64)
        self.pairs = self.integers.reshape(-1, 2)
        self.bytes = self.integers.view(np.bool_)
        self.memory = self.bytes.data
        self.words = self.integers.data  # of Python's integers
        self.address = int(self.integers.ctypes.data)

    def exponents(self, start: int) -> ExponentCounts:
        """Return the histogram of the result at `start`."""
        lowest, rows, count = self.words[start + _LOWEST : start + _LOWEST + 3]
        at = (start + _RESULT_WORDS + _words_of_units(count)) // 2
        return ExponentCounts(lowest, self.pairs[at : at + rows])

    def units(self, start: int, observations: int) -> UnitStatistics:
        """Return the units of the result at `start`."""
        count, low = self.words[start + _LOWEST + 2], start + _RESULT_WORDS
        high = low - (-count // 8) * 8
        alive = 8 * (2 * high - low)
        reals, bytes_ = self.reals, self.bytes[alive : alive + count]
        lows, highs = reals[low : low + count], reals[high : high + count]
        return UnitStatistics(bytes_, lows, highs, observations)


def _words_of_units(count: int) -> int:
    """Return how many words the extremes of units take, and whether each is alive."""
    return -2 * (-count // 8) * 8 - (-count // 64) * 8


class Results:
    """What the kernel finds in tensors: kept as it wrote it, and read out when asked for.

    Not for two threads at once.

    Args:
        words: of 8 bytes, in the first page of memory.
        threads: how many read a large tensor; ``None`` for as many as torch uses, which alone
            leaves torch's pool of threads as it is. The results are the same to the last bit.
    """

    def __init__(self, words: int = _PAGE_WORDS, threads: int | None = None) -> None:
        self._pages: list[_Page] = []
        self._reader = reader = _Reader()
        reader.describe = _torchs_description()
        self._asks_torch = bool(reader.describe)
        reader.exact, reader.part = EXACT_HISTOGRAM, PART
        reader.least_sampled, reader.most_skipped = LEAST_SAMPLED, MOST_SKIPPED
        reader.process = process = os.getpid()
        torch.get_num_threads()  # has the runtime of this thread have as many as torch is set to
        reader.threads = 1 if _is_forked(process) else threads or 0
        self._method = library().method  # which the function leads to
        make = ctypes.pythonapi.PyCFunction_NewEx
        make.restype, make.argtypes = ctypes.py_object, [_POINTER, ctypes.py_object, _POINTER]
        self._read_one = make(ctypes.addressof(self._method), ctypes.addressof(reader), None)
        self._add_page(words)

    def read(self, tensor: Tensor, unit_dim: int | None, samples: int = 0, *less: Tensor) -> int:
        """Read a plain tensor, if the kernel can.

        Args:
            tensor: see `is_plain`.
            unit_dim: the dimension of the units; ``None`` for no units.
            samples: compare the samples of a tensor that has as many in dimension 0; 0 for none.
            less: another to subtract from it, not of halves, that lies in memory as it does.

        Returns:
            The place of its result, and from `REMARKS_FROM_BIT` on what is to be known at once:
            `NOT_ALL_FINITE`, `COMPARED_SAMPLES` and `EQUAL_SAMPLES`, those that are true added up;
            `NOT_READ` where the tensor is not read as it lies in memory.
        """
        given: Tensor | int = tensor
        if not self._asks_torch:
            described = _described(tensor)
            if described is None or less:
                return NOT_READ
            given = described.ctypes.data
        try:
            dim = _NO_UNITS if unit_dim is None else unit_dim
            done: int = self._read_one(given, dim, samples, *less)
        except Exception:  # noqa: BLE001 - torch's, of any class: it has no description
            # from here on they are described here: that torch cannot takes it a millisecond to say
            self._asks_torch, self._reader.describe = False, None
            return NOT_READ
        if done != _NO_ROOM:
            return done
        self._add_page(self._reader.room)
        return self.read(tensor, unit_dim, samples, *less)

    def read_many(self, *tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
        """Read tensors, less others or not, without units; return what `read` does, of each."""
        each = [*zip(*tensors, strict=True)]
        if self._asks_torch and is_plain(*chain.from_iterable(each)):  # as a rule
            with suppress(Exception):  # as in `read`, of which this is one without calls of Python
                read = map(self._read_one, tensors[0], repeat(_NO_UNITS), repeat(0), *tensors[1:])
                found = [
                    self.read(one[0], None, 0, *one[1:]) if done == _NO_ROOM else done
                    for done, one in zip(read, each, strict=True)
                ]
                return np.array(found, dtype=np.int64)
        found = [self.read(t, None, 0, *less) if is_plain(t) else NOT_READ for t, *less in each]
        return np.array(found, dtype=np.int64)

    def _add_page(self, room: int) -> None:
        words = max(room, _PAGE_WORDS) if self._pages else room
        reader, page = self._reader, _Page(words)
        reader.page, reader.words, reader.used = page.address, words, 0
        reader.first_place = len(self._pages) << _PLACE_BITS
        self._pages.append(page)

    def columns(self, found: npt.NDArray[np.int64]) -> tuple[list[int], list[float]]:
        """Return the numbers of zeros, and the largest magnitudes of finite values.

        Args:
            found: what `read_many` returned. The magnitude is NaN where no value is finite.
        """
        zeros = np.zeros(len(found), dtype=np.int64)
        largest = np.full(len(found), math.nan)
        numbers = np.where(found < 0, -1, (found & PLACE) >> _PLACE_BITS)
        for number in {*numbers.tolist()} - {-1}:
            page, of_page = self._pages[number], numbers == number
            starts = found[of_page] & (1 << _PLACE_BITS) - 1
            zeros[of_page] = page.integers[starts + _ZERO_COUNT]
            largest[of_page] = np.maximum(-page.reals[starts + _MIN], page.reals[starts + _MAX])
        return zeros.tolist(), largest.tolist()

    def moments(self, place: int) -> tuple[float, ...]:
        """Return counts and moments of the result at `place`, as `Entry` has them."""
        memory, start = self._pages[place >> _PLACE_BITS].memory, place & (1 << _PLACE_BITS) - 1
        return _RESULT.unpack_from(memory, 8 * start)[_NANS : _MAX + 1]

    def statistics(
        self, subject: Subject | None, place: int, first_nonfinite: tuple[int, ...] | None = None
    ) -> TensorStatistics:
        """Return the statistics of the tensor whose result is at `place`.

        A `subject` is given where the tensor was made of another, to be read.
        """
        page = self._pages[place >> _PLACE_BITS]
        start = place & (1 << _PLACE_BITS) - 1
        made = _ReadOutLater.__new__(_ReadOutLater)
        (
            _,
            form,
            made.nan_count,
            made.positive_inf_count,
            made.negative_inf_count,
            made.zero_count,
            finite_count,
            made.mean,
            made.std,
            made.min,
            made.max,
            is_sampled,
            _,
            rows,
            units,
        ) = _RESULT.unpack_from(page.memory, 8 * start)
        if subject is None:  # what the kernel knew of the tensor
            at = start + _RESULT_WORDS + (_words_of_units(units) if units else 0) + 2 * rows
            shape, dim = tuple(page.words[at : at + (form >> 8 & 0xFF)]), (form >> 16) - 1
            made.count = finite_count + made.nonfinite_count
            made.shape, made.dtype, made.device = shape, _DTYPES[form & 0xFF], "cpu"
            observations = None if dim < 0 else math.prod(shape[:dim])
        else:
            made.count, made.shape, made.dtype = subject.count, subject.shape, subject.dtype
            made.device, observations = subject.device, subject.observations
        made.histogram_sampled = bool(is_sampled)
        made.first_nonfinite = first_nonfinite
        if observations is None:
            made.units = None
        made._page, made._start, made._observations = page, start, observations
        return made


class _ReadOutLater(TensorStatistics):
    """Statistics whose exponents and units are read out when somebody asks for them.

    Most are asked for neither, and making both takes as long as all the rest. A copy and a pickle
    have them.
    """

    __slots__ = ("_observations", "_page", "_start")

    _observations: int | None
    _page: _Page
    _start: int

    def __getattr__(self, name: str) -> Any:
        """Fill one of the two, which alone are not set from the start."""
        if name == "exponents":
            self.exponents = made = self._page.exponents(self._start)
            return made
        if name != "units":
            raise AttributeError(name)
        assert self._observations is not None  # else it was set
        self.units = self._page.units(self._start, self._observations)
        return self.units

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
        loaded: Any = ctypes.CDLL(str(path))
    except OSError:
        return None
    loaded.modelhealth_source.restype = ctypes.c_char_p
    here = Path(__file__).parent
    text = b"".join((here / name).read_bytes() for name in _SOURCES)
    # as `hatch_build.py` compiles it in
    if loaded.modelhealth_source().decode() != hashlib.sha256(text).hexdigest()[:16]:
        return None
    python = _Python.in_dll(loaded, "modelhealth_python")
    for name, _ in _Python._fields_:
        setattr(python, name, _address(getattr(ctypes.pythonapi, name)))
    loaded.method = _Method(b"read", _address(loaded.modelhealth_read), _METH_FASTCALL, None)
    return loaded


_POINTER = ctypes.c_void_p


def _address(function: Any) -> int:
    return ctypes.cast(function, _POINTER).value or 0


def _described(tensor: Tensor) -> npt.NDArray[np.int64] | None:
    """Return the description of a plain tensor in memory, ``None`` where it has none."""
    if (
        tensor.dtype not in _FORMATS
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    ):
        return None
    memory = np.array([0] * 6 + [*tensor.shape, *tensor.stride()], dtype=np.int64)
    form = memory.ctypes.data + 8 * 6
    start = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    dims, format_, offset = tensor.ndim, _FORMATS[tensor.dtype], tensor.storage_offset()
    parts = (dims, *format_, 1, form, form + 8 * dims, offset * tensor.itemsize)
    memory[:6] = np.frombuffer(_DESCRIPTION.pack(start, 1, 0, *parts), dtype=np.int64)
    return memory
