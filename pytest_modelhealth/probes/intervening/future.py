"""Later steps of a sequence permuted, and what earlier ones see of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.probes.conventions import Effects, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.batches import is_mask, permutation
from pytest_modelhealth.probes.intervening.leaks import Change, along, effects, readings
from pytest_modelhealth.probes.intervening.padding import real_side
from pytest_modelhealth.probes.intervening.partings import parting
from pytest_modelhealth.probes.intervening.running import Runs
from pytest_modelhealth.report import Parting

_SHORTEST = 4
_MOST_CUT = 4
_AGREED, _DIFFERENT = 0.95, 0.7
"""Share of the places of a target that hold the input some steps later; that of other steps."""
_SHIFTS = (1, 0, -1, 2, 3)
_LABELS = ("label", "target")


class Sequence(NamedTuple):
    """A sequence of the batch of which no output may see later steps."""

    tensors: tuple[int, ...]  # which of `Batch.tensors` are changed
    axis: int
    length: int
    why: str  # what shows that the model is to predict it, for people
    shift: int = 1  # how many steps later it holds what an output is asked for

    @property
    def half(self) -> int:
        """The first step that is changed: an odd one, since models merge steps by two and four."""
        return min(self.length // 2 | 1, self.length - 1)

    def cut(self, length: int, number: int, tensor: Tensor) -> Tensor:
        """Return a tensor of the batch without the last steps; masks as long are cut, too."""
        for axis in [self.axis] if number in self.tensors else range(1, tensor.ndim):
            if tensor.shape[axis] == self.length:
                tensor = tensor.narrow(axis, 0, length)
        return tensor.clone()

    def permuted(self, number: int, tensor: Tensor) -> Tensor | None:
        """Return a tensor of the batch with its later steps permuted with those of all samples.

        What a step holds stays whole, and comes from the batch, so that every value is a valid one.
        """
        if number not in self.tensors:
            return None
        values = tensor.clone()
        steps = values.narrow(self.axis, self.half, self.length - self.half).movedim(self.axis, 0)
        width = 2 if steps.ndim > 1 else 1
        flat = steps.reshape(-1, *steps.shape[width:])
        steps.copy_(flat[permutation(len(flat)).to(flat.device)].reshape(steps.shape))
        return values


def asked_sequence(runs: Runs) -> Sequence:
    """Return the sequence of which no output may see later steps.

    Raises:
        UntellableError: there is none, or all its steps are equal.
    """
    if runs.batch.conventions.causal is False:
        raise NotApplicableError("causal=False says that outputs may see later inputs")
    is_said, given = runs.batch.conventions.causal, find_tensors(runs.whole.target)
    has_ids = any(not t.is_floating_point() for t in runs.whole.tensors)
    if is_said or has_ids or any(tensor.ndim > 1 for tensor in given):
        _ = runs.read  # first, as it may need the whole batch
    sequence = _promised(runs) if is_said else _predicted(runs)
    if sequence is None:
        raise NotApplicableError(
            "the target is no input one step later; if no output may depend on later inputs, say "
            "causal=True"
        )
    # Where channels or samples are as many as steps, sizes do not tell which dimension is time.
    own, axis = runs.batch.tensors[sequence.tensors[0]].shape, sequence.axis
    sizes = {n for shape in (own, *runs.shapes) if len(shape) <= 3 for n in shape[axis + 1 :]}
    sizes.update(own[:axis], *(shape[1:axis] for shape in runs.shapes))
    most = max(0, min(_MOST_CUT, sequence.length - _SHORTEST))
    lengths = range(sequence.length, sequence.length - most - 1, -1)
    length = next((n for n in lengths if n not in sizes), sequence.length)
    if length < sequence.length:
        others = partial(sequence._replace(tensors=()).cut, length)
        if runs.takes(runs.batch.cut(partial(sequence.cut, length), others)):
            sequence = sequence._replace(length=length)
    return sequence


def what_early_steps_see(runs: Runs) -> Effects:
    """Return where outputs depend on later steps."""
    sequence = asked_sequence(runs)
    change = permuted(runs, sequence)
    if not runs.batch.is_changed(change.values):
        raise UntellableError("all steps of the sequence are equal; give some that differ")
    lacking = f"no output that the loss reads has {sequence.length} steps, as the sequence has"
    worst = max(effects(runs, change, lacking=lacking), key=lambda one: one.difference).difference
    if not worst.effect > 0.0:
        return Effects(change.text, _of_a_wrong_shift(runs, change, sequence))
    if sequence.shift < 1:
        raise NotApplicableError("the target is the input, and the model sees all of it")
    return Effects(change.text, [parting(runs, change, worst)])


def _of_a_wrong_shift(runs: Runs, change: Change, sequence: Sequence) -> list[Parting]:
    """Return what a causal model is asked for, if that is not the next step.

    Its outputs at the first step that is changed see that step or nothing that is.
    """
    if sequence.shift == 1:
        return []
    after, axis = runs.forward(runs.batch.copy(change.values)), sequence.axis
    sees = [
        not torch.equal(a.select(axis, sequence.half), b.select(axis, sequence.half))
        for a, b, read in zip(runs.base.outputs, after.outputs, runs.read, strict=False)
        if a.ndim > axis + 1 and a.shape[axis] == sequence.length and read is not None
    ]
    if not any(sees):
        return []
    kind = "twice" if sequence.shift > 1 else "copy"
    return [Parting(kind, 1.0, role="loss", detail=sequence.why.removeprefix("the target is it, "))]


def permuted(runs: Runs, sequence: Sequence) -> Change:
    """Return the change of a sequence's later steps, which leaves what comes before them alone.

    Padded places are left out, where a mask of the batch shows them: rows that see nothing attend
    everywhere.
    """
    first, real = runs.batch.tensors[sequence.tensors[0]], None
    for tensor in runs.batch.tensors if first.ndim > 1 and sequence.axis else ():
        if tensor is not first and tensor.shape == first.shape[:2] and is_mask(tensor):
            real = real_side(runs, tensor)
            break

    def same(tensor: Tensor) -> Iterator[Tensor]:
        masks = readings(torch.arange(sequence.length) < sequence.half, tensor)
        axes = [n for n in range(1, tensor.ndim) if tensor.shape[n] == sequence.length]
        if real is None or tensor.shape[:1] != real.shape[:1] or not axes:
            yield from masks
            return
        padded = sum(along(~real, tensor, 0, axis).long() for axis in axes)
        yield from (mask & (padded == 0) for mask in masks)

    return Change(
        f"steps {sequence.half} to {sequence.length - 1} permuted ({sequence.why})",
        sequence.permuted,
        same,
        of_loss=True,
    )


def _promised(runs: Runs) -> Sequence:
    """Return the sequence of a batch of which the user says that no output sees later steps.

    Where it has several dimensions beside that of samples, time is the one of which the model takes
    a step less: channels and features are bound to weights.
    """
    axis, own = runs.batch.conventions.time_dim, 0
    with suppress(UntellableError):
        own = next((a for a in runs.batch.samples.axes if a is not None), 0)
    several = [(n, t) for n, t in enumerate(runs.batch.tensors) if t.ndim > 1]
    numbers = [n for n, t in several if not bool(((t == 0) | (t == 1)).all())]
    if not numbers:
        raise UntellableError("causal=True, but the batch holds no sequence of two steps")
    shape = runs.batch.tensors[numbers[0]].shape
    axes = [n for n, size in enumerate(shape) if n != own and size > 1]
    if axis is not None:
        axes = [axis % len(shape)] if -len(shape) <= axis < len(shape) else []
    sequences = []
    for axis in axes:
        alike = [
            n for n in numbers if runs.batch.tensors[n].shape[axis : axis + 1] == (shape[axis],)
        ]
        why = f"causal=True, time is dimension {axis}"
        sequences.append(Sequence(tuple(alike), axis, shape[axis], why))
    if len(sequences) > 1:
        cut = [runs.batch.copy(partial(one.cut, one.length - 1)) for one in sequences]
        ran = map(runs.forward, cut)
        sequences = [one for one, run in zip(sequences, ran, strict=True) if not run.error]
    if len(sequences) != 1:
        raise UntellableError(
            f"causal=True, and nothing tells which dimension of the batch {tuple(shape)} is that "
            "of its steps: say time_dim="
        )
    return sequences[0]


def _predicted(runs: Runs) -> Sequence | None:
    """Return the sequence whose steps target, labels and loss ask for, if there is one.

    Of words the loss itself says what it asks for, at any shift. A target or labels ask for it that
    equal an input one step later, or in the same place where the loss shifts inside: then it is
    flat at the last output alone.
    """
    labels, inputs = find_tensors(runs.batch.target), list(enumerate(runs.batch.tensors))
    given = set(map(id, find_tensors(runs.batch.inputs.args)))
    for name, value in runs.batch.inputs.kwargs.items():
        if any(word in name.lower() for word in _LABELS):
            labels += find_tensors(value)
        else:
            given |= set(map(id, find_tensors(value)))  # which may be labels, too
    inputs = [(n, t) for n, t in inputs if id(t) in given]
    dim = runs.batch.conventions.time_dim
    places = [
        (number, tensor, axis)
        for number, tensor in inputs
        for axis, length in enumerate(tensor.shape)
        if length >= _SHORTEST and dim in (None, axis, axis - tensor.ndim)
    ]
    words = [n for n, t in inputs if t.ndim == 2 and not t.is_floating_point() and not is_mask(t)]
    is_told = len(words) == 1 == len(runs.observation.loss_calls)
    asked = [(one, True) for one in _asked_for(runs)] if places and is_told else []
    for target, is_of_loss in [*asked, *((one, False) for one in labels)]:
        for number, tensor, axis in places:
            if tensor is target or (is_of_loss and (number not in words or axis != (dim or 1) % 2)):
                continue
            shift = _shift(target, tensor, axis)
            # where no sample is asked for a last word, the loss is flat there without a shift
            is_asked = target.ndim <= axis or bool((target.select(axis, -1) >= 0).any())
            if shift == 0 and not is_of_loss and is_asked:
                shift = int(_is_flat_at_the_end(runs, axis, tensor.shape[axis]))
            if shift == 1 or (is_of_loss and shift is not None):
                later = {0: "in the same place", 1: "one step later", -1: "one step before"}
                why = f"the target is it, {later.get(shift, f'{shift} steps later')}"
                return Sequence((number,), axis, tensor.shape[axis], why, shift=shift)
    return None


def _is_flat_at_the_end(runs: Runs, axis: int, length: int) -> bool:
    """Whether the loss reads all outputs but the last, as one that shifts inside does."""
    return any(
        not g.select(axis, -1).any() and bool(g.select(axis, -2).any())
        for g in runs.read
        if g is not None and g.ndim > axis and g.shape[axis] == length
    )


def _asked_for(runs: Runs) -> Iterator[Tensor]:
    """Yield the classes that cross entropy asks outputs for: there alone its gradient is negative.

    Where it asks for none they are negative.
    """
    lengths = {n + shift for t in runs.batch.tensors for n in t.shape[:2] for shift in _SHIFTS}
    for gradient in (g for g in runs.read if g is not None and g.ndim == 3):
        for axis in (2, 1):
            if gradient.shape[3 - axis] in lengths:
                least = gradient.min(axis)
                yield least.indices.masked_fill(least.values >= 0, -1)


def _shift(target: Tensor, tensor: Tensor, axis: int) -> int | None:
    """Return how many steps later a tensor holds what a target holds: the next, or one alone."""
    tensor = tensor.to(target.device)
    if _share(target, tensor, axis, 1) >= _AGREED:
        return 1
    shares = {later: _share(target, tensor, axis, later) for later in _SHIFTS}
    best, second = sorted(shares, key=shares.__getitem__)[:-3:-1]
    return best if shares[best] >= _AGREED and shares[second] < _DIFFERENT else None


def _share(target: Tensor, tensor: Tensor, axis: int, later: int) -> float:
    """Return the share of places of a target, masked ones apart, where a tensor holds it later."""
    if tensor.ndim == target.ndim + 1 and tensor.shape[-1] == 1:
        tensor = tensor.squeeze(-1)
    if target.ndim <= axis or target.dtype != tensor.dtype or target.ndim != tensor.ndim:
        return 0.0
    shorter = tensor.shape[axis] - target.shape[axis]
    steps = min(target.shape[axis], tensor.shape[axis] - abs(later))
    if steps < _SHORTEST - 1 or not 0 <= shorter <= abs(later):
        return 0.0
    ahead = target.narrow(axis, max(-later, 0), min(steps, target.shape[axis] + min(later, 0)))
    here = tensor.narrow(axis, max(later, 0), ahead.shape[axis])
    if ahead.shape != here.shape or ahead.is_complex():
        return 0.0
    is_number = ahead.is_floating_point()
    counted = torch.ones_like(ahead, dtype=torch.bool) if is_number else ahead >= 0
    return float((ahead == here)[counted].float().mean().nan_to_num())
