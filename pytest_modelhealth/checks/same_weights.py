"""Replicas of a model that hold other weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.checks.between_ranks import BetweenRanks

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation
    from pytest_modelhealth.report.ranks import Disagreement


class SameWeights(BetweenRanks):
    """Ranks that hold the same part of a model hold the same values.

    They are compared bit by bit: averaged gradients keep replicas equal only where they began so.
    """

    name = "same_weights"
    summary = "Ranks that hold the same part of the model hold the same weights and buffers."
    rank = 48
    role = "parameters"
    definition = (
        "Parameters and constant buffers are equal, bit for bit, on all ranks that hold the same "
        "part of them. Running statistics, buffers that the forward writes, those of one number "
        "and what DDP was told to ignore are each rank's own."
    )
    source = "DDP and FSDP send weights once, when they are made, and gradients from then on"

    def cause(self, found: Disagreement, observation: Observation) -> str:
        """Return what makes replicas differ."""
        if found.role == "buffers":
            return (
                "each rank computed or drew it by itself: make it before it is wrapped in DDP, "
                "which sends rank 0's, or send it by torch.distributed.broadcast"
            )
        if "got the same batch" in found.message:
            return (
                "where each rank holds a part of a layer, as in tensor parallelism, the sum over "
                "ranks (all_reduce) is missing behind it; where all should hold the same, another "
                "seed, a checkpoint or a write on some ranks alone"
            )
        return (
            "another seed, a checkpoint or a write on some ranks alone, after the wrapper was "
            "made: do it on all ranks, or send the result by torch.distributed.broadcast"
        )
