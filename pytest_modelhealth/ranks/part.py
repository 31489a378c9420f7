"""What one rank has of a tensor, and what all have of it."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_modelhealth.report.ranks import How
from pytest_modelhealth.statistics import TensorStatistics


@dataclass(slots=True)
class Part:
    """What this rank has of one tensor.

    Args:
        seen: its statistics; ``None`` where this rank has none.
        is_replica: whether what other ranks have is the same thing, so that one counts.
        counts: whether this rank's may count; of replicas that may, the first one does.
        scale: what its values are divided by.
        whole: shape of the whole tensor; ``None`` where it is this one's, or grows by its samples.
        offset: where this one begins in the whole.
        units: where its units begin in the whole, and how many the whole has; ``None`` where each
            rank has all of them.
        counts_samples: whether its samples of units are others than those of its neighbours.
        grows: whether it is longer when all are put together, if it is one of samples.
        adds_rows: whether its rows are others than those of its neighbours.
        has_extremes: whether the least and the largest value of each unit are wanted.
        how: how it becomes one with the others, for people.
    """

    seen: TensorStatistics | None
    is_replica: bool = False
    counts: bool = True
    scale: int = 1
    whole: tuple[int, ...] | None = None
    offset: tuple[int, ...] = ()
    units: tuple[int, int] | None = None
    counts_samples: bool = True
    grows: bool = False
    adds_rows: bool = True
    has_extremes: bool = True
    how: How = "pieces"

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, as far as this rank knows it."""
        return self.whole or (() if self.seen is None else self.seen.shape)


@dataclass(slots=True)
class Joined:
    """One tensor of all ranks.

    Args:
        seen: its statistics; ``None`` where no rank has any.
        ranks: how many ranks had something.
        nonfinite: the ranks that had a NaN or infinity, of those that count.
        largest: the rank that had the largest magnitude; ``None`` where nothing is finite.
    """

    seen: TensorStatistics | None
    ranks: int
    nonfinite: tuple[int, ...]
    largest: int | None
