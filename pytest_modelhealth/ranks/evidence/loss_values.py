"""A loss that is no number on some ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.ranks.evidence.kind import Cards, Kind
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks


class LossValues(Kind):
    """Whether each rank's loss is finite."""

    name = "finite"

    def card(self, own: Observation) -> float | None:
        """Return the loss where it is not finite."""
        return own.loss if own.loss is not None and not math.isfinite(own.loss) else None

    def found(self, cards: Cards, details: Cards, joint: Observation) -> Iterator[Disagreement]:
        """Yield the ranks whose loss is no number."""
        ill = tuple(rank for rank, loss in cards.items() if loss is not None)
        if ill:
            others = tuple(rank for rank in cards if rank not in ill)
            message = f"the loss is {cards[ill[0]]} on {named_ranks(ill)}"
            yield Disagreement(self.name, "", "loss", "", ill, others, message, float(len(ill)))
