"""Every kernel on the shelf, against values counted one by one."""

from __future__ import annotations

import importlib
import math
import pkgutil
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_modelhealth.statistics import kernels
from pytest_modelhealth.statistics.kernels import plain
from pytest_modelhealth.statistics.kernels.kernel import KERNEL_DTYPES
from tests.statistics import oracle
from tests.statistics.tensors import FLOATS, INTEGERS, arranged, tensors

SHELF = [
    importlib.import_module(f"{kernels.__name__}.{module.name}")
    for module in pkgutil.iter_modules(kernels.__path__)
    if module.name != "kernel"
]
every_kernel = pytest.mark.parametrize("kernel", SHELF, ids=lambda module: module.__name__)


def test_every_dtype_that_kernels_promise_is_drawn() -> None:
    """The strategies cover exactly the dtypes that a kernel has to read."""
    assert {*FLOATS, *INTEGERS} == KERNEL_DTYPES


@every_kernel
@given(tensor=tensors(), chunk=st.sampled_from([1, 2, 7, 1 << 16]))
def test_a_kernel_finds_what_counting_one_by_one_finds(
    kernel: ModuleType, tensor: Tensor, chunk: int
) -> None:
    """Counts, extremes and exponents are exact, moments right, whatever the chunks."""
    tensor = tensor.resolve_neg()
    values = oracle.real_values(tensor)
    finite = [value for value in values if math.isfinite(value)]
    with patch.object(plain, "CHUNK_ELEMENTS", chunk):
        found = kernel.summarize(tensor)
    assert found.nan_count == sum(map(math.isnan, values))
    assert found.positive_inf_count == values.count(math.inf)
    assert found.negative_inf_count == values.count(-math.inf)
    assert found.zero_count == finite.count(0.0)
    assert oracle.same(found.min, min(finite, default=math.nan))
    assert oracle.same(found.max, max(finite, default=math.nan))
    assert oracle.kept_bins(found) == oracle.bins(finite)
    assert found.moments.count == len(finite)
    mean, std = oracle.moments(finite)
    abs_max = max(map(abs, finite), default=0.0)
    assert oracle.close(found.moments.mean, mean, scale=abs_max)
    assert oracle.close(found.moments.std, std, scale=abs_max)


@every_kernel
@given(tensor=tensors(), data=st.data())
def test_unit_extremes_are_those_of_each_index(
    kernel: ModuleType, tensor: Tensor, data: st.DataObject
) -> None:
    """Each index of the unit dimension gets its own least and greatest value, NaN for a NaN."""
    tensor = tensor.resolve_neg()
    if not tensor.numel() or not tensor.ndim:
        return
    dim = data.draw(st.integers(0, tensor.ndim - 1))
    minimum, maximum = kernel.unit_extremes(tensor, dim)
    assert minimum.dtype == maximum.dtype == np.float64
    assert len(minimum) == len(maximum) == tensor.shape[dim]
    for index in range(tensor.shape[dim]):
        values = oracle.real_values(tensor.select(dim, index))
        ill = any(map(math.isnan, values))
        assert oracle.same(minimum[index], math.nan if ill else min(values))
        assert oracle.same(maximum[index], math.nan if ill else max(values))


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int16])
def test_long_tensors_agree_with_numpy(kernel: ModuleType, dtype: torch.dtype) -> None:
    """Over several chunks, strided, the moments are those of float64 NumPy."""
    generator = torch.Generator().manual_seed(0)
    tensor = (torch.randn(500, 800, generator=generator) * 3 + 100).to(dtype)[:, ::2].t()
    values = tensor.to(torch.float64).numpy()
    found = kernel.summarize(tensor)
    assert found.moments.count == values.size > 3 * plain.CHUNK_ELEMENTS - 1
    assert found.moments.mean == pytest.approx(values.mean(), rel=1e-14)
    assert found.moments.std == pytest.approx(values.std(), rel=1e-13)
    assert (found.min, found.max) == (values.min(), values.max())


ARRANGED = [
    pytest.param(torch.arange(6000).reshape(60, 100).t(), id="transposed"),
    pytest.param(torch.arange(6000).reshape(60, 100)[:, ::3], id="sliced"),
    pytest.param(torch.arange(6000).reshape(3, 4, 5, 100)[:, 1::2], id="sliced-within"),
    pytest.param(torch.arange(20).reshape(1, 20, 1).expand(30, 20, 10), id="expanded"),
    pytest.param(torch.tensor(3).expand(6000), id="expanded-scalar"),
    pytest.param(torch.arange(3).expand(2000, 3), id="many-short-rows"),
    pytest.param(torch.arange(6000).as_strided((70, 80), (3, 2)), id="overlapping"),
    pytest.param(arranged(torch.arange(6000).reshape(2, 3, 10, 100), "channels last"), id="nhwc"),
]


@pytest.mark.parametrize("tensor", ARRANGED)
def test_no_strided_tensor_is_copied_whole(tensor: Tensor) -> None:
    """The plain kernel reads a tensor of any stride in pieces no longer than a chunk."""
    pieces = list(plain.chunks(tensor, 64))
    assert max(piece.numel() for piece in pieces) <= 64
    assert len(pieces) < tensor.numel() / 16
    assert torch.equal(torch.cat(pieces).sort().values, tensor.flatten().sort().values)


@pytest.mark.parametrize("tensor", [ARRANGED[0].values[0], ARRANGED[-1].values[0]])
def test_dense_memory_is_read_in_place(tensor: Tensor) -> None:
    """A permuted tensor that fills its memory is neither copied nor read in leaps."""
    storage = tensor.untyped_storage().data_ptr()
    for piece in plain.chunks(tensor, 64):
        assert piece.untyped_storage().data_ptr() == storage
        assert piece.is_contiguous()
