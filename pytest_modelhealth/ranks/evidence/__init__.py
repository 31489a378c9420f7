"""In what ranks differ, or do not although they should: the seam that `joint` calls.

Everything here runs on every rank, in the same order, with the same collectives: those of a
tensor-parallel group, and one gather of a card a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from pytest_modelhealth.capture import Request
from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.evidence.averaging import Averaging
from pytest_modelhealth.ranks.evidence.batches import Batches
from pytest_modelhealth.ranks.evidence.kind import Kind
from pytest_modelhealth.ranks.evidence.loss_weights import LossWeights
from pytest_modelhealth.ranks.evidence.nonfinite import NonFinite
from pytest_modelhealth.ranks.evidence.norms import Norms
from pytest_modelhealth.ranks.evidence.parts import with_parts
from pytest_modelhealth.ranks.evidence.randomness import Randomness
from pytest_modelhealth.ranks.evidence.replicas import Replicas
from pytest_modelhealth.ranks.evidence.structure import described
from pytest_modelhealth.ranks.evidence.usage import Path, Unused
from pytest_modelhealth.ranks.evidence.weights import Weights
from pytest_modelhealth.ranks.evidence.wrappers import Wrapped
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.ranks import Disagreement

__all__ = ["Evidence", "collected", "described", "disagreements"]

_KINDS: tuple[type[Kind], ...] = (
    NonFinite,
    Weights,
    Batches,
    Averaging,
    Path,
    Unused,
    LossWeights,
    Replicas,
    Norms,
    Randomness,
)


@dataclass
class Evidence:
    """What a rank noted before a run."""

    kinds: list[Kind]
    cards: list[list[Any]] | None = None
    """What each rank wrote, once it was sent."""

    def written(self, own: Observation) -> list[Any]:
        """Return what this rank tells the others; collectives of `place.tensor` may run here.

        Args:
            own: what it saw.
        """
        return [kind.card(own) for kind in self.kinds]

    def close(self) -> None:
        """Take back what hangs on the model for the run: also where that fails."""
        for kind in self.kinds:
            kind.close()


def collected(company: Company, request: Request) -> Evidence:
    """Return what this rank notes before the run: no collective here, the model is untouched.

    `Evidence.close` must be called when the run has ended, or failed.
    """
    if not isinstance(request.model, nn.Module):
        return Evidence([])
    wrapped = Wrapped(request.model)
    return Evidence([kind(company, wrapped, request) for kind in _KINDS])


def disagreements(
    company: Company, evidence: Evidence, own: Observation, joint: Observation
) -> tuple[Disagreement, ...]:
    """Return where ranks disagree, the same on every rank.

    Args:
        company: the ranks; `place` has those that see other samples (`data`) and those that see
            the same (`tensor`).
        evidence: what `collected` returned on this rank.
        own: what this rank saw.
        joint: what all saw, put together.
    """
    cards = evidence.cards
    if cards is None:
        cards = company.gather(evidence.written(own))
    every = [dict(zip(company.ranks, each, strict=True)) for each in zip(*cards, strict=True)]
    found = tuple(
        found
        for kind, card in zip(evidence.kinds, every, strict=True)
        for found in kind.found(card, joint)
    )
    return with_parts(company, found, own, joint)
