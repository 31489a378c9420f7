"""Tensors of every dtype, layout and way to lie in memory, and what numbers they hold."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

X = torch.tensor([[-1.5, 0.0, 2.0, 0.25], [0.0, 0.0, -8.0, 1.0], [3.0, 0.0, 0.0, 0.5]])
Z = torch.complex(X, X.flip(0))
REAL = X.flatten().tolist()
COMPLEX = REAL + X.flip(0).flatten().tolist()
CONJUGATE = REAL + [-value for value in X.flip(0).flatten().tolist()]


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

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda base: base,
    "expanded": lambda base: base[3:4].expand(5),
    "expanded rows": lambda base: base[:3].expand(4, 3),
    "expanded columns": lambda base: base[:3, None].expand(3, 4),
    "expanded without elements": lambda base: base[:0, None].expand(0, 4),
    "overlapping": lambda base: base.as_strided((4, 3), (1, 1), 2),
    "overlapping, with gaps": lambda base: base.as_strided((3, 2), (4, 8)),
    "unfolded": lambda base: base.unfold(0, 4, 2),
    "column": lambda base: base.view(6, 4)[:, 1],
    "block": lambda base: base.view(6, 4)[1:3, 1:3].t(),
    "every third": lambda base: base[1::3],
    "expanded column": lambda base: base.view(6, 4)[:, 1:2].expand(6, 3),
}


def quantized_pair() -> Tensor:
    return torch.quantize_per_tensor(torch.tensor([1.0, -2.0]), 0.1, 0, torch.qint8)


def quantized_by_float_channels() -> Tensor:
    scales = torch.tensor([0.1, 0.2])
    return torch.quantize_per_channel(torch.ones(2, 3), scales, torch.zeros(2), 0, torch.quint8)


def jagged_ranges() -> Tensor:
    parts = [torch.arange(2.0), torch.arange(3.0)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


TENSORS: dict[str, Callable[[], Tensor]] = {
    "negative bit": lambda: torch._neg_view(torch.tensor([0.0, -0.0, torch.nan, 2.0])),
    "conjugate bit": lambda: torch.tensor([1 + 2j, -0.0 - 0.0j]).conj(),
    "imaginary part": lambda: torch.tensor([1 + 2j, 3 - 4j]).imag,
    "imaginary part, conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "complex column": lambda: torch.ones(3, 2, dtype=torch.complex128)[:, 1],
    "float8": lambda: torch.ones(3).to(torch.float8_e5m2),
    "booleans, expanded": lambda: torch.ones(1, dtype=torch.bool).expand(4, 4),
    "scalar": lambda: torch.tensor(torch.nan),
    "read as another dtype": lambda: torch.ones(3).view(torch.int16),
    "quantized": quantized_pair,
    "quantized by channels, float": quantized_by_float_channels,
    "coordinates": lambda: torch.eye(3).to_sparse(),
    "coordinates, not coalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,)
    ),
    "compressed rows": lambda: torch.eye(3).to_sparse_csr(),
    "compressed columns": lambda: torch.eye(3).to_sparse_csc(),
    "blocks": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": jagged_ranges,
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "meta": lambda: torch.ones(3, device="meta"),
    "meta, expanded": lambda: torch.ones(1, device="meta").expand(3),
}


def zeros_but(*place: int) -> Tensor:
    """Return a batch of zeros in which one element is not."""
    tensor = torch.zeros(4, 100)
    tensor[place] = 1.0
    return tensor


class Writes(nn.Module):
    """Writes to its buffers by `write`, and ends as `end` says."""

    def __init__(self, write: Callable[[nn.Module], Any], **buffers: Tensor) -> None:
        super().__init__()
        self.lin, self.write, self.end = nn.Linear(3, 3), write, lambda: None
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self)
        self.end()
        return self.lin(x)


ALIKE: dict[str, Callable[[], Tensor]] = {
    "random": lambda: torch.randn(4, 5),
    "constant": lambda: torch.full((4, 5), 3.0),
    "same row": lambda: torch.randn(1, 7).repeat(4, 1),
    "expanded": lambda: torch.randn(1, 7).expand(4, 7),
    "differs at the end of the second sample": lambda: zeros_but(1, 99),
    "differs in the last sample": lambda: zeros_but(3, 99),
    "one number each": lambda: torch.ones(4),
    "zeros of both signs": lambda: torch.tensor([[0.0, -0.0], [-0.0, 0.0]] * 2),
    "zeros and ones": lambda: torch.tensor([[0.0, 1.0], [-0.0, 1.0]] * 2),
    "channels last": lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "channels last, same": lambda: (
        torch.randn(1, 3, 5, 5).repeat(4, 1, 1, 1).to(memory_format=torch.channels_last)
    ),
    "transposed": lambda: torch.randn(7, 4).t(),
    "slice": lambda: torch.randn(6, 7)[1:5],
    "bfloat16": lambda: torch.ones(4, 40, dtype=torch.bfloat16),
    "float16, zeros of both signs": lambda: torch.tensor([[0.0, 1.0], [-0.0, 1.0]] * 2).half(),
    "bfloat16, other last bit": lambda: torch.tensor([[1.0], [1.0078125]] * 2).bfloat16(),
    "float64, other last bit": lambda: torch.tensor([[1.0], [1.0 + 2**-52]] * 2).double(),
    "NaN": lambda: torch.full((4, 3), torch.nan),
    "NaN in float16": lambda: torch.full((4, 3), torch.nan).half(),
    "NaN in bfloat16": lambda: torch.full((4, 3), torch.nan).bfloat16(),
    "infinity in float16": lambda: torch.full((4, 3), torch.inf).half(),
    "ids": lambda: torch.tensor([[128, 0], [0, 128]] * 2),
    "complex": lambda: torch.ones(4, 2, dtype=torch.complex64),
}
