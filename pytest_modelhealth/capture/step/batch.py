"""How a batch goes into a model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors, is_a


class Inputs:
    """Positional and keyword arguments of one call: ``Inputs(x, mask=mask)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        return f"Inputs({len(self.args)} positional, keywords {sorted(self.kwargs)})"

    @classmethod
    def of(cls, batch: Any) -> Inputs:
        """Return how `batch` goes in.

        A mapping goes in as keywords, a tuple or list as positionals, `Inputs` as it is, anything
        else as the one argument. A named tuple is a tuple.
        """
        if is_a(batch, cls):
            return batch
        if issubclass(type(batch), Mapping):
            return cls(**{str(name): value for name, value in batch.items()})
        if is_a(batch, tuple) or is_a(batch, list):
            return cls(*batch)
        return cls(batch)


def batch_size(tensors: Iterable[Tensor]) -> int:
    """Return how many samples a batch of these tensors has: the first that has a dimension 0."""
    return next((len(t) for t in tensors if t.ndim and not t.is_nested), 0)


def copied_batch(batch: Any) -> Any:
    """Return a deep copy of a batch; the batch itself where it cannot be copied."""
    try:
        return deep_copy(batch)
    except Exception:  # noqa: BLE001 - an object of the user's
        return batch


def deep_copy(batch: Any) -> Any:
    """Return a deep copy of a batch, in which tensors that have a graph are cut off from it.

    Raises:
        Exception: whatever an object of the user's raises where it is copied.
    """
    copies = {id(t): _copied(t) for t in find_tensors(batch) if not t.is_leaf or not _is_plain(t)}
    return copy.deepcopy(batch, copies)


def _is_plain(tensor: Tensor) -> bool:
    """Whether torch can make a deep copy of it: of sparse and nested ones it cannot of all."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
