"""What a run over many batches says beside statistics: where, of which class, of how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

Label = int | bool | str
"""A class of samples, as the batches name it."""


@dataclass(frozen=True)
class Extreme:
    """Where a value stood that stands out; all are counted from 0.

    Args:
        value: the value itself.
        batch: number of its batch.
        sample: its place along the dimension of samples; ``None`` where dimension 0 of the tensor
            is not as long as the batch.
        index: its place in the tensor; ``None`` where that stayed on another device.
        rank: the rank whose batch it is; ``None`` where one process ran them.
    """

    value: float
    batch: int
    sample: int | None = None
    index: tuple[int, ...] | None = None
    rank: int | None = None

    def moved(self, batches: int) -> Extreme:
        """Return the same after so many batches more."""
        return replace(self, batch=self.batch + batches)

    def __str__(self) -> str:
        sample = "" if self.sample is None else f", sample {self.sample}"
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"batch {self.batch}{rank}{sample}"


Extremes = Mapping[str, Extreme]
"""By role: ``activations``, ``gradients``, and ``inputs`` of the model."""


def larger_of_each(a: Extremes, b: Extremes) -> dict[str, Extreme]:
    """Return the larger magnitude of each role; of equal ones the first."""
    both = a.keys() & b.keys()
    return {**b, **a, **{role: b[role] for role in both if abs(b[role].value) > abs(a[role].value)}}


def moved(extremes: Extremes, batches: int) -> dict[str, Extreme]:
    """Return the same after so many batches more."""
    return {role: extreme.moved(batches) for role, extreme in extremes.items()}


@dataclass(frozen=True)
class Part:
    """That a run ended before all batches were seen.

    Args:
        batches: how many were seen.
        of: how many there are; ``None`` where the batches do not say.
        ended_by: what ended it: ``"max_seconds=5"``, ``"max_batches=10"``.
    """

    batches: int
    of: int | None
    ended_by: str

    def __str__(self) -> str:
        """Return ``"12 of 57 batches (max_seconds=5 ended the run)"``."""
        seen = f"{self.batches:,} of {self.of:,}" if self.of is not None else f"{self.batches:,}"
        noun = "batch" if (self.batches if self.of is None else self.of) == 1 else "batches"
        return f"{seen} {noun} ({self.ended_by} ended the run)"
