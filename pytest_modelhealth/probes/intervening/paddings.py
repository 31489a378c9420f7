"""Padding in a batch: what shows it, and which places of a tensor are real."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_modelhealth.probes.conventions import NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.batches import along, named_inputs
from pytest_modelhealth.probes.intervening.locating import Same
from pytest_modelhealth.probes.intervening.running import Runs

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


def shown_by(runs: Runs) -> Padding:
    """Return the padding that a mask or lengths in the batch show.

    Raises:
        UntellableError: none is seen, or it is of nothing in the batch.
    """
    paths = (name.rpartition("['")[2] for name in named_inputs(runs))
    names = [path.removesuffix("']") for path in paths]
    said = runs.conventions.padding
    why, shows, real = "padding=", -1, None if said is None else ~said
    for number, tensor in enumerate(runs.tensors if said is None else ()):
        if _is_mask(tensor):
            real = _real_side(runs, tensor)
        elif _LENGTHS in names[number].lower():
            real = _up_to(runs, tensor)
        if real is not None:
            why, shows = f"{names[number]!r}", number
            break
    untellable = NotApplicableError if said is None else UntellableError
    if real is None:
        raise untellable(
            "no mask (samples, steps) of zeros and ones and no lengths in the batch show padding; "
            "if there is some, say padding=ids == 0"
        )
    if bool(real.all()) or not bool(real.any()):
        raise untellable(
            f"{why} shows no padding: all sequences are of one length; give some shorter"
        )
    values = tuple(
        number
        for number, tensor in enumerate(runs.tensors)
        if number != shows
        and tensor.shape[:2] == real.shape
        and not (tensor.ndim == 2 and _is_mask(tensor))
        and not any(word in names[number].lower() for word in _KEPT)
    )
    if not values:
        raise untellable(f"nothing in the batch has the shape {tuple(real.shape)} of {why}")
    values = _padded_ones(runs, values, real)
    is_said = why == "padding=" or any(word in why.lower() for word in _MASKS)
    is_one = any(len(runs.tensors[n][~real].unique()) == 1 for n in values)
    return Padding(real, values, why, is_said or is_one)


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


def _up_to(runs: Runs, lengths: Tensor) -> Tensor | None:
    """Return which places lie within lengths; ``None`` where they fit nothing beside them."""
    is_count = not (lengths.is_floating_point() or lengths.is_complex()) and lengths.ndim == 1
    if not is_count or len(lengths) < 2 or not bool((lengths >= 1).all()):
        return None
    for other in runs.tensors:
        if other is not lengths and other.ndim > 1 and len(other) == len(lengths):
            steps = torch.arange(other.shape[1], device=lengths.device)
            return steps < lengths.reshape(-1, 1) if len(steps) >= int(lengths.max()) else None
    return None


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
