"""Batches that are changed, and the places in a tensor that this should leave alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.intervening.locating import Same
from pytest_modelhealth.probes.intervening.running import Runs


def neighbours(samples: int, parity: int) -> Tensor:
    """Return which sample each is overwritten by.

    Args:
        samples: how many there are.
        parity: 0 leaves the even ones alone, 1 the odd ones.
    """
    rows = torch.arange(samples)
    return rows - rows % 2 if parity == 0 else (rows | 1).clamp(max=samples - 1)


def overwritten(runs: Runs, samples: int, dimension: int, parity: int = 0) -> Inputs:
    """Return the batch with every second sample replaced by a copy of its neighbour.

    Masks, ids and lengths stay together, and lengths in descending order stay so: it is always a
    valid batch.
    """

    def change(_: int, tensor: Tensor) -> Tensor | None:
        if tensor.ndim <= dimension or tensor.shape[dimension] != samples:
            return None
        return tensor.index_select(dimension, neighbours(samples, parity).to(tensor.device))

    return runs.changed(change)


def first_samples(runs: Runs, count: int, samples: int, dimension: int) -> Inputs:
    """Return the first `count` samples of the batch."""

    def change(_: int, tensor: Tensor) -> Tensor | None:
        if tensor.ndim <= dimension or tensor.shape[dimension] != samples:
            return None
        return tensor.narrow(dimension, 0, count).clone()

    return runs.changed(change)


def all_equal(tensors: Sequence[Tensor], samples: int, dimension: int) -> bool:
    """Whether every sample of a batch is the same."""
    rows = [t for t in tensors if t.ndim > dimension and t.shape[dimension] == samples]
    return all(torch.equal(t, t.narrow(dimension, 0, 1).expand_as(t)) for t in rows)


def rolled(runs: Runs) -> Inputs:
    """Return the batch with its samples in another order, where its tensors have them in common."""
    sizes = {tensor.shape[0] for tensor in runs.tensors if tensor.ndim}
    if len(sizes) != 1 or runs.has_others:
        return runs.batch()
    return runs.changed(lambda _, tensor: tensor.roll(1, 0) if tensor.ndim else None)


def kept(samples: int, parity: int) -> Tensor:
    """Return which samples are left alone by `overwritten`."""
    return neighbours(samples, parity) == torch.arange(samples)


def along(which: Tensor, tensor: Tensor, *axes: int) -> Tensor:
    """Return a mask in a form that broadcasts to a tensor.

    Args:
        which: the mask.
        tensor: what it is of.
        axes: the dimensions of the tensor that those of the mask are, in ascending order.
    """
    shape = [1] * tensor.ndim
    for axis, size in zip(axes, which.shape, strict=True):
        shape[axis] = size
    return which.reshape(shape).to(tensor.device)


def rows_of(samples: int, parity: int) -> Same:
    """Return which places of any tensor of the model hold samples that were left alone.

    Layers fold the dimension of samples into others: what has no dimension of their number is
    read as so many groups, or as groups of so many.
    """

    untouched = kept(samples, parity)

    def same(tensor: Tensor) -> Iterator[Tensor]:
        sizes = list(tensor.shape)
        exact = [axis for axis, size in enumerate(sizes) if size == samples]
        for axis in exact:
            yield along(untouched, tensor, axis)
        for axis, size in enumerate(sizes[:2] if exact else sizes):  # features may be as many
            if size and size != samples and size % samples == 0 and 0 not in exact:
                index = torch.arange(size)
                yield along(untouched[index // (size // samples)], tensor, axis)
                yield along(untouched[index % samples], tensor, axis)

    return same
