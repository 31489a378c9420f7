"""Values of ONNX as tensors of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BY_BITS = {
    name: (bits, getattr(torch, name))
    for name, bits in (("bfloat16", "int16"), ("float8_e4m3fn", "int8"), ("float8_e5m2", "int8"))
}
"""Dtypes that NumPy has from another library, and those it has itself of the same width."""


def tensor_of(initializer: Any) -> Tensor:
    """Return a copy of an initializer."""
    from onnx import numpy_helper

    return from_array(numpy_helper.to_array(initializer))


def from_array(array: Any) -> Tensor:
    """Return a copy of an array.

    Raises:
        TypeError: torch has no such dtype.
    """
    if array.dtype.name in _BY_BITS:
        bits, dtype = _BY_BITS[array.dtype.name]
        return torch.from_numpy(array.view(bits).copy()).view(dtype)
    return torch.from_numpy(array.copy())
