"""A change of a batch, its effect on outputs that it should leave alone, and where that begins.

A probe of a leak says which batch is changed and which places of a tensor should stay: `effects`
runs it, and `parting` looks for the layer where what should stay does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.probes.conventions import NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.batches import Values, is_number
from pytest_modelhealth.probes.intervening.running import Difference, Runs, least_difference


class Change(NamedTuple):
    """What is run beside the unchanged batch."""

    text: str  # what is changed, for people
    values: Values
    # gives, for a tensor of the model, the places in it that should be equal: a mask for each way
    # in which its dimensions can be read, none where they cannot
    same: Callable[[Tensor], Iterator[Tensor]]
    of_loss: bool = False  # whether outputs count only where the loss reads them, if any is read
    seed: int | None = None  # of the random numbers; ``None`` takes those of every run
    within: Callable[[], AbstractContextManager[Any]] = nullcontext  # where that changes the run
    # gives, for a tensor and that of the changed run, what selects the rows of the second from the
    # first, in each way to read its dimensions; ``None`` has them stay in place
    rows: Callable[[Tensor, Tensor], Iterator[Callable[[Tensor], Tensor]]] | None = None

    def difference(
        self, before: Tensor, after: Tensor, read: Tensor | None = None
    ) -> Difference | None:
        """Return how far two tensors are apart in places that should be equal.

        Args:
            read: which places count; ``None`` is all.
        """
        masks = list(self.same(before))
        if read is not None:
            masks = [mask & read for mask in masks]
        if self.rows is None:
            return least_difference((before, after, mask) for mask in masks)
        return least_difference(
            (rows(before), after, rows(mask.expand_as(before)))
            for rows in (self.rows(before, after) if masks else ())
            for mask in masks
        )


class Effect(NamedTuple):
    """What a change does to an output where it should do nothing; a difference of 0 is none."""

    difference: Difference
    output: int
    change: Change


def effects(runs: Runs, *changes: Change, lacking: str, must_move: bool = True) -> list[Effect]:
    """Run changes, and return what each does to every output with places for it to leave alone.

    Where no output has such places, `lacking` is why nothing can be told.
    """
    effects, is_moved, has_places, text = list[Effect](), False, False, changes[0].text
    reads: Sequence[Tensor | None] = runs.read if changes[0].of_loss else ()
    base, is_read = runs.base, any(gradient is not None for gradient in reads)
    reads = reads or [None] * len(base.outputs)
    for change in changes:
        with change.within():
            ran = runs.forward(runs.batch.copy(change.values))
        if ran.error:
            raise UntellableError(f"with {text} the model raises {ran.error}", text)
        outputs = zip(base.outputs, ran.outputs, reads, strict=False)
        for n, (before, after, read) in enumerate(outputs):
            if not is_number(before) or (is_read and read is None):
                continue
            has_places = has_places or any(True for _ in change.same(before))
            difference = change.difference(before, after, None if read is None else read != 0)
            if difference is not None:
                effects.append(Effect(difference, n, change))
                is_moved = is_moved or not torch.equal(before, after)
    if not has_places:
        raise NotApplicableError(lacking, text)
    if must_move and not is_moved:
        raise UntellableError(
            f"with {text} no finite number of an output changes: give a batch that differs there, "
            "or train for a step first",
            text,
        )
    return effects or [Effect(Difference(0.0, "", 0.0, 0.0), -1, change)]


def moved_by(runs: Runs, *changes: Change, lacking: str) -> list[Effect]:
    """Return what changes do to outputs where they should do nothing."""
    return [one for one in effects(runs, *changes, lacking=lacking) if one.difference.effect > 0.0]


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


def rows_of(
    index: Tensor, count: int, before: Tensor, after: Tensor
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield what selects rows of an index out of so many, in each way to read a tensor.

    Where there are fewer rows than before, sizes tell which way. Otherwise ways are those of
    `readings`; it may hold no such rows, too.
    """
    is_cut, index = len(index) < count, index.to(before.device)

    def select(tensor: Tensor, axes: Sequence[int] = (), fold: Sequence[int] = ()) -> Tensor:
        if not fold:
            for axis in axes:
                tensor = tensor.index_select(axis, index)
            return tensor
        rows: Tensor = tensor.unflatten(axes[0], fold)
        return rows.index_select(axes[0] + fold.index(count), index).flatten(axes[0], axes[0] + 1)

    sizes = list(zip(before.shape, after.shape, strict=False))
    axes = [axis for axis, pair in enumerate(sizes) if pair == (count, len(index))]
    for way in [axes] if is_cut else [*([axis] for axis in axes), axes, []]:
        yield functools.partial(select, axes=way)
    for axis, (size, changed) in enumerate(sizes[:2] if 0 not in axes else ()):
        if size > count and size % count == 0 and changed * count == size * len(index):
            yield functools.partial(select, axes=[axis], fold=(count, -1))
            yield functools.partial(select, axes=[axis], fold=(-1, count))
