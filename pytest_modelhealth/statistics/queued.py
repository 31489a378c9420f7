"""The torch kernel, for other devices and for what the compiled one does not read.

It asks the device for nothing, so nobody waits for it. Every result has a size that is known
beforehand, and stays on the device until it is fetched, with those of all other tensors at once.
Values are widened to float64, or to float32 on a device that has no float64: sums are scaled so
that nothing overflows, and right to float32 rounding there.
Why, and what was not measured: docs/decisions/0006-deferred-reduction.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelhealth.statistics.tensor_statistics import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    ExponentCounts,
    Subject,
    TensorStatistics,
    UnitStatistics,
)

CHUNK_ELEMENTS = 1 << 14
"""Elements widened at a time on a CPU: they stay in its cache, and all are in the histogram."""

ACCELERATOR_CHUNK_ELEMENTS = 1 << 22
"""The same elsewhere, where every chunk costs a few round trips to the device."""

EXACT_HISTOGRAM = 1 << 14
"""A piece with up to this many finite values that are not zero has all in its histogram."""

MOST_SKIPPED = 64
"""Of a larger piece at least one in this many is in the histogram."""

_ROWS = 2 * (HIGHEST_EXPONENT - LOWEST_EXPONENT + 1)
_COUNTS, _REALS = 5, 4
_NUMBERS = _COUNTS + _REALS + _ROWS


class Queued(NamedTuple):
    """What a device will have found in one tensor.

    Args:
        numbers: int64, on the device: for each piece of the tensor its counts, its reals and the
            rows of its histogram, then the least value of each unit and then the greatest. Reals
            are there by their bits.
        pieces: number of pieces.
        units: number of units.
        real: ``float64`` or ``float32``, what the reals are.
    """

    numbers: Tensor
    pieces: int
    units: int
    real: torch.dtype


def queue(values: Tensor, dim: int | None, real: torch.dtype | None = None) -> Queued:
    """Have the device look at `values`, and return at once.

    Args:
        values: real and strided.
        dim: the dimension of the units; ``None`` for no units.
        real: what to compute in; ``None`` for the widest that the device has.
    """
    if real is None:
        real = torch.float32 if values.device.type == "mps" else torch.float64
    is_cpu = values.device.type == "cpu"
    size = CHUNK_ELEMENTS if is_cpu else ACCELERATOR_CHUNK_ELEMENTS
    pieces = [_look_at(piece.to(real)) for piece in chunks(values, size)]
    parts, units = list(pieces), 0
    if dim is not None and values.numel():
        units = values.shape[dim]
        others = [d for d in range(values.ndim + 1) if d != dim]
        parts += [_bits(f(values.unsqueeze(-1), others).to(real)) for f in (torch.amin, torch.amax)]
    numbers = torch.cat(parts) if parts else values.new_empty(0, dtype=torch.int64)
    return Queued(numbers, len(pieces), units, real)


def chunks(values: Tensor, size: int) -> Iterator[Tensor]:
    """Yield all elements, in any order, in flat pieces; at most one piece is a copy at a time."""
    by_stride = sorted(range(values.ndim), key=values.stride, reverse=True)
    if values.numel():
        yield from _split(values.permute(by_stride), size)


def _split(values: Tensor, size: int) -> Iterator[Tensor]:
    if values.is_contiguous():
        yield from values.view(-1).split(size)
    elif values.numel() <= size:
        yield values.reshape(-1)
    else:
        rows = size * len(values) // values.numel()
        blocks = values.split(rows) if rows else values
        for block in blocks:
            yield from _split(block, size)


def fetch_all(queued: Sequence[Queued]) -> list[npt.NDArray[np.int64]]:
    """Return the numbers of each, in one transfer from each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in queued:
        by_device.setdefault(one.numbers.device, []).append(one.numbers)
    fetched = {}
    for device, numbers in by_device.items():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type == device.type:
            torch.accelerator.synchronize(device)  # a hook may have run in a stream of the user's
        arrived = torch.cat(numbers).cpu().numpy()
        fetched[device] = iter(np.split(arrived, np.cumsum([len(n) for n in numbers])[:-1]))
    return [next(fetched[one.numbers.device]) for one in queued]


def decode(queued: Queued, numbers: npt.NDArray[np.int64], subject: Subject) -> TensorStatistics:
    """Return the statistics of a tensor.

    Args:
        queued: what was queued.
        numbers: its numbers, fetched.
        subject: what was known of the tensor before.
    """
    nothing = found = subject.zeros(0)
    for start in range(0, queued.pieces * _NUMBERS, _NUMBERS):
        piece = _piece(numbers[start : start + _NUMBERS], queued.real, nothing)
        found = found.merge(piece)
    if queued.units and subject.observations is not None:
        low, high = _reals(numbers[queued.pieces * _NUMBERS :], queued.real).reshape(2, -1)
        found.units = UnitStatistics.of_extremes(low, high, subject.observations, found.abs_max)
    return found


def _look_at(wide: Tensor) -> Tensor:
    """Return the numbers of one flat piece."""
    finite = wide.isfinite()
    count = finite.sum()
    ill = [wide.isnan().sum(), wide.isposinf().sum(), wide.isneginf().sum()]
    counts = torch.stack([*ill, (wide == 0).sum(), count])
    low = wide.where(finite, math.inf).amin()
    high = wide.where(finite, -math.inf).amax()
    scale = _scale(torch.maximum(-low, high))
    scaled = wide.where(finite, 0.0) * scale
    mean = scaled.sum() / count
    deviations = (scaled - mean).where(finite, 0.0)
    std = (deviations.square().sum() / count).sqrt()
    reals = torch.stack([low, high, mean / scale, std / scale])
    return torch.cat([counts, _bits(reals), _rows(wide, finite & (wide != 0))])


class _Format(NamedTuple):
    """A floating-point format: its integers, the bits below the exponent, the exponent's bias.

    Between 2 to the power of `least` and `most`, sums and squares stay in range as they are.
    """

    integer: torch.dtype
    mantissa: int
    bias: int
    least: int
    most: int


_FORMATS = {
    torch.float64: _Format(torch.int64, 52, 1023, -450, 500),
    torch.float32: _Format(torch.int32, 23, 127, -30, 40),
}


def _exponents(wide: Tensor) -> Tensor:
    """Return the binary exponent of each number; that of a subnormal is too large."""
    form = _FORMATS[wide.dtype]
    return ((wide.view(form.integer) >> form.mantissa) & (2 * form.bias + 1)) - form.bias


def _scale(abs_max: Tensor) -> Tensor:
    """Return the power of two that keeps sums and squares in range; mostly 1."""
    form = _FORMATS[abs_max.dtype]
    exponent = _exponents(abs_max)
    far = (exponent < form.least) | (exponent > form.most)
    shift = (-exponent).clamp(-form.bias + 23, form.bias - 23).where(far, 0)
    return ((shift + form.bias) << form.mantissa).view(abs_max.dtype)


def _rows(wide: Tensor, chosen: Tensor) -> Tensor:
    """Count the chosen values, or a sample of them, by exponent and sign."""
    weights = chosen.to(torch.int64)
    size = max(min(len(wide), EXACT_HISTOGRAM), len(wide) // MOST_SKIPPED)
    if size < len(wide):
        places, weights = _sample(weights.cumsum(0), size)
        wide = wide.take(places)
    exponents = _exponents(wide).clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT
    rows = (2 * exponents + (wide > 0)).to(torch.int64)
    return torch.zeros(_ROWS, dtype=torch.int64, device=wide.device).scatter_add_(0, rows, weights)


def _sample(ranks: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the places of `size` of the chosen values, and 1 for each of them.

    Where there are fewer, it is all of them, and 0 for what is too much. Otherwise the values are
    cut into as many runs, and one is taken of each, elsewhere in each, so that no column is
    favoured.

    Args:
        ranks: int64: how many are chosen up to each place.
        size: how many to take.
    """
    index = torch.arange(size, device=ranks.device)
    count = ranks.select(0, -1)
    within = (index * _GOLDEN) & _UNIT - 1
    rank = ((index * _UNIT + within) * count) // (size * _UNIT)
    rank = rank.where(count > size, index)
    places = torch.searchsorted(ranks, rank + 1).clamp_max(len(ranks) - 1)
    return places, (index < count).to(torch.int64)


_UNIT, _GOLDEN = 1 << 16, 40503  # multiples of the golden ratio are spread evenly


def _bits(reals: Tensor) -> Tensor:
    return reals.view(_FORMATS[reals.dtype].integer).to(torch.int64)


def _reals(bits: npt.NDArray[np.int64], real: torch.dtype) -> npt.NDArray[np.float64]:
    if real is torch.float64:
        return bits.view(np.float64)
    return bits.astype(np.int32).view(np.float32).astype(np.float64)


def _piece(
    numbers: npt.NDArray[np.int64], real: torch.dtype, nothing: TensorStatistics
) -> TensorStatistics:
    """Return the statistics of one piece; `nothing` has what is known of its tensor."""
    nans, positive_infs, negative_infs, zeros, finite = numbers[:_COUNTS].tolist()
    found = replace(
        nothing,
        count=nans + positive_infs + negative_infs + finite,
        nan_count=nans,
        positive_inf_count=positive_infs,
        negative_inf_count=negative_infs,
        zero_count=zeros,
    )
    if not finite:
        return found
    reals = _reals(numbers[_COUNTS : _COUNTS + _REALS], real).tolist()
    found.min, found.max, found.mean, found.std = reals
    if found.min == found.max:  # a constant deviates by exactly nothing
        found.mean, found.std = found.min, 0.0
    rows, nonzero = numbers[_COUNTS + _REALS :].reshape(-1, 2), finite - zeros
    found.histogram_sampled = bool(rows.sum() < nonzero)
    if found.histogram_sampled:
        rows = _scaled(rows, nonzero, found.min, found.max)
    found.exponents = ExponentCounts.of_rows(LOWEST_EXPONENT, rows)
    return found


def _scaled(
    rows: npt.NDArray[np.int64], nonzero: int, low: float, high: float
) -> npt.NDArray[np.int64]:
    """Scale a sample to `nonzero` values; what rounding cuts goes to the fullest row.

    The least and the greatest value are counted once where the sample missed their rows.
    """
    ends = {_row(extreme) for extreme in (low, high) if extreme}
    missed = [row for row in ends if not rows[row]]
    total = nonzero - len(missed)
    scaled: npt.NDArray[np.int64] = (rows * (total / rows.sum())).astype(np.int64)
    scaled.flat[scaled.argmax()] += total - scaled.sum()
    for row in missed:
        scaled[row] = 1
    return scaled


def _row(value: float) -> tuple[int, int]:
    exponent = min(max(math.frexp(value)[1] - 1, LOWEST_EXPONENT), HIGHEST_EXPONENT)
    return exponent - LOWEST_EXPONENT, int(value > 0)
