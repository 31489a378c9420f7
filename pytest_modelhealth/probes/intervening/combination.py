"""All changes that a batch shows to apply, made at once: one run, if nothing moves that should not.

Later steps, padding and the order of the samples change in separate places, so that each output
still tells what it should be.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from pytest_modelhealth.probes.conventions import Effects, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.batches import SEED, is_number, permutation
from pytest_modelhealth.probes.intervening.future import asked_sequence, permuted
from pytest_modelhealth.probes.intervening.leaks import Change, effects, rows_of
from pytest_modelhealth.probes.intervening.padding import padding_in
from pytest_modelhealth.probes.intervening.running import Runs, are_apart


def ends_of(runs: Runs, names: Sequence[str]) -> dict[str, Effects | UntellableError]:
    """Return how those of these probes end that need no run of their own.

    One that is left out has something to look into, or its change cannot be told from another.
    """
    ends, changes = dict[str, Effects | UntellableError](), dict[str, Change]()
    with runs.held():
        for name in filter(names.__contains__, _CHANGES):
            try:
                change = _CHANGES[name](runs)
            except UntellableError as end:
                ends[name] = end
            else:
                if change is not None and runs.batch.is_changed(change.values):
                    changes[name] = change
        with suppress(UntellableError):
            if changes and _leave_alone_what_they_should(runs, [*changes.values()]):
                ends |= {name: Effects(change.text) for name, change in changes.items()}
    return ends


def reordered(runs: Runs, *, halved: bool = False) -> Change:
    """Return the change to another order, of all of them or of half."""
    samples = runs.batch.ordered_samples
    if runs.base.drew:
        another = runs.forward(runs.batch.copy(), seed=SEED)
        if are_apart(runs.base.outputs, another.outputs):
            raise NotApplicableError("it draws random numbers, which do not follow its samples")
    count = samples.number
    order = permutation(count)[: max(2, count // 2) if halved else count]

    def same(tensor: Tensor) -> Iterator[Tensor]:
        if count in tensor.shape:
            yield tensor.new_ones((), dtype=torch.bool)

    rows = partial(rows_of, order, count)
    return Change("samples permuted", samples.select(order), same, rows=rows)


_CHANGES: dict[str, Callable[[Runs], Change | None]] = {
    "causality": lambda runs: permuted(runs, s) if (s := asked_sequence(runs)).shift == 1 else None,
    "padding": lambda runs: padding_in(runs).change(),
    # half of the samples cost less, and sizes tell which rows are theirs
    "sample_independence": lambda runs: reordered(runs, halved=True),
}
"""In the order in which they are made: samples are permuted as they have become."""


def _leave_alone_what_they_should(runs: Runs, changes: list[Change]) -> bool:
    """Whether no output moves that should not, where each has places for all changes to leave."""

    def values(number: int, tensor: Tensor) -> Tensor:
        for change in changes:
            after = change.values(number, tensor)
            tensor = tensor if after is None else after
        return tensor

    def same(tensor: Tensor) -> Iterator[Tensor]:
        ways = itertools.product(*(change.same(tensor) for change in changes))
        return (functools.reduce(torch.logical_and, masks) for masks in ways)

    of_loss, rows = any(change.of_loss for change in changes), changes[-1].rows
    every = Change("all changes at once", values, same, of_loss, rows=rows)
    seen = effects(runs, every, lacking="no output has rows", must_move=False)
    judged, read = {one.output for one in seen}, runs.read if of_loss else ()
    is_read = any(gradient is not None for gradient in read)
    has_others = any(
        any(any(True for _ in change.same(output)) for change in changes)
        for n, output in enumerate(runs.base.outputs)
        if is_number(output) and n not in judged and not (is_read and read[n] is None)
    )
    return not (has_others or any(one.difference.effect > 0.0 for one in seen))
