"""Finds rows and columns of a parameter that are zero and get no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_modelhealth.report import ZeroSlices
from pytest_modelhealth.statistics import Entry, unseen

_MATRIX = 2
_FEWEST = 4
"""Of fewer slices nothing is said."""


def zero_slices(parameter: Tensor, weights: Entry, gradients: Entry) -> ZeroSlices | None:
    """Return the rows and columns of `parameter` that hold nothing but zeros, as their gradients.

    Args:
        parameter: it has a gradient; of a kernel, rows are filters and columns its channels.
        weights, gradients: what was found in it and its gradient: nothing is looked at where these
            count too few zeros for four slices, where all of one is zero, or on another device,
            which a look would wait for.
    """
    gradient = parameter.grad
    if gradient is None or gradient.ndim < _MATRIX or not gradient.is_cpu or not parameter.is_cpu:
        return None
    count, least = gradient.numel(), _fewest_zeros(gradient)
    if not least or not _is_within(gradients.zero_count, least, count):
        return None
    if not _is_within(weights.zero_count, least, count) or not _are_alike(parameter, gradient):
        return None
    with unseen():
        zero = (parameter == 0).logical_and_(gradient == 0)
        found = ZeroSlices(_whole(zero), _whole(zero.transpose(0, 1)))
    return found if found.rows or found.columns else None


def _fewest_zeros(gradient: Tensor) -> int:
    """Return how many zeros there are at least where four rows or columns hold nothing else."""
    sizes = [size for size in gradient.shape[:_MATRIX] if size > _FEWEST]
    return _FEWEST * gradient.numel() // max(sizes) if sizes else 0


def _is_within(zeros: int | None, least: int, count: int) -> bool:
    return zeros is not None and least <= zeros < count


def _are_alike(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether both lie in memory as plain tensors of one shape."""
    plain = (torch.Tensor, torch.nn.Parameter)
    is_plain = type(parameter) in plain and type(gradient) in plain
    is_strided = parameter.layout is gradient.layout is torch.strided
    return is_plain and is_strided and parameter.shape == gradient.shape


def _whole(zero: Tensor) -> frozenset[int]:
    """Return the indices along dimension 0 at which everything is true."""
    return frozenset(zero.flatten(1).all(1).nonzero().flatten().tolist())
