"""What several ranks saw of one model: how it lies on them, and where they disagree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

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


@dataclass(frozen=True)
class Disagreement:
    """One thing in which ranks differ, or do not although they should.

    Args:
        kind: name of the check that judges it.
        layer: fully qualified name of the first layer that shows it; ``""`` is the model.
        role: which tensor of it; ``""`` where it is none.
        tensor: the tensor's own name, where the role has several.
        message: what is wrong, one sentence that stands alone, the same on every rank.
        value: how much of it there is: a number of tensors, or a ratio.
        layers: all layers that show it, in execution order.
        is_sure: whether nothing seen could mean it so; else its check only warns.
    """

    kind: str = ""
    layer: str = ""
    role: str = ""
    tensor: str = ""
    message: str = ""
    value: float = 1.0
    layers: tuple[str, ...] = ()
    is_sure: bool = True


def _distinct(values: list[tuple[Disagreement, ...]], _: Merge) -> tuple[Disagreement, ...]:
    """Return each disagreement once, as it was first seen."""
    found: dict[tuple[str, ...], Disagreement] = {}
    for one in chain(*values):
        found.setdefault((one.kind, one.layer, one.role, one.tensor), one)
    return tuple(found.values())


@dataclass(frozen=True)
class Ranks:
    """That an observation is of several ranks.

    Args:
        ranks: the ranks that took part, in order.
        engine: what distributes the model, for people: ``"DDP"``, ``"FSDP2 and tensor parallel"``.
        disagreements: where ranks disagree, in execution order.
    """

    ranks: tuple[int, ...]
    engine: str
    disagreements: tuple[Disagreement, ...] = field(default=(), metadata={"merge": _distinct})


def named_ranks(ranks: Iterable[int]) -> str:
    """Return ranks for people: ``"rank 1"``, ``"ranks 0 and 2"``."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
