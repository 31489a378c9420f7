"""What is taken of tensors beside statistics: over samples, over slices, by whoever asks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pytest_modelhealth.report import ZeroSlices
from pytest_modelhealth.statistics import Entry, Ledger, UnsupportedTensorError, unseen


class Visitor(Protocol):
    """Sees every tensor of a run, in the order in which they appear."""

    def see(self, layer: str, role: str, tensor: str, value: Tensor) -> None:
        """See one tensor of a layer, which is the model's own: to be read now, never changed.

        `role` is ``inputs``, ``activations``, ``buffers``, ``gradients`` or
        ``parameter_gradients``, which are still without a loss scale; `tensor` is the own name of
        a buffer or parameter.
        """

    def see_output(self, output: Any) -> None:
        """See what the model returned."""

    def forget(self) -> None:
        """Take no tensor for one seen before: compiled code writes without a new version."""


class Deviation(NamedTuple):
    """What the samples of one output deviate by, and all its numbers."""

    between: Entry  # the mean variance along the dimension of the samples
    whole: Entry  # of the output

    @property
    def ratio(self) -> float:
        """The one standard deviation over the other; NaN where all numbers are equal."""
        between, whole = self.between.statistics.mean_of_all, self.whole.statistics
        is_known = whole.std > 0.0 and not whole.nonfinite_count
        return math.sqrt(between) / whole.std if is_known else math.nan


def sample_deviations(
    tensors: Sequence[Tensor], entries: Sequence[Entry | None], samples: int, ledger: Ledger
) -> Iterator[Deviation]:
    """Yield how far the samples of each output deviate; on another device the figure stays there.

    Outputs without floating-point numbers, without `samples` in dimension 0 or with a single value
    a sample are left out.
    """
    for tensor, whole in zip(tensors, entries, strict=True):
        is_wanted = type(tensor) is Tensor and tensor.dtype in _FLOATING
        if whole is None or samples < 2 or not (is_wanted and _has_samples(tensor, samples)):
            continue
        if tensor.numel() < 2 * samples or tensor.is_meta or not _is_strided(tensor):
            continue
        with unseen():
            # at evenly spread places, where there are many, some neighbours; the spacing is odd, so
            # that it does not fall in step with rows of an even length
            values, step = tensor.detach(), tensor.numel() // samples // _MOST * _NEIGHBOURS | 1
            if step > 2 * _NEIGHBOURS and values.is_contiguous():
                values = values.view(samples, -1).unfold(1, _NEIGHBOURS, step)
            # torch's `var` takes five times as long; of equal samples this is exactly zero
            apart = values.to(torch.promote_types(values.dtype, torch.float32)) - values[:1]
            between = apart.sub_(apart.mean(dim=0)).square_().mean()
        try:
            yield Deviation(ledger.add(between), whole)
        except UnsupportedTensorError:
            continue


_MOST, _NEIGHBOURS = 1 << 15, 16
"""Values of a sample, of which the variance between samples is taken: its mean is known to 1 %."""


_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def equal_samples(
    tensors: Sequence[Tensor], samples: int, known: Sequence[Entry | None]
) -> bool | None:
    """Return whether in each tensor with a batch dimension all samples have equal values.

    A tensor has one if its dimension 0 is as large as the batch, `samples`. ``None`` where there
    are fewer than two samples, no such tensor, or one that cannot be read at once: on another
    device a look would wait for it.
    """
    if samples < 2:
        return None
    if len(known) == 1 and known[0] is not None and known[0].samples_equal is not None:
        return known[0].samples_equal  # most layers give one tensor
    equal = None
    for tensor, entry in zip(tensors, known, strict=True):
        settled = None if entry is None else entry.samples_equal
        if settled is None:
            if not _has_samples(tensor, samples):
                continue
            if (entry is not None and entry.waits) or not (tensor.is_cpu and _is_strided(tensor)):
                return None
            if not tensor.numel() or not torch._C._data_address(tensor):  # type: ignore[attr-defined]  # FSDP frees it
                return None
            with torch.no_grad():  # the first two nearly always differ
                settled = torch.equal(tensor[0], tensor[1]) and torch.equal(tensor[1:], tensor[:-1])
        if not settled:
            return False
        equal = True
    return equal


def _has_samples(tensor: Tensor, samples: int) -> bool:
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return not tensor.is_nested and tensor.ndim > 0 and tensor.shape[0] == samples


def _is_strided(tensor: Tensor) -> bool:
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.layout is torch.strided and not is_wrapped


_FEWEST = 4
"""Of fewer slices nothing is said."""


def zero_slices(
    parameter: Tensor, weights: Entry | None, gradients: Entry | None
) -> ZeroSlices | None:
    """Return the rows and columns of `parameter` that hold nothing but zeros, as their gradients.

    Args:
        parameter: it has a gradient; of a kernel, rows are filters and columns its channels.
        weights, gradients: what was found in it and its gradient: nothing is looked at where these
            count too few zeros for four slices, where all of one is zero, or on another device,
            which a look would wait for.
    """
    gradient, plain = parameter.grad, (Tensor, torch.nn.Parameter)
    if gradient is None or weights is None or gradients is None or gradient.ndim < 2:
        return None
    for tensor in (parameter, gradient):  # both lie in memory as plain tensors of one shape
        is_plain = type(tensor) in plain and tensor.layout is torch.strided and tensor.is_cpu
        if not is_plain or tensor.shape != parameter.shape:
            return None
    sizes = [size for size in gradient.shape[:2] if size > _FEWEST]
    count = gradient.numel()
    # so many zeros there are where four rows or columns hold nothing else
    least = _FEWEST * count // max(sizes) if sizes else 0
    if not least or not all(least <= (e.zero_count or 0) < count for e in (gradients, weights)):
        return None
    with unseen():
        zero = (parameter == 0).logical_and_(gradient == 0)
        rows, columns = (
            frozenset(along.flatten(1).all(1).nonzero().flatten().tolist())
            for along in (zero, zero.transpose(0, 1))
        )
    return ZeroSlices(rows, columns) if rows or columns else None
