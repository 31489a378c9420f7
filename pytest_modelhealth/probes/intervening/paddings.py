"""Padding in a batch: where it is, and other values to stand there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.intervening.locating import ROUNDING, Apart, Same, apart
from pytest_modelhealth.probes.intervening.running import Ran, Runs, changeable

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
    names = _names(runs)
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
    is_said = why == "padding=" or any(word in why.lower() for word in _MASKS)
    is_one = any(len(runs.tensors[n][~real].unique()) == 1 for n in values)
    return Padding(real, values, why, is_said or is_one), ""


def _names(runs: Runs) -> list[str]:
    """Return the name of the argument that each tensor of the batch comes in."""
    arguments = Inputs.of(runs.request.inputs)
    declared = runs.positional
    named: list[tuple[str, Any]] = [
        (declared[n] if n < len(declared) else f"input {n}", value)
        for n, value in enumerate(arguments.args)
    ]
    named += list(arguments.kwargs.items())
    of_tensor: dict[int, str] = {}
    for name, value in named:
        inner = value.items() if isinstance(value, dict) else [(name, value)]
        for key, part in inner:
            for tensor in find_tensors(part):
                of_tensor.setdefault(id(tensor), str(key))
    return [of_tensor.get(id(tensor), "") for tensor in runs.tensors]


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


def refilled(runs: Runs, padding: Padding) -> Inputs:
    """Return the batch with real values of the batch in all padded places."""

    def change(number: int, tensor: Tensor) -> Tensor | None:
        if number not in padding.values:
            return None
        real = padding.real.to(tensor.device)
        given = tensor[real]
        generator = torch.Generator().manual_seed(_SEED)
        chosen = torch.randint(len(given), (int((~real).sum()),), generator=generator)
        made = tensor.clone()
        made[~real] = given[chosen.to(tensor.device)]
        return made

    return runs.changed(change)


def is_changed(runs: Runs, padding: Padding, batch: Inputs) -> bool:
    """Whether padded places hold other values than in the unchanged batch."""
    changed = changeable(batch)
    return any(not torch.equal(runs.tensors[n], changed[n]) for n in padding.values)


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
        elif tensor.ndim and sizes[0] == samples:
            masks = [_shaped(real, tensor, (0, axis)) for axis in axes]
            yield from masks
            if len(masks) > 1:
                yield torch.stack([m.expand(sizes) for m in masks]).all(dim=0)
        if tensor.ndim > 1 and sizes[:2] == (steps, samples):
            yield _shaped(real.T, tensor, (0, 1))
        if tensor.ndim and sizes[0] == samples * steps:
            yield _shaped(real.reshape(-1), tensor, (0,))
            yield _shaped(real.T.reshape(-1), tensor, (0,))

    return same


def _shaped(real: Tensor, tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    shape = [1] * tensor.ndim
    for axis, size in zip(axes, real.shape, strict=True):
        shape[axis] = size
    return real.reshape(shape)


def judged_places(output: Tensor, padding: Padding) -> Tensor | None:
    """Return which places of an output padding may have no effect on; ``None`` if none is known."""
    samples, steps = padding.real.shape
    if not output.is_floating_point() or not output.ndim or output.shape[0] != samples:
        return None
    real = padding.real.to(output.device)
    if output.ndim > 1 and output.shape[1] == steps:
        return _shaped(real, output, (0, 1))
    axes = [axis for axis in range(1, output.ndim) if output.shape[axis] == steps]
    if len(axes) == 1:
        return _shaped(real, output, (0, axes[0]))
    return None if axes else torch.ones((), dtype=torch.bool, device=output.device)


def largest_at_real_places(runs: Runs, ran: Ran, padding: Padding) -> Apart | None:
    """Return how far outputs are from those of the unchanged batch, where padding has no say.

    Returns:
        The largest difference, of an effect of 0 where rounding explains it; ``None`` where no
        output has a row for each sample.
    """
    found = []
    for before, after in zip(runs.base.outputs, ran.outputs, strict=False):
        places = judged_places(before, padding)
        one = None if places is None else apart(before, after, places)
        if one is not None:
            is_noise = one.effect <= ROUNDING.get(before.dtype, 1e-5)
            found.append(one._replace(effect=0.0) if is_noise else one)
    return max(found, default=None)
