"""Both kernels and `reduce`: against values counted one by one and NumPy, wherever it is called."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_modelhealth.statistics import (
    DEAD_RATIO,
    Ledger,
    TensorStatistics,
    ledger,
    queued,
    reduce,
)
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


# ---- wherever it is called -----------------------------------------------------------------------


X = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)) * 3 + 1000


def test_the_naive_variance_is_wrong_where_ours_is_right() -> None:
    """For N(1000, 1) in float32 the mean of squares minus the square of the mean is useless."""
    values = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) + 1000
    exact = values.double().numpy()
    naive = float(values.square().mean() - values.mean().square())
    assert abs(naive / exact.var() - 1) > 0.01
    assert reduce(values).std == pytest.approx(exact.std(), rel=1e-12)
    assert reduce(values).norm == pytest.approx(np.linalg.norm(exact), rel=1e-13)


def test_half_precision_has_moments_beyond_its_own_range() -> None:
    """The squares of these float16 values overflow float16, their norm does too."""
    values = (torch.randn(300, 400, generator=torch.Generator().manual_seed(0)) * 9000).half()
    exact = values.double().numpy()
    statistics = reduce(values)
    assert statistics.std == pytest.approx(exact.std(), rel=1e-13)
    assert statistics.norm == pytest.approx(np.linalg.norm(exact), rel=1e-13)
    assert statistics.norm > torch.finfo(torch.float16).max


class CountingDispatch(TorchDispatchMode):
    """Counts the operators that run under it."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class CountingFunctions(TorchFunctionMode):
    """Counts the torch functions that are called under it."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def switched(switch: Callable[[Any], object], inside: Any, outside: Any) -> Iterator[None]:
    """Have a global switch of torch another way inside."""
    switch(inside)
    try:
        yield
    finally:
        switch(outside)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad mode": torch.enable_grad,
    "anomaly detection": torch.autograd.detect_anomaly,
    "default dtype float64": lambda: switched(
        torch.set_default_dtype, torch.float64, torch.float32
    ),
    "default dtype float16": lambda: switched(
        torch.set_default_dtype, torch.float16, torch.float32
    ),
    "default device meta": lambda: torch.device("meta"),
    "deterministic algorithms": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "fake tensors": torch._subclasses.FakeTensorMode,
    "an operator counter": CountingDispatch,
    "a function counter": CountingFunctions,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_the_numbers_are_the_same_wherever_reduce_is_called(
    surrounding: Callable[[], AbstractContextManager[Any]], dtype: torch.dtype
) -> None:
    """No mode of torch changes a bit of the statistics."""
    tensor = X.to(dtype)
    expected = oracle.bits(reduce(tensor, 1))
    with surrounding():
        found = reduce(tensor, 1)
    assert oracle.bits(found) == expected


@pytest.mark.parametrize("mode", [CountingDispatch(), CountingFunctions()])
def test_modes_of_the_caller_see_nothing(mode: Any) -> None:
    """A profiler, a flop counter or a tracer around the model does not count our operators."""
    sparse = X.to_sparse()
    with mode:
        reduce(X, 1)
        reduce(sparse)
    assert mode.calls == 0


UNTOUCHED: dict[str, Callable[[], Tensor]] = {
    "parameter": lambda: nn.Parameter(X.clone()),
    "vector parameter": lambda: nn.Parameter(X[0].double()),
    "float64": lambda: X.double(),
    "with a graph": lambda: nn.Parameter(X.clone()) * 2,
    "view": lambda: X.clone()[::2].t(),
    "conjugate": lambda: torch.complex(X, X).conj(),
    "with NaN": lambda: X.where(X > 1000, torch.nan),
    "constant float64": lambda: torch.full((4, 4), 1e300, dtype=torch.float64),
    "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), is_coalesced=False),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("build", UNTOUCHED.values(), ids=UNTOUCHED)
def test_the_tensor_is_as_it_was(build: Callable[[], Tensor]) -> None:
    """Values, version, graph, strides, flags and memory are those from before; nothing is drawn."""
    tensor = build()
    before, values = traits(tensor), tensor.detach().clone()
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    reduce(tensor, tensor.ndim - 1)
    assert traits(tensor) == before
    assert torch.equal(tensor.to_dense().nan_to_num(), values.to_dense().nan_to_num())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()


def traits(tensor: Tensor) -> dict[str, Any]:
    """Return what a tensor is, apart from its values."""
    strided = tensor.layout is torch.strided
    return {
        "version": tensor._version,
        "grad_fn": tensor.grad_fn,
        "requires_grad": tensor.requires_grad,
        "is_conj": tensor.is_conj(),
        "hooks": copy.copy(tensor._backward_hooks),
        "attributes": dict(vars(tensor)),
        "stride": tensor.stride() if strided else None,
        "memory": tensor.untyped_storage().data_ptr() if strided else None,
        "coalesced": strided or tensor.is_coalesced(),
    }
