"""Sequences in a batch: which claim to be predicted step by step, and what is changed of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.intervening.batches import along
from pytest_modelhealth.probes.intervening.locating import Same
from pytest_modelhealth.probes.intervening.running import Runs

_SHORTEST = 4
_AGREED = 0.95
"""Share of the places of a target that hold the input one step later; some are masked or cut."""
_LABELS = ("label", "target")
_SEED = 20_240_229


class Sequence(NamedTuple):
    """A sequence of the batch of which no output may see later steps.

    Args:
        tensors: the numbers of its tensors in the batch, which are changed.
        axis: their dimension of time.
        length: the number of steps.
        why: what shows that the model is to predict it, for people.
    """

    tensors: tuple[int, ...]
    axis: int
    length: int
    why: str

    @property
    def half(self) -> int:
        """The first step that is changed: an odd one, since models merge steps by two and four."""
        return min(self.length // 2 | 1, self.length - 1)


def predicted(runs: Runs) -> Sequence | None:
    """Return the sequence whose next step is asked for, read off target, labels and loss.

    A target that equals an input one step later asks for it. One that equals an input in the same
    place does so where the loss shifts inside: then it is flat at the last output alone.
    """
    inputs = [t for t in runs.tensors if t.ndim]
    numbers = [n for n, t in enumerate(runs.tensors) if t.ndim]
    for target, is_label in _targets(runs):
        for number, tensor in zip(numbers, inputs, strict=True):
            for axis in range(tensor.ndim):
                length = tensor.shape[axis]
                if length < _SHORTEST:
                    continue
                is_same = tensor is target and not is_label
                if not is_same and _is_later(target, tensor, axis):
                    return Sequence((number,), axis, length, "the target is it, one step later")
                if _is_equal(target, tensor) and _is_shifted_inside(runs, target, axis, length):
                    why = "the target is it, and the loss looks one step ahead"
                    return Sequence((number,), axis, length, why)
    return None


def said_to_be(runs: Runs) -> Sequence | None:
    """Return the sequences of a batch of which the user says that no output sees later steps."""
    axis = 0 if runs.conventions.batch_dim == 1 else 1
    numbered = [(n, t) for n, t in enumerate(runs.tensors) if t.ndim > axis and not _is_mask(t)]
    length = next((t.shape[axis] for _, t in numbered), 0)
    chosen = tuple(n for n, t in numbered if t.shape[axis] == length)
    return Sequence(chosen, axis, length, "causal=True") if length >= 2 else None


def _targets(runs: Runs) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors that tell what is to be predicted, and whether the model gets them."""
    for tensor in find_tensors(runs.request.target):
        yield tensor, False
    arguments = Inputs.of(runs.request.inputs)
    for name, value in arguments.kwargs.items():
        if any(word in name.lower() for word in _LABELS):
            for tensor in find_tensors(value):
                yield tensor, True


def _is_later(target: Tensor, tensor: Tensor, axis: int) -> bool:
    """Whether a target holds what a tensor holds one step later."""
    target, tensor = _alike(target, tensor)
    if target.ndim <= axis or target.dtype != tensor.dtype or target.ndim != tensor.ndim:
        return False
    steps = min(target.shape[axis], tensor.shape[axis] - 1)
    if steps < _SHORTEST - 1 or tensor.shape[axis] - target.shape[axis] not in (0, 1):
        return False
    ahead, here = target.narrow(axis, 0, steps), tensor.narrow(axis, 1, steps)
    return ahead.shape == here.shape and _agree(ahead, here)


def _is_equal(target: Tensor, tensor: Tensor) -> bool:
    target, tensor = _alike(target, tensor)
    return target.shape == tensor.shape and target.dtype == tensor.dtype and _agree(target, tensor)


def _alike(target: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
    if tensor.ndim == target.ndim + 1 and tensor.shape[-1] == 1:
        return target, tensor.squeeze(-1)
    return target, tensor


def _agree(ahead: Tensor, here: Tensor) -> bool:
    with torch.no_grad():
        counted = ahead >= 0 if not ahead.is_floating_point() else torch.ones_like(ahead).bool()
        if ahead.is_complex() or not bool(counted.any()):
            return False
        return float((ahead == here)[counted].float().mean()) >= _AGREED


def _is_shifted_inside(runs: Runs, target: Tensor, axis: int, length: int) -> bool:
    """Whether the loss is flat at the last step of an output, and at no other that counts."""
    for gradient in runs.base.read:
        if gradient is None or gradient.ndim <= axis or gradient.shape[axis] != length:
            continue
        other = [d for d in range(gradient.ndim) if d != axis]
        reads = (gradient != 0).amax(dim=other) if other else gradient != 0
        asked = target.narrow(axis, 1, length - 1) if target.shape[axis] == length else target
        asked = asked >= 0 if not asked.is_floating_point() else torch.ones_like(asked).bool()
        rest = [d for d in range(asked.ndim) if d != axis]
        counted = asked.amax(dim=rest) if rest else asked
        if not bool(reads[-1]) and bool(reads[:-1][counted.to(reads.device)].all()):
            return True
    return False


def _is_mask(tensor: Tensor) -> bool:
    if tensor.dtype is torch.bool:
        return True
    return bool(((tensor == 0) | (tensor == 1)).all())


def later_changed(runs: Runs, sequence: Sequence) -> Inputs:
    """Return the batch with the second half of a sequence replaced by a permutation of its steps.

    What a step holds stays whole, and comes from the batch, so that every value is a valid one.
    """
    half = sequence.half

    def change(number: int, tensor: Tensor) -> Tensor | None:
        if number not in sequence.tensors:
            return None
        made = tensor.clone()
        later = made.narrow(sequence.axis, half, sequence.length - half)
        steps = later.movedim(sequence.axis, 0)
        width = 2 if steps.ndim > 1 else 1
        flat = steps.reshape(-1, *steps.shape[width:])
        generator = torch.Generator().manual_seed(_SEED)
        order = torch.randperm(len(flat), generator=generator).to(flat.device)
        steps.copy_(flat[order].reshape(steps.shape))
        return made

    return runs.changed(change)


def seen(runs: Runs, sequence: Sequence) -> Tensor | None:
    """Return which places ``(samples, steps)`` hold no padding; ``None`` where all do.

    Padded rows that see nothing attend everywhere. Padding is what a mask of zeros and ones says,
    or an id that a row begins or ends with twice or more, there.
    """
    first = runs.tensors[sequence.tensors[0]]
    if first.ndim < 2 or sequence.axis != 1:
        return None
    shape = first.shape[:2]
    for tensor in runs.tensors:
        if tensor is not first and tensor.shape == shape and _is_mask(tensor):
            return tensor.bool()
    if first.is_floating_point() or first.ndim != 2 or first.shape[1] < 2:
        return None
    padded = _first_run(first) | _first_run(first.flip(1)).flip(1)
    return ~padded if bool(padded.any()) else None


def _first_run(ids: Tensor) -> Tensor:
    """Return where each row repeats its first id without a break, twice or more."""
    run = (ids == ids[:, :1]).long().cumprod(dim=1).bool()
    return run & (run.sum(dim=1, keepdim=True) > 1)


def steps_before(sequence: Sequence, real: Tensor | None) -> Same:
    """Return which places of any tensor of the model come before the steps that were changed.

    A tensor may have several dimensions of that length, as scores of attention have: there, what
    comes before in all of them at once should be equal, too.

    Args:
        sequence: what was changed.
        real: which of ``(samples, steps)`` hold no padding, where that is known.
    """
    length, half = sequence.length, sequence.half

    def same(tensor: Tensor) -> Iterator[Tensor]:
        axes = [axis for axis, size in enumerate(tensor.shape) if size == length]
        masks = [along(torch.arange(length) < half, tensor, axis) for axis in axes]
        if real is not None and tensor.ndim and tensor.shape[0] == len(real):
            masks = [
                mask & along(real, tensor, 0, axis) if axis else mask
                for axis, mask in zip(axes, masks, strict=True)
            ]
        yield from masks
        if len(masks) > 1:
            both = masks[0]
            for mask in masks[1:]:
                both = both & mask
            yield both
        for axis, size in enumerate(tensor.shape if not axes else ()):
            if size and size % length == 0:
                index = torch.arange(size)
                yield along(index % length < half, tensor, axis)
                yield along(index // (size // length) < half, tensor, axis)

    return same


def step_axis(output: Tensor, sequence: Sequence) -> int | None:
    """Return the dimension of time of an output: that of the input, or the one of its length."""
    if output.ndim > sequence.axis and output.shape[sequence.axis] == sequence.length:
        return sequence.axis
    axes = [axis for axis, size in enumerate(output.shape) if size == sequence.length]
    return axes[0] if len(axes) == 1 else None


def reads(gradient: Tensor | None, output: Tensor, axis: int) -> Any:
    """Return at which places of an output the loss looks, to broadcast; ``True`` where unknown."""
    if gradient is None:
        return True
    rest = [d for d in range(output.ndim) if d not in (0, axis)]
    asked = gradient != 0
    return asked.amax(dim=rest, keepdim=True) if rest else asked
