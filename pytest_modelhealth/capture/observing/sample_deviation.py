"""Measures how much of the deviation of an output is between samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.statistics import Entry, Ledger, UnsupportedTensorError, unseen


class Deviation(NamedTuple):
    """What the samples of one output deviate by, and all its numbers.

    Args:
        between: the mean variance along the dimension of the samples, as the mean of one number.
        whole: the output's own entry.
    """

    between: Entry
    whole: Entry

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

    Args:
        tensors: the outputs; those without floating-point numbers, without `samples` in dimension 0
            or with a single value a sample are left out.
        entries: what was found in each, ``None`` where nothing was.
        samples: the size of the batch.
        ledger: keeps the figures.
    """
    for tensor, whole in zip(tensors, entries, strict=True):
        if whole is None or not _is_wanted(tensor, samples):
            continue
        with unseen():
            between = _some(tensor.detach(), samples).var(dim=0, correction=0).mean()
        try:
            yield Deviation(ledger.add(between), whole)
        except UnsupportedTensorError:
            continue


def _some(tensor: Tensor, samples: int) -> Tensor:
    """Return the values of a sample at evenly spread places, where there are many of them.

    The spacing is odd, so that it does not fall in step with rows of an even length.
    """
    step = tensor.numel() // samples // _MOST
    if step < 2 or not tensor.is_contiguous():
        return tensor
    return tensor.view(samples, -1)[:, :: step | 1]


_MOST = 1 << 15
"""Values of a sample, of which the variance between samples is taken: its mean is known to 1 %."""


def _is_wanted(tensor: Tensor, samples: int) -> bool:
    if samples < 2 or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    if tensor.dtype not in _FLOATING or tensor.is_meta or tensor.is_nested:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.ndim > 0 and tensor.shape[0] == samples and tensor.numel() >= 2 * samples


_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
