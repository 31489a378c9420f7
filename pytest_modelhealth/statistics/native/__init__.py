"""The compiled part: loads ``fused.c`` as built for this CPU and calls it through ctypes.

``hatch_build.py`` compiles it when the package is built. The GIL is released during a call.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pytest_modelhealth.statistics.exponents import HIGHEST_EXPONENT, LOWEST_EXPONENT

_ROWS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
_LEVELS = {"AVX512": ("avx512", "avx2", "base"), "AVX2": ("avx2", "base")}


class Layout(NamedTuple):
    """Where elements lie, in the order in which they are read.

    Args:
        dtype: 0 to 3 for float32, float64, bfloat16, float16.
        elements: how many there are.
        sizes, strides: int64, in elements, widest stride first; ``None`` where memory is dense.
        units: number of units; 0 where their extremes are not wanted.
        cells: number of places where extremes are gathered, one or several a unit.
        run: how many elements of one cell follow each other.
    """

    dtype: int
    elements: int
    sizes: npt.NDArray[np.int64] | None
    strides: npt.NDArray[np.int64] | None
    units: int = 0
    cells: int = 1
    run: int = 1


class Found(NamedTuple):
    """What came back; from `finite` on it is ``Summary`` of ``fused.c``.

    Args:
        rows: int64, shape ``(exponents, 2)``, without empty first and last rows.
        extremes: float64, shape ``(2, units)``: least and greatest value of each unit.
        finite, nans, positive_infs, negative_infs, zeros: counts.
        mean, deviations: of the finite values, and the sum of their squared deviations from it.
        low, high: extremes; infinite for no finite value.
        sampled: how many finite values are in `rows`, or would be if they were not zero.
        lowest, highest: the exponents of the first and last row; `highest` is less for no row.
    """

    rows: npt.NDArray[np.int64]
    extremes: npt.NDArray[np.float64] | None
    finite: float
    nans: float
    positive_infs: float
    negative_infs: float
    zeros: float
    mean: float
    deviations: float
    low: float
    high: float
    sampled: float
    lowest: float
    highest: float


class _Scratch(threading.local):
    """Memory that a call writes to, one for each thread: finding an address takes a microsecond."""

    def __init__(self) -> None:
        self.summary = np.empty(len(Found._fields) - 2)
        self.rows = np.empty((_ROWS, 2), dtype=np.int64)
        self.addresses = self.summary.ctypes.data, self.rows.ctypes.data
        self._cells = np.empty(0)
        self._cells_address = 0

    def cells(self, count: int) -> int:
        """Return the address, a multiple of 64, of room for the extremes of `count` cells."""
        needed = 2 * count + 64  # twice, the high ones' alignment and this one's
        if len(self._cells) < needed:
            self._cells = np.empty(needed)
            self._cells_address = int(-(-self._cells.ctypes.data // 64) * 64)
        return self._cells_address


_scratch = _Scratch()


def reduce(address: int, layout: Layout, one_in: int) -> Found:
    """Return what the compiled kernel finds in a tensor.

    Args:
        address: where the tensor's first element is in memory.
        layout: where its elements are from there.
        one_in: how many values there are for each that enters the rows; 1 for all.
    """
    dtype, elements, sizes, strides, units, cells, run = layout
    extremes, low, high, room = None, None, None, None
    if units:
        extremes = np.empty((2, units))
        low = extremes.ctypes.data
        high = low + 8 * units
        room = _scratch.cells(cells)
    library().modelhealth_reduce(
        address,
        dtype,
        elements,
        0 if sizes is None else len(sizes),
        None if sizes is None else sizes.ctypes.data,
        None if strides is None else strides.ctypes.data,
        units,
        run,
        cells,
        one_in,
        *_scratch.addresses,
        room,
        low,
        high,
    )
    summary = _scratch.summary.tolist()
    first, last = (int(exponent) - LOWEST_EXPONENT for exponent in summary[-2:])
    return Found(_scratch.rows[first : last + 1].copy(), extremes, *summary)


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
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.modelhealth_reduce.restype = None
    loaded.modelhealth_reduce.argtypes = [
        *(pointer, ctypes.c_int, number, number, pointer, pointer),
        *(number, number, number, number, pointer, pointer, pointer, pointer, pointer),
    ]
    return loaded


def _checksum() -> str:
    """Return the checksum of the sources, as ``hatch_build.py`` compiles it in."""
    here = Path(__file__).parent
    text = b"".join((here / name).read_bytes() for name in ("fused.c", "block.h"))
    return hashlib.sha256(text).hexdigest()[:16]
