"""Both kernels: against values counted one by one, and against NumPy on larger tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_modelhealth.statistics import DEAD_RATIO, Ledger, TensorStatistics, ledger, queued
from pytest_modelhealth.statistics.dense import KERNEL_DTYPES
from tests.statistics import oracle
from tests.statistics.tensors import FLOATS, INTEGERS, arranged, tensors


def added(tensor: Tensor, dim: int | None) -> TensorStatistics:
    """Read a tensor as an inspection does: with the compiled kernel, where there is one."""
    return Ledger().add(tensor, dim).statistics


def not_compiled(tensor: Tensor, dim: int | None) -> TensorStatistics:
    """Read a tensor as where the kernel was not compiled."""
    with patch.object(ledger, "library", lambda: None):
        return Ledger().add(tensor, dim).statistics


def from_device(tensor: Tensor, dim: int | None) -> TensorStatistics:
    """Read a tensor as one of another device, in pieces of a few elements."""
    with patch.object(queued, "CHUNK_ELEMENTS", 7 if tensor.numel() < 1000 else 5000):
        return Ledger(queue_all=True).add(tensor, dim).statistics


WAYS = (added, not_compiled, from_device)
Way = Callable[[Tensor, int | None], TensorStatistics]
every_way = pytest.mark.parametrize("way", WAYS)


def test_every_dtype_that_kernels_promise_is_drawn() -> None:
    """The strategies cover exactly the dtypes that a kernel has to read."""
    assert {*FLOATS, *INTEGERS} == KERNEL_DTYPES


@every_way
@given(tensor=tensors(), data=st.data())
def test_statistics_are_what_counting_one_by_one_finds(
    way: Way, tensor: Tensor, data: st.DataObject
) -> None:
    """Counts, extremes, bins and units are exact, moments right, for any dtype and stride."""
    dim = data.draw(st.sampled_from([None, *range(-tensor.ndim, tensor.ndim)]))
    found = way(tensor, dim)
    values = oracle.real_values(tensor)
    oracle.assert_describes(found, values)
    assert found.shape == tuple(tensor.shape)
    assert f"torch.{found.dtype}" == str(tensor.dtype)
    if dim is None or not values:
        assert found.units is None
        return
    assert found.units is not None
    assert found.units.minimum.dtype == found.units.maximum.dtype == np.float64
    assert found.units.observations == math.prod(tensor.shape[: dim % tensor.ndim])
    limit = DEAD_RATIO * found.abs_max
    for index, unit in enumerate(map(oracle.real_values, tensor.unbind(dim))):
        ill = any(map(math.isnan, unit))
        assert oracle.same(found.units.minimum[index], math.nan if ill else min(unit))
        assert oracle.same(found.units.maximum[index], math.nan if ill else max(unit))
        assert found.units.alive[index] != all(abs(value) <= limit for value in unit)


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int16])
def test_long_tensors_agree_with_numpy(way: Way, dtype: torch.dtype) -> None:
    """Over several chunks, strided, the numbers are those of float64 NumPy."""
    generator = torch.Generator().manual_seed(0)
    tensor = (torch.randn(200, 400, generator=generator) * 3 + 100).to(dtype)[:, ::2].t()
    found = way(tensor, 0)
    oracle.assert_agrees(found, tensor, 0, sampled=found.histogram_sampled)


@every_way
@pytest.mark.parametrize("value", [1e200, 1e-200, 5e-324, -1.7e308])
def test_squares_beyond_float64_spoil_no_moments(way: Way, value: float) -> None:
    """A float64 whose square would overflow or vanish still has its moments."""
    values = torch.tensor([value, 0.0, value / 2], dtype=torch.float64)
    oracle.assert_describes(way(values, None), values.tolist())


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
    """The torch kernel reads any stride in pieces no longer than a chunk, dense memory in place."""
    pieces = list(queued.chunks(tensor, 64))
    assert max(piece.numel() for piece in pieces) <= 64
    assert len(pieces) < tensor.numel() / 16
    assert torch.equal(torch.cat(pieces).sort().values, tensor.flatten().sort().values)
    if tensor is ARRANGED[0].values[0] or tensor is ARRANGED[-1].values[0]:  # dense in memory
        storage = tensor.untyped_storage().data_ptr()
        assert {piece.untyped_storage().data_ptr() for piece in pieces} == {storage}


def test_integers_are_read_by_the_compiled_kernel() -> None:
    """A counter, a mask or token ids cost no more than a few floats."""
    with patch.object(queued, "queue", side_effect=AssertionError("the slow way")):
        for dtype in INTEGERS:
            values = torch.arange(-3, 100).to(dtype)
            oracle.assert_agrees(added(values, 0), values, 0)
