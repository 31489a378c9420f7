"""Dtypes and layouts: whatever holds the numbers, the statistics are those of the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corpus.tensors import LAYOUTS, REAL, UNREADABLE, X, make
from pytest_modelhealth.statistics import UnsupportedTensorError, reduce
from pytest_modelhealth.statistics.dense import dense_values, is_quantised, step
from tests.statistics import oracle


@pytest.mark.parametrize(("build", "values"), LAYOUTS.values(), ids=LAYOUTS)
def test_statistics_do_not_depend_on_dtype_and_layout(
    build: Callable[[], Tensor], values: list[float]
) -> None:
    """The numbers are read from every layout, the zeros that a sparse one leaves out included."""
    oracle.assert_describes(reduce(make(build)), values)


@pytest.mark.parametrize(
    "dtype",
    [
        getattr(torch, name)
        for name in dir(torch)
        if name.startswith("float8") and isinstance(getattr(torch, name), torch.dtype)
    ],
)
def test_all_bit_patterns_of_eight_bit_floats_are_read(dtype: torch.dtype) -> None:
    """Each of the 256 bit patterns counts as the value that torch gives it in float64."""
    patterns = torch.arange(256).to(torch.uint8).view(dtype)
    oracle.assert_describes(reduce(patterns), patterns.to(torch.float64).tolist())


@pytest.mark.parametrize(("build", "reason"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_tensor_without_readable_values_is_refused_with_the_reason(
    build: Callable[[], Tensor], reason: str
) -> None:
    """Nothing but `UnsupportedTensorError` comes out, and it says why."""
    tensor = make(build)
    with pytest.raises(UnsupportedTensorError, match=reason):
        reduce(tensor)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "vmap": lambda f: torch.func.vmap(f)(X),
    "grad": lambda f: torch.func.grad(f)(X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "functionalize": lambda f: torch.func.functionalize(f)(X),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_tensors_inside_function_transforms_are_refused(transform: Callable[..., object]) -> None:
    """Inside `torch.func` transforms a tensor stands for others, and is refused as such."""
    reasons = []

    def function(tensor: Tensor) -> Tensor:
        with pytest.raises(UnsupportedTensorError) as caught:
            reduce(tensor)
        reasons.append(str(caught.value))
        return tensor.sum()

    transform(function)
    assert reasons == ["inside a torch.func transform a tensor's values are not open"]


class Named(Tensor):
    """A tensor subclass whose functions all raise."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("statistics are nobody's business")


def test_a_subclass_with_the_values_of_a_tensor_is_read_without_asking_it() -> None:
    """`__torch_function__` of a subclass is not called."""
    oracle.assert_describes(reduce(X.as_subclass(Named)), REAL)


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """A process group with this process alone."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed
    distributed.destroy_process_group()


def test_a_dtensor_is_read_as_its_local_shard(one_rank: Any) -> None:
    """The shard makes the numbers; pending partial sums are refused."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = one_rank.device_mesh.init_device_mesh("cpu", (1,))
    oracle.assert_describes(reduce(DTensor.from_local(X, mesh, [Shard(0)])), REAL)
    with pytest.raises(UnsupportedTensorError, match="partial sums are no values"):
        reduce(DTensor.from_local(X, mesh, [Partial()]))


# ---- the steps of quantised tensors --------------------------------------------------------------


def neighbours(values: torch.Tensor) -> float:
    """Return the least distance between two different values."""
    return float(values.unique().double().diff().min())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_the_step_is_the_distance_of_neighbouring_values() -> None:
    """Of many values each level is taken, so that neighbours are a step apart; others have none."""
    for plain in (torch.randn(3), nn.Parameter(torch.randn(3)), torch.arange(3)):
        assert (step(plain), is_quantised(plain)) == (None, False)
    torch.manual_seed(0)
    tensor = torch.quantize_per_tensor(torch.randn(4000), 0.03, 7, torch.quint8)
    assert step(tensor).item() == pytest.approx(neighbours(tensor.dequantize()), rel=1e-4)
    scales = torch.tensor([0.01, 0.2, 0.05])
    points = torch.zeros(3, dtype=torch.long)
    rows = torch.quantize_per_channel(torch.randn(3, 9000), scales, points, 0, torch.qint8)
    found = step(rows).expand(3, 1).flatten()
    truth = [neighbours(row) for row in rows.dequantize()]
    assert found.tolist() == pytest.approx(truth, rel=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_of_torchao_are_read_with_their_steps(kind: str) -> None:
    """What is read is within half a step of the weight, and a half is needed."""
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 32)
    before = layer.weight.detach().clone()
    quantization.quantize_(layer, getattr(quantization, kind)())
    assert is_quantised(layer.weight)
    error = (dense_values(layer.weight).values - before).abs().double()
    by_step = error / step(layer.weight)
    assert 0.4 < float(by_step.max()) < 0.51
