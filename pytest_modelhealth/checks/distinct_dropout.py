"""Data-parallel ranks that drop the same units."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.checks.between_ranks import BetweenRanks

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation
    from pytest_modelhealth.report.ranks import Disagreement


class DistinctDropout(BetweenRanks):
    """Ranks that share the batch out draw each their own masks."""

    name = "distinct_dropout"
    summary = "Data-parallel ranks draw their own random numbers where a dropout is at work."
    rank = 56
    severity = "warn"
    definition = (
        "Where a dropout is at work, no two data-parallel ranks start a step from the same state "
        "of the generator. It only warns."
    )
    source = "one torch.manual_seed on all ranks; Megatron-LM gives each data-parallel rank its own"

    def cause(self, found: Disagreement, observation: Observation) -> str:
        """Return how to part them."""
        return (
            "all ranks were seeded alike, for equal weights: after the model is made, seed each "
            "data-parallel rank by torch.manual_seed(seed + rank)"
        )
