"""What is seen of units while batches pass: some numbers of each, no tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.removal.routes import Place

_SEED = 20_241_122
_PROJECTIONS = 4
_AT_ONCE = 2**20
"""Elements that are brought to float64 at a time."""

_ROUNDINGS = 4
"""Machine epsilons, times the norm of a unit, by which projections of equal units may differ."""


@dataclass
class Evidence:
    """What was seen of the units of one layer; tensors are on the CPU, an element a unit.

    Args:
        zero: whether a unit was exactly zero everywhere.
        unread: whether no output depended on it.
        marks: random projections of its values, which equal units share, and the sum of their
            squares; float64.
        samples: how many samples of each unit there were.
        epsilon: machine epsilon of the values.
    """

    zero: Tensor
    unread: Tensor
    marks: Tensor
    samples: int
    epsilon: float

    def merge(self, other: Evidence) -> Evidence:
        """Return what was seen in both."""
        return Evidence(
            self.zero & other.zero,
            self.unread & other.unread,
            self.marks + other.marks,
            self.samples + other.samples,
            max(self.epsilon, other.epsilon),
        )

    def units(self) -> dict[str, tuple[Any, ...]]:
        """Return the units that look removable, by kind; of duplicates pairs of unit and twin."""
        inactive = self.zero.nonzero().flatten().tolist()
        unread = (self.unread & ~self.zero).nonzero().flatten().tolist()
        masked = {*inactive, *unread}
        pairs = tuple(pair for pair in self.twins() if masked.isdisjoint(pair))
        return {"inactive": tuple(inactive), "unread": tuple(unread), "duplicates": pairs}

    def twins(self) -> tuple[tuple[int, int], ...]:
        """Return pairs of a unit and the first one that has the same values, in order.

        They are sorted by one projection and compared with their neighbours there, so that the cost
        is that of sorting. Units that are zero have no twin.
        """
        marks = torch.cat([self.marks[:-1], self.marks[-1:].sqrt()]).T.tolist()

        def agree(one: int, other: int, projections: int) -> bool:
            limit = _ROUNDINGS * self.epsilon * max(marks[one][-1], marks[other][-1])
            pairs = zip(marks[one][:projections], marks[other][:projections], strict=True)
            return all(abs(a - b) <= limit for a, b in pairs)

        def grouped() -> Iterator[list[int]]:
            near: list[list[int]] = []  # groups that a unit further on may still be of
            for unit in sorted((~self.zero).nonzero().flatten().tolist(), key=marks.__getitem__):
                near = [group for group in near if agree(unit, group[0], 1)]
                group = next((g for g in near if agree(unit, g[0], len(marks[unit]))), None)
                if group is not None:
                    group.append(unit)
                    continue
                near.append([unit])
                yield near[-1]

        groups = [*grouped()]
        return tuple(sorted((u, min(group)) for group in groups for u in group if u != min(group)))


def look(value: Tensor, dimension: int) -> Evidence:
    """Return what is to be seen of the units of a tensor, of which none is known to be read.

    Args:
        value: of any shape, floating.
        dimension: where its units lie, counted from the end.
    """
    axis = value.ndim + dimension
    units, inner = value.shape[axis], math.prod(value.shape[axis + 1 :])
    rows = value.reshape(-1, units, inner)
    generator = torch.Generator().manual_seed(_SEED)
    zero = torch.ones(units, dtype=torch.bool, device=value.device)
    marks = torch.zeros(_PROJECTIONS + 1, units, dtype=torch.float64, device=value.device)
    step = max(1, _AT_ONCE // max(1, units * inner))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].double()
        weights = torch.randn(len(part), inner, _PROJECTIONS, generator=generator)
        weights = weights.to(value.device, torch.float64)
        if inner == 1:
            marks[:-1] += weights[:, 0].T @ part[..., 0]
        else:
            marks[:-1] += (part @ weights).sum(0).T
        marks[-1] += part.square().sum((0, 2))
        zero &= (part == 0).all(2).all(0)
    unread, epsilon = torch.ones(units, dtype=torch.bool), torch.finfo(value.dtype).eps
    return Evidence(zero.cpu(), unread, marks.cpu(), len(rows), epsilon)


class UnitWatch:
    """A visitor that looks at the units behind some calls.

    Args:
        places: the calls, and where the units lie in what they return, counted from the end.

    Attributes:
        sequence: the calls of layers, in the order in which their outputs appeared.
        seen: what was seen, by call.
    """

    def __init__(self, places: Mapping[Place, int]) -> None:
        self._places = places
        self._counts: Counter[str] = Counter()
        self.sequence: list[Place] = []
        self.seen: dict[Place, Evidence] = {}

    def see(self, layer: str, role: str, tensor: str, value: Tensor) -> None:
        """Look at a tensor, if it is behind one of the calls."""
        if role != "activations":
            return
        place = layer, self._counts[layer]
        self._counts[layer] += 1
        self.sequence.append(place)
        dimension = self._places.get(place)
        is_open = value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        if dimension is None or not is_open or value.is_meta or not value.is_floating_point():
            return
        if value.ndim >= -dimension:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                self.seen[place] = look(value.detach(), dimension)

    def see_output(self, output: Any) -> None:
        """Take no notice of what the model returned."""

    def forget(self) -> None:
        """Take no tensor for one seen before, as none is known again."""
