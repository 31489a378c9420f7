"""Batches that are changed, and the places in a tensor that this should leave alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.conventions import Found, NotApplicableError
from pytest_modelhealth.probes.intervening.running import Runs, changeable

NO_EFFECT = "has no effect on the output"


class Samples(NamedTuple):
    """Where the samples of a batch lie.

    Args:
        number: how many there are.
        axes: their dimension in each of `Runs.tensors`; ``None`` where one has no row for each.
        is_sure: whether the user said so, or it is the first dimension of every tensor.
    """

    number: int
    axes: tuple[int | None, ...]
    is_sure: bool = True

    @property
    def axis(self) -> int:
        """Their dimension in the first tensor that has them."""
        return next((axis for axis in self.axes if axis is not None), 0)

    @classmethod
    def along(cls, tensors: Sequence[Tensor], dimension: int, *, is_sure: bool = True) -> Samples:
        """Return those along a dimension, as many as the first tensor that has it tells."""
        count = next((t.shape[dimension] for t in tensors if t.ndim > dimension), 0)
        has = (t.ndim > dimension and t.shape[dimension] == count for t in tensors)
        return cls(count, tuple(dimension if one else None for one in has), is_sure)


def samples_in(runs: Runs) -> Samples | None:
    """Return where the samples lie; ``None`` where the tensors of the batch do not tell.

    It is the first dimension, if all tensors have that in common; else a size that all have, as
    of a sequence with time in front and the first state of a recurrence.
    """
    tensors, said = runs.tensors, runs.conventions.batch_dim
    first = Samples.along(tensors, said or 0)
    lacking = [t for t, axis in zip(tensors, first.axes, strict=True) if t.ndim and axis is None]
    if said is not None or not lacking:
        return first if any(axis is not None for axis in first.axes) else None
    sizes = [list(tensor.shape) for tensor in tensors if tensor.ndim]
    common = set(sizes[0]).intersection(*sizes[1:]) - {0, 1}
    by_place = {max(shape.index(size) for shape in sizes): size for size in sorted(common)}
    if not by_place:
        return None
    count = by_place[min(by_place)]
    return Samples(
        count, tuple(list(t.shape).index(count) if t.ndim else None for t in tensors), False
    )


def selected(runs: Runs, samples: Samples, index: Tensor) -> Inputs:
    """Return the batch with the samples of an index, in all tensors that have samples at once."""

    def change(number: int, tensor: Tensor) -> Tensor | None:
        axis = samples.axes[number]
        return None if axis is None else tensor.index_select(axis, index.to(tensor.device))

    return runs.changed(change)


def all_equal(tensors: Sequence[Tensor], samples: Samples) -> bool:
    """Whether every sample of a batch is the same."""
    rows = [(t, axis) for t, axis in zip(tensors, samples.axes, strict=True) if axis is not None]
    return all(torch.equal(t, t.narrow(axis, 0, 1).expand_as(t)) for t, axis in rows)


def what_inputs_do(runs: Runs) -> Found:
    """Replace one input after the other by that of other samples.

    Raises:
        NotApplicableError: there is nothing to replace, or nothing that would show it.
    """
    base = runs.base
    if not base.outputs:
        raise NotApplicableError("the model returns no tensor on which an input could show")
    samples = samples_in(runs)
    if samples is None or samples.number < 2:
        raise NotApplicableError(
            "the batch has one sample, or its tensors have no dimension of samples in common, "
            "so that no input can be replaced by that of another sample"
        )
    notes, judged = [], False
    for number, name in enumerate(named_inputs(runs)):
        batch = _replaced(runs, number, samples)
        if batch is None:
            continue
        ran = runs.forward(batch)
        judged = judged or not ran.error
        if ran.error:
            notes.append(f"with input {name!r} of other samples the model raises {ran.error}")
        elif are_equal(base.outputs, ran.outputs):
            notes.append(f"input {name!r} {NO_EFFECT}")
    if not judged:
        why = "; ".join(notes) or "all samples of the batch are equal"
        raise NotApplicableError(f"no input could be replaced: {why}", notes=tuple(notes))
    return Found("each input by itself, by that of other samples", notes=tuple(notes))


def rolled(runs: Runs) -> Inputs:
    """Return the batch with its samples in another order, where its tensors have them in common."""
    samples = Samples.along(runs.tensors, 0)
    is_common = all(axis == 0 for t, axis in zip(runs.tensors, samples.axes, strict=True) if t.ndim)
    if not is_common or runs.has_others:
        return runs.batch()
    return selected(runs, samples, torch.arange(samples.number).roll(1))


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


def folded(which: Tensor, tensor: Tensor, *, is_exact: bool) -> Iterator[Tensor]:
    """Yield which places of a tensor are meant, where layers fold a dimension into others.

    A longer dimension is read as so many groups, and as groups of so many.

    Args:
        which: of one dimension, the places that are meant.
        tensor: what is read.
        is_exact: whether another dimension is as long: features may be a multiple by chance.
    """
    count = len(which)
    for axis, size in enumerate(tensor.shape[:2] if is_exact else tensor.shape):
        if size > count and size % count == 0:
            yield along(which.repeat_interleave(size // count), tensor, axis)
            yield along(which.repeat(size // count), tensor, axis)


def named_inputs(runs: Runs) -> list[str]:
    """Return what people call the tensors of the batch, in the order of `Runs.tensors`."""
    batch, positional = runs.batch(), list[str]()
    with runs.kept(()), suppress(TypeError, ValueError):  # a script keeps what is looked up in it
        declared = inspect.signature(runs.model.forward).parameters.values()
        positional = [
            p.name for p in declared if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
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


def _replaced(runs: Runs, number: int, samples: Samples) -> Inputs | None:
    """Return the batch with one tensor that has the values of other samples; ``None`` if none has.

    Some come twice: a mean over the batch would not see them change places.
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
    """Whether tensors are the same bit for bit, NaN among them; sparse ones are not looked into."""

    def is_equal(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.layout is not torch.strided or a.is_quantized or a.is_nested:
            return False
        pair = (t.detach().resolve_conj().contiguous().reshape(-1) for t in (a, b))
        return torch.equal(*(t.view(torch.uint8) for t in pair))

    return len(before) == len(after) and all(map(is_equal, before, after))


def groups_in(runs: Runs) -> Tensor | None:
    """Return the vector of the batch that numbers the group of each row, where there is one.

    It is of whole numbers, ascending from 0 without a gap, and some come more than once.
    """
    if runs.has_others or runs.conventions.batch_dim is not None:
        return None
    tensors = runs.tensors
    for tensor in tensors:
        if not _numbers(tensor):
            continue
        rows = len(tensor)
        others = [t for t in tensors if t.ndim and len(t) == rows and t is not tensor]
        edges = [t for t in tensors if t.ndim > 1 and t.shape[1] == rows and _is_whole(t)]
        if others and not edges:  # what as many edges carry could not be told from rows
            return tensor.detach().cpu()
    return None


def nodes_in(runs: Runs) -> str:
    """Return why the rows of a batch are nodes of one graph; ``""`` where nothing says so.

    Whole numbers in pairs, shape (2, edges) or (edges, 2), are rows of what has floating numbers.
    """
    if runs.conventions.batch_dim is not None:
        return ""
    tensors = [tensor for tensor in runs.tensors if tensor.numel()]
    for pairs in tensors:
        if pairs.ndim != 2 or 2 not in pairs.shape or not _is_whole(pairs):
            continue
        least, most = int(pairs.min()), int(pairs.max())
        for nodes in tensors:
            is_pointed_at = nodes.ndim and least >= 0 and len(nodes) // 2 <= most < len(nodes)
            are_rows = nodes.is_floating_point() or len(nodes) != len(pairs)
            if are_rows and is_pointed_at and len(nodes) > 2:
                return (
                    f"the batch pairs its {len(nodes)} rows, as edges do, by a tensor of the shape "
                    f"{tuple(pairs.shape)}: they are nodes, which see each other, and no samples"
                )
    return ""


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _numbers(tensor: Tensor) -> bool:
    """Whether a tensor numbers groups of rows."""
    if tensor.ndim != 1 or len(tensor) < _FEWEST or not _is_whole(tensor):
        return False
    steps = tensor.diff()
    ascends = int(tensor[0]) == 0 and bool(((steps == 0) | (steps == 1)).all())
    return ascends and 0 < int(tensor[-1]) < len(tensor) - 1


_FEWEST = 4
