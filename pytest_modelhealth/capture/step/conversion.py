"""Copies of a model and of its batch that compute in another dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import copied_batch
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.errors import InspectionError


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model.

    Tensors that it computed and keeps in attributes, as a pruned layer its weight, are cut off from
    their graph in it.

    Raises:
        InspectionError: it cannot be copied.
    """
    try:
        return copy.deepcopy(model, {id(t): t.detach().clone() for t in _computed(model)})
    except Exception as error:
        raise InspectionError(
            f"{type(model).__name__} cannot be copied, and so not be run in another way: {error}"
        ) from error


def _computed(model: nn.Module) -> list[Tensor]:
    """Return the tensors in attributes that have a graph, which torch does not copy."""
    held = (value for module in model.modules() for value in vars(module).values())
    return [value for value in held if type(value) is Tensor and not value.is_leaf]


def converted_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy that keeps and computes in `dtype`: parameters, buffers, plain attributes.

    Raises:
        InspectionError: the model cannot be copied.
    """
    result = copied(model)
    state = State(result)
    for tensor in (*state.leaves, *state.tensors):
        if tensor.is_leaf and tensor.layout == torch.strided:
            convert(tensor, dtype)
    return result


def converted_batch(
    batch: Any, dtype: torch.dtype | None, device: torch.device | None = None
) -> Any:
    """Return a copy of a batch with its floating tensors in `dtype`, and all on `device`."""
    result = copied_batch(batch)
    for tensor in find_tensors(result) if result is not batch else ():
        if tensor.is_leaf:
            if device is not None:
                tensor.data = tensor.data.to(device)
            if dtype is not None:
                convert(tensor, dtype)
    return result


def convert(tensor: Tensor, dtype: torch.dtype) -> None:
    """Bring a floating or complex tensor to `dtype` or the complex dtype of its width, in place."""
    if tensor.is_complex():
        tensor.data = tensor.data.to(dtype.to_complex())
    elif tensor.is_floating_point():
        tensor.data = tensor.data.to(dtype)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let tensors that a model makes while it runs be of `dtype`; for the whole process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
