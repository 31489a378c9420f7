"""Later steps of a sequence permuted, and what earlier ones see of that."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.conventions import Found, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.batches import along, folded, samples_in
from pytest_modelhealth.probes.intervening.differences import Apart, apart, is_rounding
from pytest_modelhealth.probes.intervening.locating import Same, parting_at, where_they_part
from pytest_modelhealth.probes.intervening.running import Ran, Runs
from pytest_modelhealth.report import Parting

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
        cut: how many steps of the batch are left out at its end.
    """

    tensors: tuple[int, ...]
    axis: int
    length: int
    why: str
    cut: int = 0

    @property
    def half(self) -> int:
        """The first step that is changed: an odd one, since models merge steps by two and four."""
        return min(self.length // 2 | 1, self.length - 1)

    def shorter(self, cut: int) -> Sequence:
        """Return it without its last steps."""
        return self._replace(length=self.length - cut, cut=self.cut + cut)


def what_early_steps_see(runs: Runs) -> Found:
    """Return where outputs depend on later steps.

    Raises:
        UntellableError: nothing can be told, or nobody claims that the model is causal.
    """
    said = runs.conventions.causal
    if said is False:
        raise NotApplicableError("causal=False says that outputs may see later inputs")
    base = runs.base
    sequences = _said_to_be(runs) if said else _predicted(runs)
    if not sequences and said:
        raise UntellableError("causal=True, but the batch holds no sequence of two steps")
    if not sequences:
        raise NotApplicableError(
            "the target is no input one step later; if no output may depend on later inputs, say "
            "causal=True"
        )
    sequence = _along_time(runs, base, sequences)
    changed = f"steps {sequence.half} to {sequence.length - 1} permuted ({sequence.why})"
    batch = _steps_of(runs, sequence, changed="later")
    if not runs.is_changed(batch, sequence.tensors):
        raise UntellableError("all steps of the sequence are equal; give some that differ")
    before, after = _effects(runs, base, runs.tried(batch, changed), sequence)
    if not before:
        raise UntellableError(
            f"no output that the loss reads has {sequence.length} steps, as the sequence has",
            changed,
        )
    if not after:
        raise UntellableError("nothing that comes later has an effect on any output", changed)
    if not max(before).effect > 0.0:
        return Found(changed)
    runs.check_steady(changed)
    return Found(changed, [_parting(runs, sequence, max(before))])


def _parting(runs: Runs, sequence: Sequence, most: Apart) -> Parting:
    clear, place = _unlike_widths(runs, sequence), None
    for one in dict.fromkeys((clear, sequence)):
        same = _steps_before(one, _seen(runs, one))
        batches = _steps_of(runs, one), _steps_of(runs, one, changed="later")
        place = place or where_they_part(runs, *batches, same)
    parting = parting_at("choice" if place is not None and place.chosen else "values", most, place)
    return parting if clear is sequence else replace(parting, before=None, after=None)


def _along_time(runs: Runs, base: Ran, sequences: list[Sequence]) -> Sequence:
    """Return which of several dimensions is time, by what the model does along them.

    It is that along which earlier steps have an effect on later ones and not the other way round;
    else, since no order explains the model then, one along which steps see each other.
    """
    mixed = []
    for sequence in sequences if len(sequences) > 1 else ():
        after_later = runs.forward(_steps_of(runs, sequence, changed="later"))
        after_earlier = runs.forward(_steps_of(runs, sequence, changed="earlier"))
        if after_later.error or after_earlier.error:
            continue
        early, _ = _effects(runs, base, after_later, sequence)
        is_leak = any(one.effect > 0.0 for one in early)
        _, late = _effects(runs, base, after_earlier, sequence)
        if not is_leak and any(one.effect > 0.0 for one in late):
            return sequence
        mixed += [sequence] if is_leak else []
    return (*mixed, *sequences)[0]


def _effects(
    runs: Runs, base: Ran, ran: Ran, sequence: Sequence
) -> tuple[list[Apart], list[Apart]]:
    """Return how far outputs change before the steps that were changed, and from them on.

    Of several dimensions of an output that are as long, that with the smaller change before counts.
    """
    real = _seen(runs, sequence)
    is_early = torch.arange(sequence.length) < sequence.half
    is_read = any(gradient is not None for gradient in base.read)
    before, after = [], []
    for n, output in enumerate(base.outputs[: len(ran.outputs)]):
        gradient = base.read[n] if n < len(base.read) else None
        if (is_read and gradient is None) or not output.is_floating_point():
            continue
        ways = []
        for axis in (axis for axis, size in enumerate(output.shape) if size == sequence.length):
            early = along(is_early, output, axis)
            read = early & _reads(gradient, output, axis)
            if real is not None and axis and output.shape[0] == len(real):
                read = read & along(real, output, 0, axis)
            found, later = (apart(output, ran.outputs[n], at) for at in (read, ~early))
            ways += [(found, later)] if found is not None and later is not None else []
        for found, later in sorted(ways)[:1]:
            is_noise = is_rounding(found, output.dtype)
            before.append(found._replace(effect=0.0) if is_noise else found)
            after += [later] if later.effect > 0.0 or found.effect > 0.0 else []
    return before, after


def _predicted(runs: Runs) -> list[Sequence]:
    """Return the sequence whose next step target, labels and loss ask for, if there is one.

    A target that equals an input one step later asks for it. One that equals an input in the same
    place does so where the loss shifts inside: then it is flat at the last output alone.
    """
    inputs = [t for t in runs.tensors if t.ndim]
    numbers = [n for n, t in enumerate(runs.tensors) if t.ndim]
    for target, is_label in _targets(runs):
        for number, tensor in zip(numbers, inputs, strict=True):
            asked = runs.conventions.time_dim
            for axis in range(tensor.ndim):
                if asked is not None and axis not in (asked, asked + tensor.ndim):
                    continue
                length = tensor.shape[axis]
                if length < _SHORTEST:
                    continue
                is_same = tensor is target and not is_label
                if not is_same and _holds(target, tensor, axis, 1):
                    return [Sequence((number,), axis, length, "the target is it, one step later")]
                if _holds(target, tensor, axis, 0) and _is_shifted_inside(
                    runs, target, axis, length
                ):
                    why = "the target is it, and the loss looks one step ahead"
                    return [Sequence((number,), axis, length, why)]
    return []


def _said_to_be(runs: Runs) -> list[Sequence]:
    """Return the sequences of a batch of which the user says that no output sees later steps.

    Where it has several dimensions beside that of samples, time is one of which a step less gives
    another output: channels and features are bound to weights. Else its size is in an output.
    """
    numbered = [(n, t) for n, t in enumerate(runs.tensors) if t.ndim and not _is_mask(t)]
    if (axis := runs.conventions.time_dim) is not None:
        numbered = [(n, t) for n, t in numbered if -t.ndim <= axis < t.ndim]
        return [_along(numbered, axis % numbered[0][1].ndim)] if numbered else []
    samples = samples_in(runs)
    own = 0 if samples is None else samples.axis
    numbered = [(n, t) for n, t in numbered if t.ndim > 1 and max(_sizes(t, own).values()) > 1]
    if not numbered:
        return []
    sizes = _sizes(numbered[0][1], own)
    sequences = [_along(numbered, axis) for axis, size in sizes.items() if size > 1]
    if len(sequences) > 1:
        shapes = [output.shape for output in runs.base.outputs]
        shorter = [(one, runs.forward(_steps_of(runs, one.shorter(1)))) for one in sequences]
        followed = [
            one
            for one, ran in shorter
            if not ran.error and [output.shape for output in ran.outputs] != shapes
        ]
        returned = [one for one in sequences if any(one.length in shape[1:] for shape in shapes)]
        sequences = followed or returned or sequences[:1]
    return sequences


def _sizes(tensor: Tensor, samples: int) -> dict[int, int]:
    """Return the size of each dimension but that of samples."""
    return {axis: size for axis, size in enumerate(tensor.shape) if axis != samples}


def _along(numbered: list[tuple[int, Tensor]], axis: int) -> Sequence:
    """Return the sequence along a dimension of the first tensor, and of those as long there."""
    length = numbered[0][1].shape[axis]
    alike = tuple(n for n, t in numbered if t.ndim > axis and t.shape[axis] == length)
    return Sequence(alike, axis, length, f"causal=True, time is dimension {axis}")


def _unlike_widths(runs: Runs, sequence: Sequence) -> Sequence:
    """Return a sequence of which no layer is as wide as it is long: some steps shorter, if need be.

    Where channels are as many as steps, sizes do not tell which dimension of a layer is time.
    """
    widths = {size for p in runs.model.parameters() for size in p.shape}
    for cut in range(min(_MOST_CUT, sequence.length - _SHORTEST) + 1):
        shorter = sequence.shorter(cut)
        if shorter.length not in widths:
            is_run = not cut or not runs.forward(_steps_of(runs, shorter)).error
            return shorter if is_run else sequence
    return sequence


_MOST_CUT = 4


def _steps_of(runs: Runs, sequence: Sequence, *, changed: str = "") -> Inputs:
    """Return the batch with the steps of a sequence, one half of which may be permuted.

    What a step holds stays whole, and comes from the batch, so that every value is a valid one.

    Args:
        runs: has the batch.
        sequence: what is changed. Where it leaves steps out, masks of its length do, too.
        changed: ``"later"`` for the second half, ``"earlier"`` for the first one.
    """
    half = sequence.half
    start, count = (0, half) if changed == "earlier" else (half, sequence.length - half)
    samples = samples_in(runs)
    own = 0 if samples is None else samples.axis

    def change(number: int, tensor: Tensor) -> Tensor | None:
        is_sequence = number in sequence.tensors
        for axis in [sequence.axis] if is_sequence else _sizes(tensor, own):
            if sequence.cut and tensor.shape[axis] == sequence.length + sequence.cut:
                tensor = tensor.narrow(axis, 0, sequence.length)
        made = tensor.clone()
        if not is_sequence or not changed:
            return made
        steps = made.narrow(sequence.axis, start, count).movedim(sequence.axis, 0)
        width = 2 if steps.ndim > 1 else 1
        flat = steps.reshape(-1, *steps.shape[width:])
        generator = torch.Generator().manual_seed(_SEED)
        order = torch.randperm(len(flat), generator=generator)
        if torch.equal(order, torch.arange(len(flat))):
            order = order.roll(1)
        steps.copy_(flat[order.to(flat.device)].reshape(steps.shape))
        return made

    return runs.changed(change)


def _targets(runs: Runs) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors that tell what is to be predicted, and whether the model gets them."""
    for tensor in find_tensors(runs.request.target):
        yield tensor, False
    arguments = Inputs.of(runs.request.inputs)
    for name, value in arguments.kwargs.items():
        if any(word in name.lower() for word in _LABELS):
            for tensor in find_tensors(value):
                yield tensor, True


def _holds(target: Tensor, tensor: Tensor, axis: int, later: int) -> bool:
    """Whether a target holds what a tensor holds so many steps later, or is masked."""
    if tensor.ndim == target.ndim + 1 and tensor.shape[-1] == 1:
        tensor = tensor.squeeze(-1)
    if target.ndim <= axis or target.dtype != tensor.dtype or target.ndim != tensor.ndim:
        return False
    steps = min(target.shape[axis], tensor.shape[axis] - later)
    if steps < _SHORTEST - 1 or not 0 <= tensor.shape[axis] - target.shape[axis] <= later:
        return False
    ahead, here = target.narrow(axis, 0, steps), tensor.narrow(axis, later, steps)
    counted = _asked(ahead)
    if ahead.shape != here.shape or ahead.is_complex() or not bool(counted.any()):
        return False
    return float((ahead == here)[counted].float().mean()) >= _AGREED


def _asked(target: Tensor) -> Tensor:
    """Return the places of a target that are not masked: classes that are not negative."""
    whole = torch.ones_like(target, dtype=torch.bool)
    return whole if target.is_floating_point() or target.is_complex() else target >= 0


def _is_shifted_inside(runs: Runs, target: Tensor, axis: int, length: int) -> bool:
    """Whether the loss is flat at the last step of an output, and at no other that counts."""
    for gradient in runs.base.read:
        if gradient is None or gradient.ndim <= axis or gradient.shape[axis] != length:
            continue
        asked = target.narrow(axis, 1, length - 1) if target.shape[axis] == length else target
        reads, counted = _any_beside(gradient != 0, axis), _any_beside(_asked(asked), axis)
        if not bool(reads[-1]) and bool(reads[:-1][counted.to(reads.device)].all()):
            return True
    return False


def _any_beside(places: Tensor, axis: int) -> Tensor:
    """Return whether any place holds, along one dimension."""
    rest = [d for d in range(places.ndim) if d != axis]
    return places.amax(dim=rest) if rest else places


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _seen(runs: Runs, sequence: Sequence) -> Tensor | None:
    """Return which places ``(samples, steps)`` hold no padding; ``None`` where all do.

    Padded rows that see nothing attend everywhere. Padding is what a mask of zeros and ones says,
    or an id that a row begins or ends with twice or more, there.
    """
    first = runs.tensors[sequence.tensors[0]]
    if first.ndim < 2 or sequence.axis == 0:
        return None
    shape = first.shape[0], sequence.length + sequence.cut
    for tensor in runs.tensors:
        if tensor is not first and tensor.shape == shape and _is_mask(tensor):
            return tensor.bool()[:, : sequence.length]
    if first.is_floating_point() or first.ndim != 2 or first.shape[1] < 2:
        return None
    padded = _first_run(first) | _first_run(first.flip(1)).flip(1)
    return ~padded[:, : sequence.length] if bool(padded.any()) else None


def _first_run(ids: Tensor) -> Tensor:
    """Return where each row repeats its first id without a break, twice or more."""
    run = (ids == ids[:, :1]).long().cumprod(dim=1).bool()
    return run & (run.sum(dim=1, keepdim=True) > 1)


def _steps_before(sequence: Sequence, real: Tensor | None) -> Same:
    """Return which places of any tensor of the model come before the steps that were changed.

    A tensor may have several dimensions of that length, as scores of attention have: there, what
    comes before in all of them at once should be equal, too.

    Args:
        sequence: what was changed.
        real: which of ``(samples, steps)`` hold no padding, where that is known.
    """
    length = sequence.length
    before = torch.arange(length) < sequence.half

    def same(tensor: Tensor) -> Iterator[Tensor]:
        axes = [axis for axis, size in enumerate(tensor.shape) if size == length]
        masks = [along(before, tensor, axis) for axis in axes]
        if real is not None and tensor.ndim and tensor.shape[0] == len(real):
            masks = [
                mask & along(real, tensor, 0, axis) if axis else mask
                for axis, mask in zip(axes, masks, strict=True)
            ]
        yield from masks
        if len(masks) > 1:
            yield functools.reduce(torch.logical_and, masks)
        yield from folded(before, tensor, is_exact=bool(axes))

    return same


def _reads(gradient: Tensor | None, output: Tensor, axis: int) -> Any:
    """Return at which places of an output the loss looks, to broadcast; ``True`` where unknown."""
    if gradient is None:
        return True
    rest = [d for d in range(output.ndim) if d not in (0, axis)]
    asked = gradient != 0
    return asked.amax(dim=rest, keepdim=True) if rest else asked
