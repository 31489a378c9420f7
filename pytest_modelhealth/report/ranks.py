"""What several ranks saw of one model: how it lies on them, and where they disagree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from pytest_modelhealth.report.finding import Finding
from pytest_modelhealth.report.merging import Merge


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on the ranks of a device mesh, as its `DTensor` says.

    Args:
        shape: shape of the whole tensor.
        offset: where this rank's part begins in it.
        is_cut: whether each rank has a part of it, and not the whole or a term of a sum.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...] = ()
    is_cut: bool = False


def _distinct(values: list[tuple[Finding, ...]], _: Merge) -> tuple[Finding, ...]:
    """Return each finding once, as it was first seen."""
    found: dict[tuple[str, ...], Finding] = {}
    for one in chain(*values):
        found.setdefault((one.check, one.layer, one.role, one.tensor), one)
    return tuple(found.values())


@dataclass(frozen=True)
class Ranks:
    """That an observation is of several ranks.

    Args:
        ranks: the ranks that took part, in order.
        engine: what distributes the model, for people: ``"DDP"``, ``"FSDP2 and tensor parallel"``.
        disagreements: where ranks disagree, in execution order, held against no limit yet.
    """

    ranks: tuple[int, ...]
    engine: str
    disagreements: tuple[Finding, ...] = field(default=(), metadata={"merge": _distinct})


def named_ranks(ranks: Iterable[int]) -> str:
    """Return ranks for people: ``"rank 1"``, ``"ranks 0 and 2"``."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
