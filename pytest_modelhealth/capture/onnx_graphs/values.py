"""Values of ONNX as tensors of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BY_BITS = {
    name: (bits, getattr(torch, name))
    for name, bits in (("bfloat16", "int16"), ("float8_e4m3fn", "int8"), ("float8_e5m2", "int8"))
}
"""Dtypes that NumPy has from another library, and those it has itself of the same width."""


def tensor_of(initializer: Any, folder: Path | None) -> Tensor:
    """Return a copy of an initializer, whose values may lie in another file of a folder."""
    from onnx import numpy_helper

    return from_array(numpy_helper.to_array(initializer, base_dir=str(folder or "")))


def from_array(array: Any) -> Tensor:
    """Return a copy of an array.

    Raises:
        TypeError: torch has no such dtype.
    """
    if array.dtype.name in _BY_BITS:
        bits, dtype = _BY_BITS[array.dtype.name]
        return torch.from_numpy(array.view(bits).copy()).view(dtype)
    return torch.from_numpy(array.copy())
