"""A change of a batch, the places that it should leave alone, and its effect on the outputs there.

A probe of a leak says which batch is changed and which places of a tensor should stay: here is what
it runs, and `locating` has the layer where what should stay does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.conventions import UntellableError
from pytest_modelhealth.probes.intervening.differences import Apart, apart, least_apart
from pytest_modelhealth.probes.intervening.running import Ran, Runs

Same = Callable[[Tensor], Iterator[Tensor]]
"""Gives, for a tensor of the model, the places in it that should be equal: a mask for each way in
which its dimensions can be read, none where they cannot."""


class Change(NamedTuple):
    """What is run beside the unchanged batch."""

    text: str  # what is changed, for people
    batch: Callable[[], Inputs]
    same: Same
    of_loss: bool = False  # whether outputs count only where the loss reads them, if any is read
    seed: int | None = None  # of the random numbers; ``None`` takes those of every run
    within: Callable[[], AbstractContextManager[Any]] = nullcontext  # where that changes the run
    before: Callable[[], Inputs] | None = None  # what layers are held against, if not the batch


class Effect(NamedTuple):
    """What a change does to an output where it should do nothing; a difference of 0 is none."""

    apart: Apart
    output: int
    change: Change
    ran: Ran


def effects(runs: Runs, *changes: Change, lacking: str, must_move: bool = True) -> list[Effect]:
    """Run changes, and return what each does to every output with places for it to leave alone.

    Where no output has such places, `lacking` is why nothing can be told; ``""`` lets that be.
    """
    effects, is_moved, has_places, text = list[Effect](), False, False, changes[0].text
    for change in changes:
        with change.within():
            ran = runs.forward(change.batch(), seed=change.seed, with_loss=change.of_loss)
        if ran.error:
            raise UntellableError(f"with {text} the model raises {ran.error}", text)
        for n, (before, after) in enumerate(zip(runs.base.outputs, ran.outputs, strict=False)):
            masks = list(_judged(runs, change, n, before))
            has_places = has_places or bool(masks)
            difference = least_apart(before, after, masks)
            if difference is not None:
                effects.append(Effect(difference, n, change, ran))
                whole = apart(before, after)
                is_moved = is_moved or (whole is not None and whole.effect > 0.0)
    if lacking and not has_places:
        raise UntellableError(lacking, text)
    if must_move and not is_moved:
        raise UntellableError(
            f"with {text} no finite number of an output changes: give a batch that differs there, "
            "or train for a step first",
            text,
        )
    return effects or [Effect(Apart(0.0, (), 0.0, 0.0), -1, change, ran)]


def _judged(runs: Runs, change: Change, number: int, output: Tensor) -> Iterator[Tensor]:
    """Yield which places of an output should stay, in each way to read it."""
    if not (output.is_floating_point() or output.is_complex()):
        return
    gradients = runs.base.read if change.of_loss else []
    if not any(gradient is not None for gradient in gradients):
        yield from change.same(output)
    elif (gradient := gradients[number]) is not None:
        yield from (mask & (gradient != 0) for mask in change.same(output))


def along(which: Tensor, tensor: Tensor, *axes: int) -> Tensor:
    """Return a mask of some dimensions, in ascending order, so that it broadcasts to a tensor."""
    shape = [1] * tensor.ndim
    for axis, size in zip(axes, which.shape, strict=True):
        shape[axis] = size
    return which.reshape(shape).to(tensor.device)


def readings(which: Tensor, tensor: Tensor) -> Iterator[Tensor]:
    """Yield the places of a tensor that are meant, in each way to read its dimensions.

    Each dimension as long as the mask may be the one, and where several are, as of scores of
    attention, all at once. A longer one may be folded: so many groups, or groups of so many.
    """
    count = len(which)
    axes = [axis for axis, size in enumerate(tensor.shape) if size == count]
    masks = [along(which, tensor, axis) for axis in axes]
    yield from masks
    if len(masks) > 1:
        yield functools.reduce(torch.logical_and, masks)
    if 0 not in axes:  # features may be a multiple by chance
        for axis, size in enumerate(tensor.shape[:2] if axes else tensor.shape):
            if size > count and size % count == 0:
                yield along(which.repeat_interleave(size // count), tensor, axis)
                yield along(which.repeat(size // count), tensor, axis)
