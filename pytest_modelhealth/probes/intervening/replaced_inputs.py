"""Batches in which one input is that of other samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.intervening.batches import Samples
from pytest_modelhealth.probes.intervening.running import Runs, changeable


def named_inputs(runs: Runs) -> list[str]:
    """Return what people call the tensors of the batch, in the order of `Runs.tensors`."""
    batch = runs.batch()
    positional = runs.positional
    named = [
        (positional[n] if n < len(positional) else str(n), value)
        for n, value in enumerate(batch.args)
    ]
    known: dict[int, str] = {}
    for name, value in [*named, *batch.kwargs.items()]:
        for tensor, path in _paths(value, name):
            known.setdefault(id(tensor), path)
    return [known.get(id(tensor), str(n)) for n, tensor in enumerate(changeable(batch))]


def _paths(value: Any, name: str) -> Iterator[tuple[Tensor, str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _paths(part, f"{name}[{key!r}]")
        return
    tensors = find_tensors(value)
    for n, tensor in enumerate(tensors):
        yield tensor, name if len(tensors) == 1 else f"{name}[{n}]"


def replaced(runs: Runs, number: int, samples: Samples) -> Inputs | None:
    """Return the batch with one tensor that has the values of other samples.

    Some come twice: a mean over the batch would not see them change places.

    Args:
        runs: has the batch.
        number: that of the tensor.
        samples: where they are.

    Returns:
        ``None`` where the tensor has no row for each sample, or all of its rows are equal.
    """
    tensor, axis = runs.tensors[number], samples.axes[number]
    if axis is None:
        return None
    rows = torch.arange(samples.number, device=tensor.device)
    last = torch.full_like(rows, samples.number - 1)
    for index in (rows - rows % 2, torch.zeros_like(rows), last):
        made = tensor.detach().index_select(axis, index)
        if not are_equal([tensor], [made]):
            return runs.changed(lambda n, _: made if n == number else None)  # noqa: B023
    return None


def are_equal(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether tensors are the same bit for bit, NaN among them."""
    return len(before) == len(after) and all(map(_is_equal, before, after))


def _is_equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.layout is not torch.strided or a.is_quantized or a.is_nested:
        return False  # not looked into
    bits = (t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*bits)
