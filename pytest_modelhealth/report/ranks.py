"""What several ranks saw of one model: how it was put together, and where they disagree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from pytest_modelhealth.report.merging import Merge

Dimension = Literal["data", "tensor"]
"""What the ranks of a group share out: the batch, or the units of a layer."""

How = Literal["pieces", "replicas", "units", "one rank"]
"""How statistics of several ranks became one: pieces add up, of replicas one counts, units that lie
on several ranks are put in a row, and some tensors are on one rank alone."""


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on the ranks of a device mesh, as its `DTensor` says.

    Args:
        placements: what each dimension of the mesh does with the tensor: ``"S(0)"`` cuts it along
            dimension 0, ``"R"`` holds it on every rank, ``"P"`` holds parts of a sum.
        shape: shape of the whole tensor.
        offset: where this rank's part begins in it.
        strided: whether a part is several runs of rows (`_StridedShard`).
    """

    placements: tuple[str, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...] = ()
    strided: bool = False


@dataclass(frozen=True)
class Assembly:
    """How the statistics of a layer in one role were put together from several ranks.

    Args:
        how: what the ranks had of it.
        ranks: how many ranks had something.
        nonfinite: the ranks that had a NaN or infinity.
        largest: the rank that had the largest magnitude; ``None`` where nothing is finite.
    """

    how: How
    ranks: int
    nonfinite: tuple[int, ...] = ()
    largest: int | None = None


def together(each: Iterable[tuple[Assembly, float]]) -> Assembly:
    """Return one assembly of several tensors or batches, each with its largest magnitude."""
    (whole, size), *others = each
    for one, other_size in others:
        is_larger = other_size > size or whole.largest is None
        whole = Assembly(
            whole.how,
            max(whole.ranks, one.ranks),
            tuple(sorted({*whole.nonfinite, *one.nonfinite})),
            one.largest if is_larger else whole.largest,
        )
        size = other_size if is_larger else size
    return whole


@dataclass(frozen=True)
class Disagreement:
    """One thing in which ranks differ, or do not although they should.

    Args:
        kind: name of the check that judges it.
        layer: fully qualified name of the first layer that shows it; ``""`` is the model.
        role: which tensor of it; ``""`` where it is none.
        tensor: the tensor's own name, where the role has several.
        ranks: the odd ranks, in order.
        others: the ranks that they differ from, in order.
        message: what is wrong, one sentence that stands alone, the same on every rank.
        value: how much of it there is: a number of tensors, or a ratio.
        layers: all layers that show it, in execution order.
        is_sure: whether nothing seen could mean it so; else its check only warns.
    """

    kind: str = ""
    layer: str = ""
    role: str = ""
    tensor: str = ""
    ranks: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    message: str = ""
    value: float = 1.0
    layers: tuple[str, ...] = ()
    is_sure: bool = True


@dataclass(frozen=True)
class Group:
    """Ranks that share one thing out among them.

    Args:
        dimension: what they share out.
        ranks: the ranks of each such group, in order: ``((0, 1), (2, 3))``.
    """

    dimension: Dimension
    ranks: tuple[tuple[int, ...], ...]


def _distinct(values: list[tuple[Disagreement, ...]], _: Merge) -> tuple[Disagreement, ...]:
    """Return each disagreement once, as it was first seen."""
    found: dict[tuple[str, ...], Disagreement] = {}
    for one in chain(*values):
        found.setdefault((one.kind, one.layer, one.role, one.tensor), one)
    return tuple(found.values())


def _ends(values: list[tuple[tuple[float, int], ...]], _: Merge) -> tuple[tuple[float, int], ...]:
    losses = [*chain(*values)]
    return (min(losses), max(losses)) if losses else ()


@dataclass(frozen=True)
class Ranks:
    """That an observation is of several ranks.

    Args:
        ranks: the ranks that took part, in order.
        engine: what distributes the model, for people: ``"DDP"``, ``"FSDP2 and tensor parallel"``.
        groups: who shares what out.
        disagreements: where ranks disagree, in execution order.
        losses: the smallest and the largest loss of a rank, each with the rank; empty where there
            was no loss.
    """

    ranks: tuple[int, ...]
    engine: str
    groups: tuple[Group, ...] = ()
    disagreements: tuple[Disagreement, ...] = field(default=(), metadata={"merge": _distinct})
    losses: tuple[tuple[float, int], ...] = field(default=(), metadata={"merge": _ends})


def named_ranks(ranks: Iterable[int]) -> str:
    """Return ranks for people: ``"rank 1"``, ``"ranks 0 and 2"``, of many the first."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"ranks {', '.join(numbers[:8])} and {len(numbers) - 8} more"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
