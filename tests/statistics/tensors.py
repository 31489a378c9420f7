"""Hypothesis strategies: tensors of every plain dtype, stride and awkward content."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

AWKWARD = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan]
FLOATS = {
    torch.float64: ("float64", [5e-324, -5e-324, 2.0**-1022, 1.7976931348623157e308, -1e200]),
    torch.float32: ("float32", [2.0**-149, -(2.0**-127), 2.0**-126, 3.4028234663852886e38]),
    torch.bfloat16: ("float32", [2.0**-133, -(2.0**-127), 3.3895313892515355e38]),
    torch.float16: ("float16", [2.0**-24, -(2.0**-15), 65504.0]),
}
INTEGERS = {
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
ARRANGEMENTS = ("as it is", "transposed", "every other", "expanded", "channels last", "negated")
SHAPES = (
    hnp.array_shapes(max_dims=4, max_side=5)
    | hnp.array_shapes(max_dims=2, min_side=3, max_side=12)
    | st.sampled_from([(), (0,), (3, 0, 2)])
)


@st.composite
def tensors(draw: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Draw a tensor of up to four dimensions, perhaps empty, of `dtype` or any plain one."""
    dtype = dtype or draw(st.sampled_from([*FLOATS]) | st.sampled_from([*INTEGERS]))
    shape = draw(SHAPES)
    if dtype in FLOATS:
        name, extremes = FLOATS[dtype]
        width = {"float64": 64, "float32": 32, "float16": 16}[name]
        elements = st.sampled_from([*AWKWARD, *extremes]) | st.floats(width=width)
        array = draw(hnp.arrays(name, shape, elements=elements, fill=st.nothing()))
    else:
        array = draw(hnp.arrays(INTEGERS[dtype], shape))
    tensor = torch.from_numpy(array).to(dtype)
    return arranged(tensor, draw(st.sampled_from(ARRANGEMENTS)))


def arranged(tensor: Tensor, arrangement: str) -> Tensor:
    """Return a view or copy of `tensor` that lies differently in memory."""
    if arrangement == "transposed":
        return tensor.permute(list(reversed(range(tensor.ndim))))
    if arrangement == "every other":
        return tensor[(slice(None, None, 2),) * tensor.ndim]
    if arrangement == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if arrangement == "channels last" and tensor.ndim == 4:
        return tensor.to(memory_format=torch.channels_last)
    if arrangement == "negated" and tensor.is_floating_point():
        return torch._neg_view(tensor)
    return tensor
