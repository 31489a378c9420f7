"""Marks: which unit of which layer each place along one dimension of a tensor belongs to.

They go through a run beside the tensors. A layout (a view, a transposition, a flattening) is
followed by laying out a tensor of indices in the same way, so nothing is guessed of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Parameter:
    """A parameter or buffer of a module.

    Args:
        owner: name of the module.
        own: its own name in that module: ``"weight"``.
        module: the module.
        names: all full names it has in the model; of a tied one there are several.
    """

    owner: str
    own: str
    module: nn.Module = field(repr=False, compare=False)
    names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its full name."""
        return f"{self.owner}.{self.own}" if self.owner else self.own


Source = tuple[Parameter, int] | int
"""What is laid out: a dimension of a parameter, or the units of a group, by its number."""


@dataclass(frozen=True, eq=False)
class Mark:
    """Whose indices lie along a dimension of a tensor.

    Args:
        source: whose they are.
        axis: the dimension.
        ids: the index of the source at each place along it, on the CPU.
    """

    source: Source
    axis: int
    ids: Tensor

    def at(self, axis: int) -> Mark:
        """Return the mark of a tensor that has the same indices along another dimension."""
        return replace(self, axis=axis)

    def is_same(self, other: Mark) -> bool:
        """Whether another mark has the same indices along the same dimension."""
        return self.axis == other.axis and torch.equal(self.ids, other.ids)

    @property
    def is_whole(self) -> bool:
        """Whether every index is there once, in order."""
        return torch.equal(self.ids, torch.arange(len(self.ids)))


def laid_out(mark: Mark, shape: torch.Size, layout: Callable[[Tensor], Tensor]) -> Mark | None:
    """Return the mark of a tensor that was laid out anew.

    Args:
        mark: that of the tensor before.
        shape: its shape.
        layout: lays out a tensor of that shape.

    Returns:
        ``None`` where indices are no longer along one dimension, or not all of them are there.
    """
    sizes = [1] * len(shape)
    sizes[mark.axis] = len(mark.ids)
    indices = layout(mark.ids.view(sizes).expand(shape).contiguous())
    if indices.numel() == 0:
        return None
    for axis in range(indices.ndim):
        line = indices[tuple(slice(None) if d == axis else 0 for d in range(indices.ndim))]
        others = [1] * indices.ndim
        others[axis] = len(line)
        if bool((indices == line.view(others)).all()):
            is_all = torch.equal(line.unique(), mark.ids.unique())
            return Mark(mark.source, axis, line.clone()) if is_all else None
    return None


@dataclass(frozen=True, eq=False)
class Slot:
    """Where the units of a group stand in a parameter or buffer.

    Args:
        parameter: it.
        dimension: the dimension that they lie in.
        ids: the unit at each index along it.
    """

    parameter: Parameter
    dimension: int
    ids: Tensor


@dataclass(frozen=True, eq=False)
class Reading:
    """A weight that sums over the units of a group.

    Args:
        slot: where they stand in it.
        rows: the dimension of it in which its own units lie.
        zero: by unit, whether what was read of it was all zero, in a run in which units that can go
            are masked.
        twins: by pair of units that was asked for, by how much what was read of them differed,
            relative to the largest value.
    """

    slot: Slot
    rows: int
    zero: Tensor
    twins: dict[tuple[int, int], float]


@dataclass
class Group:
    """Units that go together: those of one layer, or of several that are multiplied unit by unit.

    Args:
        units: how many there are.
        layers: the layers whose weights make them, in execution order.
        ends: those of them whose values are factors of what is read.
        slots: where they stand in what makes them, and in norms and activations behind.
        norms: modules that only know how many there are.
        readings: the weights that read them.
        reasons: why they cannot be cut, phrases; none where they can.
    """

    units: int
    layers: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    norms: dict[str, nn.Module] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def absorb(self, other: Group) -> None:
        """Let the units of another group go together with these."""
        self.layers += [name for name in other.layers if name not in self.layers]
        self.ends += [name for name in other.ends if name not in self.ends]
        self.slots += other.slots
        self.norms.update(other.norms)
        self.readings += other.readings
        self.reasons += [reason for reason in other.reasons if reason not in self.reasons]
