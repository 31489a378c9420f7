"""Later steps of a sequence permuted, and what earlier ones see of that."""

from __future__ import annotations

from dataclasses import replace

import torch

from pytest_modelhealth.probes.endings import Found, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.batches import along
from pytest_modelhealth.probes.intervening.differences import Apart, apart, is_rounding
from pytest_modelhealth.probes.intervening.locating import parting_at, where_they_part
from pytest_modelhealth.probes.intervening.running import Ran, Runs
from pytest_modelhealth.probes.intervening.sequences import (
    Sequence,
    predicted,
    reads,
    said_to_be,
    seen,
    steps_before,
    steps_of,
    unlike_widths,
)
from pytest_modelhealth.report import Parting


def what_early_steps_see(runs: Runs) -> Found:
    """Return where outputs depend on later steps.

    Raises:
        UntellableError: nothing can be told, or nobody claims that the model is causal.
    """
    said = runs.conventions.causal
    if said is False:
        raise NotApplicableError("causal=False says that outputs may see later inputs")
    base = runs.base
    sequences = said_to_be(runs) if said else predicted(runs)
    if not sequences and said:
        raise UntellableError("causal=True, but the batch holds no sequence of two steps")
    if not sequences:
        raise NotApplicableError(
            "the target is no input one step later; if no output may depend on later inputs, say "
            "causal=True"
        )
    sequence = _along_time(runs, base, sequences)
    changed = f"steps {sequence.half} to {sequence.length - 1} permuted ({sequence.why})"
    batch = steps_of(runs, sequence, changed="later")
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
    clear, place = unlike_widths(runs, sequence), None
    for one in dict.fromkeys((clear, sequence)):
        same = steps_before(one, seen(runs, one))
        batches = steps_of(runs, one), steps_of(runs, one, changed="later")
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
        after_later = runs.forward(steps_of(runs, sequence, changed="later"))
        after_earlier = runs.forward(steps_of(runs, sequence, changed="earlier"))
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
    real = seen(runs, sequence)
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
            read = early & reads(gradient, output, axis)
            if real is not None and axis and output.shape[0] == len(real):
                read = read & along(real, output, 0, axis)
            found, later = (apart(output, ran.outputs[n], at) for at in (read, ~early))
            ways += [(found, later)] if found is not None and later is not None else []
        for found, later in sorted(ways)[:1]:
            is_noise = is_rounding(found, output.dtype)
            before.append(found._replace(effect=0.0) if is_noise else found)
            after += [later] if later.effect > 0.0 or found.effect > 0.0 else []
    return before, after
