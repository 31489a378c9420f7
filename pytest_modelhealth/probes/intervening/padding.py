"""Other values put into the padding of a batch, and what real places see of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pytest_modelhealth.probes.conventions import Effects, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.batches import SEED, is_mask, is_number, names_of
from pytest_modelhealth.probes.intervening.leaks import Change, along, effects
from pytest_modelhealth.probes.intervening.partings import parting
from pytest_modelhealth.probes.intervening.running import Runs

_KEPT = ("label", "target")
_LENGTHS = "len"
_MASKS = ("mask", "pad")
_MERGED = range(2, 5)
"""Models make one step of so many, as a rule."""
_SEGMENTS = 2
"""Sentences are of two kinds, and may be of one in padding that holds anything."""


def what_padding_does(runs: Runs) -> Effects:
    """Put real values into padded places, and return what follows.

    Ids stay where rows are looked up by them, and get other rows: models derive positions, masks
    and the place that they read from ids, and other ids change these too.
    """
    padding = padding_in(runs)
    steps = padding.real.shape[1]
    change = padding.change()
    if not runs.batch.is_changed(change.values):
        raise UntellableError("padding holds what real places hold; give a batch that differs")
    ids = [t for n in padding.values if _is_id(t := runs.batch.tensors[n])]
    rows, lacking = _OtherRows(ids, padding.fill), "no output has a row for each sample"
    by_rows = padding.change(with_ids=False, within=lambda: rows if ids else nullcontext())
    seen = effects(runs, by_rows, lacking=lacking, must_move=False)
    if rows.count or not ids:
        change = by_rows
    else:  # nothing looks the ids up: they are changed themselves
        seen = effects(runs, change, lacking=lacking, must_move=False)
    if not any(gradient is not None for gradient in runs.read):  # a last state may be unused
        shapes = [runs.base.outputs[one.output].shape for one in seen]
        has = [(steps in s[1:], len(s) > 2) for s in shapes]
        seen = [one for one, has_steps in zip(seen, has, strict=True) if has_steps == max(has)]
    worst = max(one.difference for one in seen)
    if not worst.effect > 0.0:
        return Effects(change.text)
    if not padding.is_sure:
        raise NotApplicableError(
            f"{padding.why} may show padding or something else, and values there have an effect; "
            "if it is padding, say padding=",
            change.text,
        )

    def kind(place: Any) -> str:
        taker = place.parting.taker if place is not None else ""
        layers = place.observation.layers if place is not None else {}
        tensor = layers[taker].inputs if taker else place and place.record.activations
        shape = () if tensor is None or steps in tensor.shape else tensor.shape[1:]
        merged = {n for of in _MERGED for n in (steps // of, -(-steps // of))}
        return "merged" if len(shape) > 1 and merged & set(shape) else "values"

    return Effects(change.text, [parting(runs, change, worst, kind)])


# ---- where it is ---------------------------------------------------------------------------------


def padding_in(runs: Runs) -> _Padding:
    """Return the padding that a mask or lengths in the batch show."""
    asked = runs.batch.conventions.padding
    may_show = asked is not None or any(t.ndim == 1 or is_mask(t) for t in runs.batch.tensors)
    if may_show:
        _ = runs.read  # first, as it may need the whole batch
    found = names_of(runs.batch, runs.model) if may_show else [""] * len(runs.batch.tensors)
    names = [name.rpartition("['")[2].removesuffix("']") for name in found]
    why, shows, real = "padding=", -1, None if asked is None else ~asked
    for number, tensor in enumerate(runs.batch.tensors if asked is None else ()):
        if is_mask(tensor):
            real = real_side(runs, tensor)
        elif _LENGTHS in names[number].lower():
            real = _up_to(runs, tensor)
        if real is not None:
            why, shows = f"{names[number]!r}", number
            break
    untellable = NotApplicableError if asked is None else UntellableError
    if real is None:
        raise untellable(
            "no mask (samples, steps) of zeros and ones and no lengths in the batch show padding; "
            "if there is some, say padding=ids == 0"
        )
    if bool(real.all()) or not bool(real.any()):
        raise untellable(
            f"{why} shows no padding: all sequences are of one length; give some shorter"
        )
    values = {
        number: len(tensor[~real].unique())
        for number, tensor in enumerate(runs.batch.tensors)
        if number != shows
        and tensor.shape[:2] == real.shape
        and not (tensor.ndim == 2 and is_mask(tensor))
        and not any(word in names[number].lower() for word in _KEPT)
    }
    if not values:
        raise untellable(f"nothing in the batch has the shape {tuple(real.shape)} of {why}")
    # Beside one with a single value there, one with many is another sequence, as long by chance.
    if any(
        n == 1 and len(runs.batch.tensors[t][real].unique()) > _SEGMENTS for t, n in values.items()
    ):
        values = {number: kinds for number, kinds in values.items() if kinds == 1}
    is_sure = asked is not None or any(word in why.lower() for word in _MASKS)
    return _Padding(real, tuple(values), why, is_sure or 1 in values.values())


def real_side(runs: Runs, mask: Tensor) -> Tensor | None:
    """Return which places of a mask are real: the side on which all rows agree.

    Where they agree on both, padding is the side on which all values are one and the same.
    """
    said = mask.bool()
    first, last = said[:, 0], said[:, -1]
    agree_first, agree_last = bool((first == first[0]).all()), bool((last == last[0]).all())
    if agree_first and not agree_last:
        return said == first[0]
    if agree_last and not agree_first:
        return said == last[0]
    if not agree_first or bool(first[0]) == bool(last[0]):
        return None
    for tensor in runs.batch.tensors:
        if tensor is not mask and tensor.shape[:2] == mask.shape:
            for real in (said, ~said):
                if len(tensor[~real].unique()) == 1 and len(tensor[real].unique()) > 1:
                    return real
    return None


def _up_to(runs: Runs, lengths: Tensor) -> Tensor | None:
    """Return which places lie within lengths; ``None`` where they fit nothing beside them."""
    if is_number(lengths) or lengths.ndim != 1 or len(lengths) < 2 or bool((lengths < 1).any()):
        return None
    for other in runs.batch.tensors:
        if other is not lengths and other.ndim > 1 and len(other) == len(lengths):
            steps = torch.arange(other.shape[1], device=lengths.device)
            return steps < lengths.reshape(-1, 1) if len(steps) >= int(lengths.max()) else None
    return None


def _real_places(real: Tensor, tensor: Tensor) -> Iterator[Tensor]:
    """Yield which places of a tensor of the model are real, in each way to read its dimensions.

    What has no dimension of steps is pooled, and should be equal as a whole; what has two, as
    scores of attention have, should be where both are real. A longer one holds the steps first or
    last of all: words are joined to the patches of an image, or to learnt places in front of them.
    """
    (samples, steps), sizes, real = real.shape, tensor.shape, real.to(tensor.device)
    lengths = {size for size in sizes[1:] if size >= steps} if samples in sizes[:1] else set()
    for length in sorted(lengths):
        axes = [axis for axis in range(1, tensor.ndim) if sizes[axis] == length]
        if length > steps and axes[0] == tensor.ndim - 1:
            continue  # features
        for sides in {(0, length - steps), (length - steps, 0)}:
            line = F.pad(real, sides, value=True)
            masks = [along(line, tensor, 0, axis) for axis in axes]
            yield from masks
            if len(masks) > 1:
                yield torch.stack([mask.expand(sizes) for mask in masks]).all(dim=0)
    if samples in sizes and steps not in (sizes[1:] if sizes[0] == samples else sizes):
        yield torch.ones((), dtype=torch.bool, device=tensor.device)
    if sizes[:2] == (steps, samples):
        yield along(real.T, tensor, 0, 1)
    if sizes[:1] == (samples * steps,):
        yield along(real.reshape(-1), tensor, 0)
        yield along(real.T.reshape(-1), tensor, 0)


# ---- what is put there ---------------------------------------------------------------------------


class _Padding(NamedTuple):
    """Where a batch is padded, and the batch with values of real places there."""

    real: Tensor  # which of ``(samples, steps)`` are real, a boolean
    values: tuple[int, ...]  # which of `Batch.tensors` have padded places
    why: str  # what shows it, for people
    is_sure: bool  # a mask that nobody calls one may tell first sentences from second ones

    def fill(self, tensor: Tensor) -> Tensor:
        """Return a tensor with rows of real places in padded ones, always the same."""
        real = self.real.to(tensor.device)
        sources, count = real.flatten().nonzero().flatten(), int((~real).sum())
        order = torch.randint(len(sources), (count,), generator=torch.Generator().manual_seed(SEED))
        return tensor.index_put((~real,), tensor.flatten(0, 1)[sources[order.to(tensor.device)]])

    def change(self, *, with_ids: bool = True, within: Any = nullcontext) -> Change:
        """Return the change of what stands in padding; ids stay if told to."""

        def values(number: int, tensor: Tensor) -> Tensor | None:
            is_kept = number not in self.values or (_is_id(tensor) and not with_ids)
            return None if is_kept else self.fill(tensor)

        share = float((~self.real).float().mean())
        text = f"real values in the padding ({share:.0%} of the places, by {self.why})"
        return Change(text, values, partial(_real_places, self.real), of_loss=True, within=within)


class _OtherRows(TorchFunctionMode):
    """While on, ids of the batch that a table is asked for get rows of other places.

    Attributes:
        count: how many lookups were changed.
    """

    def __init__(self, ids: list[Tensor], fill: Any) -> None:
        super().__init__()
        self._ids, self._fill, self.count = ids, fill, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and exchange rows of what it returns if it looks up ids of the batch."""
        result = func(*args, **(kwargs or {}))
        tables = F.embedding, Tensor.__getitem__
        asked: Any = args[tables.index(func)] if func in tables else None
        if not isinstance(asked, Tensor) or not isinstance(result, Tensor) or not _is_id(asked):
            return result
        alike = (
            asked.shape == i.shape and bool((asked == i.to(asked.device)).all()) for i in self._ids
        )
        if result.shape[:2] != asked.shape or not any(alike):
            return result
        self.count += 1
        return self._fill(result)


def _is_id(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool
