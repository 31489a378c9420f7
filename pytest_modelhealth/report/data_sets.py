"""What a run over many batches says beside statistics: where, of which class, of how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_modelhealth.statistics import TensorStatistics

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


@dataclass(frozen=True)
class SilentUnits:
    """Units of a layer that fire for some class, and never for this one.

    Args:
        layer: name of the layer.
        label: the class.
        units: their indices.
        of: how many units of the layer fire for some class.
        samples: how many samples of the class were seen.
    """

    layer: str
    label: Label
    units: tuple[int, ...]
    of: int
    samples: int

    @property
    def is_whole(self) -> bool:
        """Whether that is every unit that fires for other classes."""
        return len(self.units) == self.of


@dataclass(frozen=True)
class ByClass:
    """Statistics by class of the samples.

    Args:
        samples: how many samples of each class were seen, the classes in order.
        statistics: by class, then by layer, those of the activations of its samples.
        silent: units that fire for some class and never for another, in layers whose units can
            fall silent, where most of a layer is silent first.
        alike: classes of two samples or more that differ, and whose outputs are all the same.
        judged: the layers whose units can fall silent: activations with a flat side.
        left_out: layers that were called and are not split, with the reason.
    """

    samples: Mapping[Label, int] = field(default_factory=dict)
    statistics: Mapping[Label, Mapping[str, TensorStatistics]] = field(default_factory=dict)
    silent: tuple[SilentUnits, ...] = ()
    alike: tuple[Label, ...] = ()
    judged: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
