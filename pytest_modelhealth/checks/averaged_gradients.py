"""Trainable parameters that each rank trains on its own samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.checks.between_ranks import BetweenRanks

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation
    from pytest_modelhealth.report.ranks import Disagreement


class AveragedGradients(BetweenRanks):
    """Where something shares the batch out, every trainable parameter lies in a wrapper."""

    name = "averaged_gradients"
    summary = "The gradients of all trainable parameters are averaged over data-parallel ranks."
    rank = 51
    role = "parameter_gradients"
    definition = (
        "Where DDP or FSDP2 shares the batch of a model out, every parameter that gets a gradient "
        "is among those that one of them was made with, or has a hook of the user's, and DDP is "
        "called itself, not what it wraps."
    )
    source = "the reducer of DDP knows the parameters that were trainable when it was made"

    def cause(self, found: Disagreement, observation: Observation) -> str:
        """Return how to have them averaged."""
        if "called past its wrapper" in found.message:
            return "call the DDP module, not its .module: its forward prepares the reduction"
        return (
            "each rank takes another step, and replicas part: wrap the whole model once, after "
            "layers were added, frozen or thawed"
        )
