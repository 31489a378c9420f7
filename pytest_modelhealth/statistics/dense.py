"""Bring a tensor of any dtype and layout to real, strided values that a kernel can read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes


def is_quantised(tensor: Any) -> bool:
    """Whether the values of a tensor lie on a grid: of a quantised dtype, or of torchao's kind."""
    return tensor.is_quantized or (is_dequantisable(tensor) or _scale(tensor) is not None)


def is_dequantisable(tensor: Any) -> bool:
    """Whether the class of a tensor has a way of its own to the values that it stands for."""
    return type(tensor).dequantize is not Tensor.dequantize


def step(tensor: Any) -> Tensor | None:
    """Return the distance between two neighbouring values of a quantised tensor.

    Returns:
        One number for each element, in a shape that can be broadcast to the tensor's; of 8-bit
        floats the step at each value. ``None`` where the tensor is not quantised, or keeps its
        steps to itself.
    """
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return torch.tensor(tensor.q_scale(), dtype=torch.float64)
        shape = [1] * tensor.ndim
        shape[tensor.q_per_channel_axis()] = -1
        return tensor.q_per_channel_scales().double().reshape(shape)  # type: ignore[no-any-return]
    scale = _scale(tensor)
    if scale is None:
        return None
    spread = _spread(scale.detach().double().abs(), tensor.shape)
    stored = getattr(tensor, "qdata", None)
    if isinstance(stored, Tensor) and stored.dtype.is_floating_point:
        kind = torch.finfo(stored.dtype)
        least = spread * kind.smallest_normal
        return torch.maximum(tensor.dequantize().detach().double().abs(), least) * kind.eps
    return spread


def _scale(tensor: Any) -> Tensor | None:
    """Return the scales that a tensor class of a library keeps beside its whole numbers."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return None
    scale = getattr(tensor, "scale", None)
    return scale if isinstance(scale, Tensor) else None


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Return scales of blocks for each element; the largest for all where it cannot be told."""
    if scale.ndim == len(shape) and not any(
        size % blocks for size, blocks in zip(shape, scale.shape, strict=True)
    ):
        for dim, (size, blocks) in enumerate(zip(shape, scale.shape, strict=True)):
            if blocks not in (1, size):
                scale = scale.repeat_interleave(size // blocks, dim)
        return scale
    return scale.max()


def quantised(
    values: Tensor, scale: Tensor | float, zero_point: Tensor | int, axis: int | None = None
) -> Tensor:
    """Return integers as a quantised tensor of torch, by tensor or by the slices of one dimension.

    torch warns that it will make no such tensors some day, which is no matter of the user's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if axis is None:
            make = torch._make_per_tensor_quantized_tensor
            return make(values, float(scale), int(zero_point))
        scales, zeros = torch.as_tensor(scale).double(), torch.as_tensor(zero_point).long()
        return torch._make_per_channel_quantized_tensor(values, scales, zeros, axis)


KERNEL_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32}
    | {torch.int16, torch.int8, torch.uint8, torch.bool}
)
"""The dtypes of dense values; all others are converted to one of them before."""


class UnsupportedTensorError(TypeError):
    """These values cannot be read, for the reason given; never raised past the capture."""


class DenseValues(NamedTuple):
    """Values a kernel can read.

    Args:
        values: real, strided, of a dtype in `KERNEL_DTYPES`; shares memory with the tensor wherever
            its dtype and layout allow.
        shape: the tensor's shape; of a nested tensor, that of its rows together.
        implicit_zeros: how many zeros the layout leaves out (sparse layouts).
        keeps_dimensions: whether dimension ``d`` of the tensor is dimension ``d`` of `values`.
    """

    values: Tensor
    shape: tuple[int, ...]
    implicit_zeros: int = 0
    keeps_dimensions: bool = True

    def unit_dimension(self, unit_dim: int | None) -> int | None:
        """Return the dimension of `values` that is the tensor's `unit_dim`; ``None`` for none.

        Raises:
            IndexError: the tensor has no dimension `unit_dim`.
        """
        if unit_dim is None or not self.keeps_dimensions:
            return None
        # by the shape, because complex values have one dimension more
        return range(len(self.shape))[unit_dim]


@contextmanager
def unseen() -> Iterator[None]:
    """Let neither autograd nor the modes that see or replace torch calls see what runs inside."""
    has_modes = torch._C._len_torch_dispatch_stack()
    modes = _disable_current_modes() if has_modes else nullcontext()
    with torch._C.DisableTorchFunction(), torch.no_grad(), modes:
        yield


def dense_values(tensor: Tensor) -> DenseValues:
    """Return the values of `tensor`; of a DTensor, those of this rank's shard.

    Raises:
        UnsupportedTensorError: there are no values to read, for example those of a meta tensor, or
            torch cannot bring them to real numbers.
    """
    reason = _why_unreadable(tensor)
    if reason:
        raise UnsupportedTensorError(reason)
    try:
        return _dense_values(tensor)
    except UnsupportedTensorError:
        raise
    except (RuntimeError, TypeError, NotImplementedError) as error:
        cause = str(error).partition("\n")[0]
        raise UnsupportedTensorError(
            f"torch cannot read {tensor.dtype} values in layout {tensor.layout}: {cause}"
        ) from error


def _why_unreadable(tensor: Any) -> str:
    """Return why there are no values to read, or an empty string."""
    if is_lazy(tensor):
        return "a lazy parameter that is not initialised has no values"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "inside a torch.func transform a tensor's values are not open"
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return "a fake tensor has no values"
    if tensor.is_meta:
        return "a tensor on the meta device has no values"
    if _is_distributed(tensor):
        partial = any(placement.is_partial() for placement in tensor.placements)
        return "a DTensor's partial sums are no values until they are reduced" if partial else ""
    if _is_on_its_way(tensor) or tensor.is_nested or is_dequantisable(tensor):
        return ""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"{type(tensor).__name__} is a tensor subclass that keeps its values to itself"
    has_storage = tensor.layout is torch.strided and tensor.numel() > 0
    if has_storage and tensor.untyped_storage().nbytes() == 0:  # as FSDP does between uses
        return "the tensor's storage was freed"
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return "while a CUDA graph is captured, values cannot be read"
    return ""


def _is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


def _is_on_its_way(tensor: Any) -> bool:
    """Whether a collective that was begun will write the values."""
    home = "torch.distributed._functional_collectives"
    return type(tensor).__name__ == "AsyncCollectiveTensor" and type(tensor).__module__ == home


def _dense_values(tensor: Any) -> DenseValues:
    if tensor.is_nested:
        return _nested_values(tensor)
    shape = tuple(tensor.shape)
    if _is_distributed(tensor):
        tensor = tensor.to_local()
    if _is_on_its_way(tensor):
        tensor = tensor.trigger_wait()  # the next operation would wait all the same
    if reason := _why_unreadable(tensor):  # what a DTensor holds, say
        raise UnsupportedTensorError(reason)
    if tensor.layout in _SPARSE_LAYOUTS:
        return _sparse_values(tensor)
    if tensor.is_mkldnn:
        tensor = tensor.to_dense()
    if tensor.is_quantized or is_dequantisable(tensor):
        tensor = tensor.detach().dequantize()
    return DenseValues(_real(tensor), shape)


_SPARSE_LAYOUTS = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


def _nested_values(tensor: Tensor) -> DenseValues:
    if tensor.layout is torch.jagged and tensor.is_contiguous():
        values = tensor.values()
    else:  # the buffer may have holes that belong to no row
        rows = [row.reshape(-1) for row in tensor.unbind()]
        values = torch.cat(rows) if rows else tensor.values()
    return DenseValues(_real(values), tuple(values.shape), keeps_dimensions=False)


def _sparse_values(tensor: Tensor) -> DenseValues:
    stored = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
    # detached, because views of sparse values remember a base without strides
    values = _real(stored.values().detach())
    parts = 2 if tensor.is_complex() else 1
    zeros = parts * tensor.numel() - values.numel()
    return DenseValues(values, tuple(tensor.shape), zeros, keeps_dimensions=False)


def _real(tensor: Tensor) -> Tensor:
    """Return real values of a dtype that kernels take; complex ones gain a last dimension of 2."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        tensor = tensor.as_subclass(Tensor)
    if tensor.is_complex():
        if tensor.dtype is torch.complex32:
            tensor = tensor.to(torch.complex64)
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.dtype in KERNEL_DTYPES:
        return tensor
    # bfloat16 holds every 8-bit float, and float64 all else but uint64 beyond 2**53
    is_float8 = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.to(torch.bfloat16 if is_float8 else torch.float64)


def first_nonfinite(values: Tensor) -> tuple[int, ...]:
    """Return the index of the first NaN or infinity in row-major order; there is one.

    Args:
        values: real and strided; the caller keeps autograd and the modes that see torch calls off.
    """
    bad = torch.isfinite(values).logical_not_().reshape(-1)
    first = int(bad.to(torch.uint8).argmax())
    return tuple(int(place) for place in np.unravel_index(first, tuple(values.shape)))
