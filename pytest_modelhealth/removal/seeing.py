"""Looks at units while a model runs, and keeps some numbers of each: no tensor is held."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.removal.ways import Place

_SEED = 20_241_122
_PROJECTIONS = 4
_AT_ONCE = 2**20
"""Elements that are brought to float64 at a time."""

_ROUNDINGS = 4
"""Machine epsilons, times the norm of a unit, by which projections of equal units may differ."""


@dataclass
class Seen:
    """What was seen of the units of one layer; tensors are on the CPU, an element a unit.

    Args:
        zero: whether a unit was exactly zero everywhere.
        projected: random projections of its values, which equal units share; float64.
        squares: the sum of the squares of its values; float64.
        samples: how many samples of each unit there were.
        epsilon: machine epsilon of the values.
    """

    zero: Tensor
    projected: Tensor
    squares: Tensor
    samples: int
    epsilon: float

    def merge(self, other: Seen) -> Seen:
        """Return what was seen in both."""
        return Seen(
            self.zero & other.zero,
            self.projected + other.projected,
            self.squares + other.squares,
            self.samples + other.samples,
            max(self.epsilon, other.epsilon),
        )

    def twins(self) -> list[tuple[int, int]]:
        """Return pairs of a unit and the first one that has the same values, in order.

        They are sorted by one projection and compared with their neighbours there, so that the cost
        is that of sorting. Units that are zero have no twin.
        """
        marks = torch.cat([self.projected, self.squares.sqrt()[None]]).T.tolist()
        slack = [_ROUNDINGS * self.epsilon * mark[-1] for mark in marks]
        alive = [unit for unit, zero in enumerate(self.zero.tolist()) if not zero]
        twin_of: dict[int, int] = {}
        near: list[int] = []
        for unit in sorted(alive, key=marks.__getitem__):
            near = [o for o in near if marks[unit][0] - marks[o][0] <= max(slack[unit], slack[o])]
            same = (o for o in near if _agree(marks[unit], marks[o], max(slack[unit], slack[o])))
            twin = next(same, None)
            if twin is None:
                near.append(unit)
            else:
                twin_of[unit] = twin
        return _kept_first(twin_of)


def _agree(one: list[float], other: list[float], slack: float) -> bool:
    return all(abs(a - b) <= slack for a, b in zip(one, other, strict=True))


def _kept_first(twin_of: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return pairs in which the first unit of each group is the one that is kept."""
    groups: dict[int, list[int]] = {}
    for unit, leader in twin_of.items():
        groups.setdefault(leader, [leader]).append(unit)
    kept = {min(group): group for group in groups.values()}
    return sorted((unit, first) for first, group in kept.items() for unit in group if unit != first)


class UnitWatch:
    """A visitor that looks at the units behind some calls.

    Args:
        places: the calls, and where the units lie in what they return, counted from the end.

    Attributes:
        sequence: the layers, in the order in which their outputs appeared.
        seen: what was seen, by call.
    """

    def __init__(self, places: Mapping[Place, int]) -> None:
        self._places = places
        self._counts: Counter[str] = Counter()
        self.sequence: list[str] = []
        self.seen: dict[Place, Seen] = {}

    def see(self, layer: str, role: str, tensor: str, value: Tensor) -> None:
        """Look at a tensor, if it is behind one of the calls."""
        if role != "activations":
            return
        place = layer, self._counts[layer]
        self._counts[layer] += 1
        self.sequence.append(layer)
        dimension = self._places.get(place)
        if dimension is not None and _is_readable(value, dimension):
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self.seen[place] = look(value.detach(), dimension)

    def see_output(self, output: Any) -> None:
        """Take no notice of what the model returned."""

    def forget(self) -> None:
        """Take no tensor for one seen before, as none is known again."""


def _is_readable(value: Tensor, dimension: int) -> bool:
    is_plain = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
    return is_plain and value.is_floating_point() and not value.is_meta and value.ndim >= -dimension


def look(value: Tensor, dimension: int) -> Seen:
    """Return what is to be seen of the units of a tensor.

    Args:
        value: of any shape, floating.
        dimension: where its units lie, counted from the end.
    """
    axis = value.ndim + dimension
    units, inner = value.shape[axis], math.prod(value.shape[axis + 1 :])
    rows = value.reshape(-1, units, inner)
    generator = torch.Generator().manual_seed(_SEED)
    zero = torch.ones(units, dtype=torch.bool, device=value.device)
    projected = torch.zeros(_PROJECTIONS, units, dtype=torch.float64, device=value.device)
    squares = torch.zeros(units, dtype=torch.float64, device=value.device)
    step = max(1, _AT_ONCE // max(1, units * inner))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].double()
        weights = torch.randn(len(part), inner, _PROJECTIONS, generator=generator)
        weights = weights.to(value.device, torch.float64)
        if inner == 1:
            projected += weights[:, 0].T @ part[..., 0]
        else:
            projected += (part @ weights).sum(0).T
        squares += part.square().sum((0, 2))
        zero &= (part == 0).all(2).all(0)
    return Seen(zero.cpu(), projected.cpu(), squares.cpu(), len(rows), torch.finfo(value.dtype).eps)
