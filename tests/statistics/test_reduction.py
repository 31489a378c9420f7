"""`reduce`: right numbers wherever it is called, and a tensor that never notices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_modelhealth.statistics import reduce
from tests.statistics import oracle

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
