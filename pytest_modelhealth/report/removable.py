"""`RemovableLayer`: the units of one layer that can go, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitSlice:
    """Where the units of a layer stand in a parameter.

    Args:
        parameter: its fully qualified name: ``"bn1.weight"``.
        shape: its shape.
        dimension: the dimension of it that the units lie in.
        each: how many indices in a row belong to one unit: the pixels of a channel, where a
            flattened image is read.
    """

    parameter: str
    shape: tuple[int, ...]
    dimension: int = 0
    each: int = 1

    def indices(self, units: Iterable[int]) -> list[int]:
        """Return the indices along `dimension` that these units have."""
        return [unit * self.each + offset for unit in units for offset in range(self.each)]


@dataclass(frozen=True)
class RemovableLayer:
    """The units of one layer that can go.

    Args:
        name: the layer whose weights make the units.
        units: how many it has.
        dimension: where they lie in its output, counted from the end (-1 behind a linear layer).
        inactive: units that were exactly zero behind the layer's norm and activation.
        duplicates: pairs of a unit and its twin, which is kept: the same values on every sample,
            up to rounding.
        unread: units that were active, and on which no output depended.
        samples: how many samples (tokens, where units are features of a sequence) said so.
        parameters: how many elements of parameters they cost: `produced` and `read`.
        multiply_adds: how many multiply-adds a sample they cost; ``None`` where that is not known.
        produced: where the units stand in the parameters that make them: weight, bias, and the
            entries of a norm behind it.
        read: where they stand in the weights that read them, the next ones.
        read_by: why `read` is not all that reads them, a phrase; ``""`` where it is. Units that a
            norm, a mean or a sum with others reads are masked: no cut takes them out.
    """

    name: str
    units: int
    dimension: int
    inactive: tuple[int, ...] = ()
    duplicates: tuple[tuple[int, int], ...] = ()
    unread: tuple[int, ...] = ()
    samples: int = 0
    parameters: int = 0
    multiply_adds: int | None = None
    produced: tuple[UnitSlice, ...] = ()
    read: tuple[UnitSlice, ...] = ()
    read_by: str = ""

    @property
    def masked(self) -> tuple[int, ...]:
        """The units that go by being masked alone, in order: inactive and unread ones."""
        return tuple(sorted({*self.inactive, *self.unread}))

    @property
    def removable(self) -> tuple[int, ...]:
        """All units that can go, in order."""
        return tuple(sorted({*self.masked, *(unit for unit, _ in self.duplicates)}))

    @property
    def fraction(self) -> float:
        """Part of the units that can go."""
        return len(self.removable) / self.units if self.units else 0.0
