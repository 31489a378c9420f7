"""`RemovableLayer`: the units of one layer that can go, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RemovableLayer:
    """The units of one layer that can go.

    Args:
        name: the layer whose weights make the units.
        units: how many it has.
        inactive: units that no output depended on, whatever the sample: dead behind their
            activation, or read by nothing.
        duplicates: pairs of a unit and its twin, which is kept: a unit before it with the same
            weights, bias and entries of a norm, bit for bit.
        samples: how many samples (tokens, where units are features of a sequence) said so.
        produced: the parameters that make the units, those of a norm behind them too, each with the
            dimension of it in which they lie.
    """

    name: str
    units: int
    inactive: tuple[int, ...] = ()
    duplicates: tuple[tuple[int, int], ...] = ()
    samples: int = 0
    produced: tuple[tuple[str, int], ...] = ()

    @property
    def removable(self) -> tuple[int, ...]:
        """All units that can go, in order."""
        return tuple(sorted({*self.inactive, *(unit for unit, _ in self.duplicates)}))

    @property
    def fraction(self) -> float:
        """Part of the units that can go."""
        return len(self.removable) / self.units if self.units else 0.0
