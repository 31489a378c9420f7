"""Dtypes and layouts: whatever holds the numbers, the statistics are those of the numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth.statistics import UnsupportedTensorError, reduce
from pytest_modelhealth.statistics.dense import dense_values, is_quantised, step
from tests.statistics import oracle

X = torch.tensor([[-1.5, 0.0, 2.0, 0.25], [0.0, 0.0, -8.0, 1.0], [3.0, 0.0, 0.0, 0.5]])
Z = torch.complex(X, X.flip(0))
REAL = oracle.real_values(X)
COMPLEX = REAL + oracle.real_values(X.flip(0))
CONJUGATE = REAL + [-value for value in oracle.real_values(X.flip(0))]


def quantized(dtype: torch.dtype) -> Tensor:
    """X in steps of a quarter, all of which it holds exactly."""
    return torch.quantize_per_tensor(X, 0.25, 64, dtype)


def jagged(**options: Any) -> Tensor:
    """X as one row and two rows, in the jagged layout."""
    return torch.nested.nested_tensor([X[:1], X[1:]], layout=torch.jagged, **options)


def jagged_with_holes() -> Tensor:
    """X, whose rows lie in a buffer with rows between them that belong to nobody."""
    buffer = torch.full((6, 4), math.nan)
    buffer[0], buffer[2:4] = X[0], X[1:]
    offsets, lengths = torch.tensor([0, 2, 6]), torch.tensor([1, 2])
    return torch.nested.nested_tensor_from_jagged(buffer, offsets=offsets, lengths=lengths)


def duplicated_coo() -> Tensor:
    """X in coordinate form, each value there twice by halves."""
    indices = X.nonzero().t()
    values = X[tuple(indices)] / 2
    return torch.sparse_coo_tensor(indices.repeat(1, 2), values.repeat(2), X.shape)


LAYOUTS: dict[str, tuple[Callable[[], Tensor], list[float]]] = {
    "complex32": (lambda: Z.to(torch.complex32), COMPLEX),
    "complex64": (lambda: Z, COMPLEX),
    "complex128": (lambda: Z.to(torch.complex128), COMPLEX),
    "complex conjugate": (lambda: Z.conj(), CONJUGATE),
    "complex scalar": (lambda: torch.tensor(2 - 3j), [2.0, -3.0]),
    "imaginary part of a conjugate": (lambda: Z.conj().imag, CONJUGATE[12:]),
    "negative bit": (lambda: torch._neg_view(X), [-value for value in REAL]),
    "uint16": (lambda: torch.tensor([0, 1, 65535], dtype=torch.uint16), [0.0, 1.0, 65535.0]),
    "uint32": (lambda: torch.tensor([0, 2**32 - 1], dtype=torch.uint32), [0.0, 2.0**32 - 1]),
    "uint64": (lambda: torch.tensor([0, 2**64 - 1], dtype=torch.uint64), [0.0, 2.0**64]),
    "int64": (lambda: torch.tensor([-(2**63), 2**62]), [-(2.0**63), 2.0**62]),
    "quint8": (lambda: quantized(torch.quint8), REAL),
    "qint32": (lambda: quantized(torch.qint32), REAL),
    "coo": (lambda: X.to_sparse(), REAL),
    "coo of booleans": (lambda: (X > 0).to_sparse(), [float(value > 0) for value in REAL]),
    "coo with duplicates": (duplicated_coo, REAL),
    "coo with dense rows": (lambda: X.to_sparse(1), REAL),
    "coo of nothing": (lambda: torch.sparse_coo_tensor(size=(3, 4)), [0.0] * 12),
    "coo of complex": (lambda: Z.to_sparse(), COMPLEX),
    "csr": (lambda: X.to_sparse_csr(), REAL),
    "csr of complex": (lambda: Z.to_sparse_csr(), COMPLEX),
    "csc": (lambda: X.to_sparse_csc(), REAL),
    "bsr": (lambda: X.to_sparse_bsr((3, 2)), REAL),
    "bsc": (lambda: X.to_sparse_bsc((3, 2)), REAL),
    "mkldnn": (lambda: X.to_mkldnn(), REAL),
    "mkldnn of bfloat16": (lambda: X.to_mkldnn(torch.bfloat16), REAL),
    "nested": (lambda: torch.nested.nested_tensor([X[:1], X[1:]]), REAL),
    "nested, irregular": (
        lambda: torch.nested.nested_tensor([X[0, :2], X[1, :3]]),
        [-1.5] + [0] * 3 + [-8],
    ),
    "nested, transposed": (
        lambda: torch.nested.nested_tensor([X[:1], X[1:]]).transpose(1, 2),
        REAL,
    ),
    "nested, empty": (lambda: torch.nested.nested_tensor([]), []),
    "jagged": (jagged, REAL),
    "jagged with gradients": (lambda: jagged(requires_grad=True) * 2, [2 * x for x in REAL]),
    "jagged, transposed": (lambda: jagged().transpose(1, 2), REAL),
    "jagged with holes": (jagged_with_holes, REAL),
    "scalar": (lambda: torch.tensor(5.0), [5.0]),
    "empty, transposed": (lambda: torch.empty(3, 0, 4).transpose(0, 2), []),
    "result with a graph": (lambda: nn.Parameter(X) * 2, [2 * value for value in REAL]),
}


def make(build: Callable[[], Tensor]) -> Tensor:
    """Build a tensor in peace: torch warns of every unusual layout at its first use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build()


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


def fake_tensor() -> Tensor:
    """A tensor of shapes without numbers, as compilers use it."""
    with torch._subclasses.FakeTensorMode():
        return torch.randn(3)


def freed_tensor() -> Tensor:
    """A tensor whose memory was given back, as FSDP does between uses."""
    tensor = torch.randn(3)
    tensor.untyped_storage().resize_(0)
    return tensor


class Opaque(Tensor):
    """A tensor subclass that answers no operator."""

    @staticmethod
    def __new__(cls) -> Opaque:
        return Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not for others")


UNREADABLE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta device has no values"),
    "fake": (fake_tensor, "fake tensor has no values"),
    "lazy parameter": (lambda: nn.LazyLinear(3).weight, "lazy parameter that is not initialised"),
    "lazy buffer": (lambda: nn.LazyBatchNorm1d().running_mean, "lazy parameter"),
    "masked": (lambda: torch.masked.masked_tensor(X, X > 0), "MaskedTensor is a tensor subclass"),
    "subclass": (Opaque, "Opaque is a tensor subclass that keeps its values"),
    "freed": (freed_tensor, "storage was freed"),
    "bits": (lambda: torch.ones(3, dtype=torch.uint8).view(torch.bits8), "cannot read torch.bits8"),
    "sparse float8": (
        lambda: torch.sparse_coo_tensor([[0, 0]], X[0, :2].to(torch.float8_e5m2), (3,)),
        "cannot read torch.float8_e5m2 values in layout torch.sparse_coo",
    ),
}


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
