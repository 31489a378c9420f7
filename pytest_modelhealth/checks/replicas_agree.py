"""Ranks of a tensor-parallel group that compute other values from the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.checks.between_ranks import BetweenRanks

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation
    from pytest_modelhealth.report.ranks import Disagreement


class ReplicasAgree(BetweenRanks):
    """What is not cut is computed on each rank of a tensor-parallel group, with one result."""

    name = "replicas_agree"
    summary = "Layers that every rank of a tensor-parallel group computes return the same values."
    rank = 50
    definition = (
        "A layer without shards that gets the same inputs on all ranks of a tensor-parallel group "
        "returns the same values there, as their statistics tell, to the last bit. The culprit is "
        "the first layer that does not."
    )
    source = "Megatron-LM keeps one random state for the ranks of a tensor-parallel group"

    def cause(self, found: Disagreement, observation: Observation) -> str:
        """Return what makes replicas differ."""
        return (
            "a dropout or other noise draws from the rank's own generator: use one seed within a "
            "tensor-parallel group, and another for each data-parallel rank"
        )
