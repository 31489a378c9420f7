"""Samples or tokens that weigh more on one rank than on another."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.ranks.evidence.kind import Cards, Kind
from pytest_modelhealth.report import LossCall, Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks

_TOLERANCE = 1e-3

Weighed = tuple[int, float]
"""How many targets a rank learns from, and what they weigh together."""


class LossWeights(Kind):
    """What the targets of each rank weigh together, and how many there are.

    The mean over ranks gives each rank the same weight. A loss that is a mean over the rank's own
    targets, or their sum over their own number, thus weighs a target by one over that number. A sum
    over the number of all ranks does not. It is judged where the whole loss is one call of a loss
    function times a number, or the sum of means over the same number.
    """

    name = "even_weights"

    def card(self, own: Observation) -> Weighed | None:
        """Return number and weight of this rank's targets; ``None`` where neither is known."""
        return _weighed(own) if len(self.place.data) > 1 else None

    def found(self, cards: Cards, joint: Observation) -> Iterator[Disagreement]:
        """Yield the ranks whose targets weigh more."""
        known = {rank: card for rank, card in cards.items() if card is not None and card[0]}
        if len(known) < len(cards) or len(known) < 2:
            return
        weights = [weight for _, weight in known.values()]
        if max(weights) - min(weights) > _TOLERANCE * max(weights):
            return
        counts = {rank: count for rank, (count, _) in known.items()}
        fewest, most = min(counts.values()), max(counts.values())
        if fewest == most:
            return
        middle = math.sqrt(fewest * most)
        odd = tuple(rank for rank, count in counts.items() if count < middle)
        others = tuple(rank for rank in counts if rank not in odd)
        own = [counts[rank] for rank in odd]
        times = f"{most / max(own):.3g}"
        if min(own) < max(own):
            times += f" to {most / min(own):.3g}"
        light = next(rank for rank, count in counts.items() if count == most)
        yield Disagreement(
            self.name,
            "",
            "loss",
            "",
            odd,
            others,
            f"a target of {named_ranks(odd)} weighs {times} times as much as one of rank {light}: "
            f"the loss is a mean over {_between(own)} targets on the one, over {most:,} on the "
            "other",
            most / fewest,
        )


def _between(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _weighed(own: Observation) -> Weighed | None:
    calls = [call for call in own.loss_calls if call.value is not None]
    if not calls or own.loss is None or not math.isfinite(own.loss):
        return None
    counts = [_count(call) for call in calls]
    count = counts[0]
    if count is None or any(other != count for other in counts):
        return None
    if all(map(_is_mean, calls)):
        values = sum(call.value or 0.0 for call in calls)
        if math.isclose(own.loss, values, rel_tol=_TOLERANCE):
            return count, 1.0
    if len(calls) > 1 or not calls[0].value:
        return None
    factor = own.loss / calls[0].value
    return count, factor if _is_mean(calls[0]) else factor * count


def _is_mean(call: LossCall) -> bool:
    return call.options.get("reduction", "mean") == "mean"


def _count(call: LossCall) -> int | None:
    """Return of how many targets a call is the mean; ``None`` where they weigh by themselves."""
    if call.options.get("weight") or call.options.get("reduction") == "none":
        return None
    if call.targets is not None:
        return call.targets.count - call.targets.ignored
    return None if call.target is None else call.target.count
