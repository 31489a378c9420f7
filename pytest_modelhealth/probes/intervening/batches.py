"""Batches that are changed, and the places in a tensor that this should leave alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.intervening.locating import Same
from pytest_modelhealth.probes.intervening.running import Runs


def overwritten(runs: Runs, samples: int, dimension: int) -> Inputs:
    """Return the batch with each odd sample replaced by a copy of the even one before it.

    Masks, ids and lengths stay together, and lengths in descending order stay so: it is always a
    valid batch.
    """

    def change(_: int, tensor: Tensor) -> Tensor | None:
        if tensor.ndim <= dimension or tensor.shape[dimension] != samples:
            return None
        rows = torch.arange(samples, device=tensor.device)
        return tensor.index_select(dimension, rows - rows % 2)

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


def even(size: int) -> Tensor:
    """Return which of `size` samples are left alone by `overwritten`."""
    return torch.arange(size) % 2 == 0


def along(which: Tensor, tensor: Tensor, dimension: int) -> Tensor:
    """Return a mask of one dimension in a form that broadcasts along that of a tensor."""
    shape = [1] * tensor.ndim
    shape[dimension] = len(which)
    return which.reshape(shape).to(tensor.device)


def rows_of(samples: int) -> Same:
    """Return which places of any tensor of the model hold samples that were left alone.

    Layers fold the dimension of samples into others: what has no dimension of their number is
    read as so many groups, or as groups of so many.
    """

    def same(tensor: Tensor) -> Iterator[Tensor]:
        sizes = list(tensor.shape)
        exact = [axis for axis, size in enumerate(sizes) if size == samples]
        for axis in exact:
            yield along(even(samples), tensor, axis)
        for axis, size in enumerate(sizes if not exact else ()):
            if size and size % samples == 0:
                index = torch.arange(size)
                yield along((index // (size // samples)) % 2 == 0, tensor, axis)
                yield along((index % samples) % 2 == 0, tensor, axis)

    return same
