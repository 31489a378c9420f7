"""Padding in a batch: where it is, and other values to stand there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.intervening.batches import along, named_inputs
from pytest_modelhealth.probes.intervening.differences import Apart, least_apart
from pytest_modelhealth.probes.intervening.locating import Place, Same, where_they_part
from pytest_modelhealth.probes.intervening.lookups import OtherRows
from pytest_modelhealth.probes.intervening.running import Ran, Runs

_SEED = 20_240_229
_KEPT = ("label", "target")
_LENGTHS = "len"
_MASKS = ("mask", "pad")


class Padding(NamedTuple):
    """Where a batch is padded.

    Args:
        real: which of ``(samples, steps)`` are real, a boolean.
        values: the numbers of the tensors whose padded places are given other values.
        why: what shows it, for people.
        is_sure: whether it is said to be padding, or what stands there is one and the same value:
            a mask may also tell first sentences from second ones.
    """

    real: Tensor
    values: tuple[int, ...]
    why: str
    is_sure: bool


def shown_by(runs: Runs) -> tuple[Padding | None, str]:
    """Return the padding that a mask or lengths in the batch show, or why none is seen."""
    said = runs.conventions.padding
    paths = (name.rpartition("['")[2] for name in named_inputs(runs))
    names = [path.removesuffix("']") for path in paths]
    if said is not None:
        return _of(runs, ~said, "padding=", names, frozenset())
    for number, tensor in enumerate(runs.tensors):
        if _is_mask(tensor):
            real = _real_side(runs, tensor)
            if real is not None:
                return _of(runs, real, f"{names[number]!r}", names, frozenset({number}))
        elif _LENGTHS in names[number].lower() and _are_lengths(tensor):
            longest = _length(runs, number, len(tensor))
            if longest:
                steps = torch.arange(longest, device=tensor.device)
                real = steps < tensor.reshape(-1, 1)
                return _of(runs, real, f"{names[number]!r}", names, frozenset({number}))
    return None, (
        "no mask (samples, steps) of zeros and ones and no lengths in the batch show padding; if "
        "there is some, say padding=ids == 0"
    )


def _of(
    runs: Runs, real: Tensor, why: str, names: list[str], masks: frozenset[int]
) -> tuple[Padding | None, str]:
    if bool(real.all()) or not bool(real.any()):
        return None, f"{why} shows no padding: all sequences are of one length; give some shorter"
    values = tuple(
        number
        for number, tensor in enumerate(runs.tensors)
        if number not in masks
        and tensor.shape[:2] == real.shape
        and not (tensor.ndim == 2 and _is_mask(tensor))
        and not any(word in names[number].lower() for word in _KEPT)
    )
    if not values:
        return None, f"nothing in the batch has the shape {tuple(real.shape)} of {why}"
    values = _padded_ones(runs, values, real)
    is_said = why == "padding=" or any(word in why.lower() for word in _MASKS)
    is_one = any(len(runs.tensors[n][~real].unique()) == 1 for n in values)
    return Padding(real, values, why, is_said or is_one), ""


def _padded_ones(runs: Runs, values: tuple[int, ...], real: Tensor) -> tuple[int, ...]:
    """Return the tensors that a mask is about: of those that may be, the ones that it explains.

    Where one holds a single value in all padded places, another that holds many there is a sequence
    of its own, as long by chance: the words of a decoder beside those of an encoder.
    """
    inside = {n: len(runs.tensors[n][~real].unique()) for n in values}
    outside = {n: len(runs.tensors[n][real].unique()) for n in values}
    if not any(inside[n] == 1 and outside[n] > _KINDS for n in values):
        return values
    return tuple(n for n in values if inside[n] == 1)


_KINDS = 2
"""Segments are of two kinds, and may be of one in padding that holds anything."""


def _is_mask(tensor: Tensor) -> bool:
    """Whether a tensor says of ``(samples, steps)`` yes or no, with one change a row at most."""
    if tensor.ndim != 2 or tensor.is_complex() or min(tensor.shape) < 2:
        return False
    if not bool(((tensor == 0) | (tensor == 1)).all()):
        return False
    said = tensor.bool()
    changes = (said[:, 1:] != said[:, :-1]).sum(dim=1)
    return bool((changes <= 1).all() and (changes == 1).any())


def _real_side(runs: Runs, mask: Tensor) -> Tensor | None:
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
    for tensor in runs.tensors:
        if tensor is not mask and tensor.shape[:2] == mask.shape:
            for real in (said, ~said):
                if len(tensor[~real].unique()) == 1 and len(tensor[real].unique()) > 1:
                    return real
    return None


def _are_lengths(tensor: Tensor) -> bool:
    is_count = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.ndim == 1
    return is_count and len(tensor) > 1 and bool((tensor >= 1).all())


def _length(runs: Runs, number: int, samples: int) -> int:
    """Return the number of steps of what lengths are given beside; 0 where nothing fits."""
    most = int(runs.tensors[number].max())
    for other, tensor in enumerate(runs.tensors):
        if other != number and tensor.ndim > 1 and tensor.shape[0] == samples:
            return tensor.shape[1] if tensor.shape[1] >= most else 0
    return 0


class Refill:
    """A run of the model in which something else stands in padding.

    Args:
        runs: runs the model.
        padding: where it is.
        looked_up: whether ids stay, and the rows that they are looked up as change instead.
        spared: how many padded places beside a real one stay as they are.
    """

    def __init__(
        self, runs: Runs, padding: Padding, *, looked_up: bool = False, spared: int = 0
    ) -> None:
        self._runs, self._padding, self._looked_up = runs, padding, looked_up
        real = padding.real.cpu()
        self._places = ~_widened(real, spared)
        generator = torch.Generator().manual_seed(_SEED)
        given = real.flatten().nonzero().flatten()
        count = int(self._places.sum())
        self._sources = given[torch.randint(len(given), (count,), generator=generator)]

    def batch(self) -> Inputs:
        """Return the batch with real values in padded places, save for ids that stay."""

        def change(number: int, tensor: Tensor) -> Tensor | None:
            if number not in self._padding.values or (self._looked_up and _is_id(tensor)):
                return None
            rows = tensor.flatten(0, 1)[self._sources.to(tensor.device)]
            return tensor.index_put((self._places.to(tensor.device),), rows)

        return self._runs.changed(change)

    def run(self) -> Ran | None:
        """Run it once; ``None`` where there is nothing to change."""
        if not bool(self._places.any()):
            return None
        if not self._looked_up:
            return self._runs.forward(self.batch(), with_loss=True)
        with self._rows() as rows:
            ran = self._runs.forward(self.batch(), with_loss=True)
        return ran if rows.count else None

    def where(self) -> Place | None:
        """Return where real places part from those of the unchanged batch."""
        runs, same = self._runs, real_places(self._padding)
        within = self._rows() if self._looked_up else None
        return where_they_part(runs, runs.batch(), self.batch(), same, within)

    def _rows(self) -> OtherRows:
        given = [self._runs.tensors[n] for n in self._padding.values]
        return OtherRows(list(filter(_is_id, given)), self._places, self._sources)


def _is_id(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool


def _widened(real: Tensor, by: int) -> Tensor:
    """Return real places with so many more on either side of each."""
    for _ in range(by):
        wider = real.clone()
        wider[:, 1:] |= real[:, :-1]
        wider[:, :-1] |= real[:, 1:]
        real = wider
    return real


def real_places(padding: Padding) -> Same:
    """Return which places of any tensor of the model are real.

    What has no dimension of steps is pooled, and should be equal as a whole; what has two, as
    scores of attention have, should be where both are real.
    """
    samples, steps = padding.real.shape

    def same(tensor: Tensor) -> Iterator[Tensor]:
        real = padding.real.to(tensor.device)
        sizes = tensor.shape
        axes = [axis for axis in range(1, tensor.ndim) if sizes[axis] == steps]
        if samples in sizes and steps not in sizes:
            yield torch.ones((), dtype=torch.bool, device=tensor.device)
            for axis in range(1, tensor.ndim - 1) if sizes[0] == samples else ():
                ways = list(_joined(real, tensor, axis))
                yield from ways
                if sizes[-1] == sizes[axis]:  # scores of attention
                    others = _joined(real, tensor, tensor.ndim - 1)
                    yield from (a & b for a, b in zip(ways, others, strict=True))
        elif tensor.ndim and sizes[0] == samples:
            masks = [along(real, tensor, 0, axis) for axis in axes]
            yield from masks
            if len(masks) > 1:
                yield torch.stack([m.expand(sizes) for m in masks]).all(dim=0)
        if tensor.ndim > 1 and sizes[:2] == (steps, samples):
            yield along(real.T, tensor, 0, 1)
        if tensor.ndim and sizes[0] == samples * steps:
            yield along(real.reshape(-1), tensor, 0)
            yield along(real.T.reshape(-1), tensor, 0)

    return same


def _joined(real: Tensor, tensor: Tensor, axis: int) -> Iterator[Tensor]:
    """Yield what is real of a longer dimension, that holds the steps first or last of all.

    Words are joined to the patches of an image, or to learnt places in front of them.
    """
    more = tensor.shape[axis] - real.shape[1]
    if more > 0:
        for sides in ((0, more), (more, 0)):
            yield along(F.pad(real, sides, value=True), tensor, 0, axis)


def judged_places(output: Tensor, padding: Padding) -> list[Tensor]:
    """Return which places of an output padding may have no effect on, in each way to read it.

    Of several ways that with the smallest difference counts; none where nothing is known.
    """
    samples, steps = padding.real.shape
    if not output.is_floating_point() or not output.ndim or output.shape[0] != samples:
        return []
    real = padding.real.to(output.device)
    if output.ndim > 1 and output.shape[1] == steps:
        return [along(real, output, 0, 1)]
    axes = [axis for axis in range(1, output.ndim) if output.shape[axis] == steps]
    if len(axes) == 1:
        return [along(real, output, 0, axes[0])]
    if axes:
        return []
    whole = torch.ones((), dtype=torch.bool, device=output.device)
    return [whole, *(_joined(real, output, 1) if output.ndim > 2 else ())]


def _nearness(output: Tensor, padding: Padding) -> int:
    """Return 2 for an output with a dimension of steps, 1 for one that may hold more, 0 for others.

    A state of many features for the step to come looks like steps that were joined to others.
    """
    steps = padding.real.shape[1]
    if steps in output.shape[1:]:
        return 2
    return int(output.ndim > 2 and output.shape[1] > steps)


class Effects(NamedTuple):
    """How far outputs are from those of the unchanged batch, where padding has no say.

    Args:
        asked: the largest difference of those that count, of an effect of 0 where rounding explains
            it; ``None`` where no output has a row for each sample.
        aside: likewise, of what stands beside the steps where no loss tells whether it is used.
    """

    asked: Apart | None
    aside: Apart | None


def effects_of(runs: Runs, ran: Ran, padding: Padding) -> Effects:
    """Return what a run shows beside the unchanged one.

    Where a loss of the user's or of the model's is known, what stands beside the steps and is not
    read by it is left out: a state for the step to come.
    """
    base = runs.base
    looked = [g is not None and bool((g != 0).any()) for g in base.read]
    judged = [t for t in base.outputs if judged_places(t, padding)]
    nearest = max((_nearness(t, padding) for t in judged), default=0)
    asked: list[Apart] = []
    aside: list[Apart] = []
    for n, (before, after) in enumerate(zip(base.outputs, ran.outputs, strict=False)):
        one = least_apart(before, after, judged_places(before, padding))
        if one is None:
            continue
        is_beside = _nearness(before, padding) < nearest
        if is_beside and base.loss is not None and any(looked) and not looked[n]:
            continue
        (aside if is_beside and base.loss is None else asked).append(one)
    return Effects(max(asked, default=None), max(aside, default=None))


def asks_for_the_first_step(runs: Runs, padding: Padding) -> bool:
    """Whether, of padding, the loss reads only the last place before real ones begin.

    A loss that looks one step ahead asks there for the first real step.
    """
    real = padding.real
    ahead = torch.zeros_like(real)
    ahead[:, :-1] = real[:, 1:]
    read = [g for g in runs.base.read if g is not None and g.shape[:2] == real.shape]
    places = [(g != 0).reshape(*real.shape, -1).any(dim=-1) & ~real.to(g.device) for g in read]
    return bool(places) and not any(bool((p & ~ahead.to(p.device)).any()) for p in places)
