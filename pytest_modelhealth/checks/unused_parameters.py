"""Parameters that no rank uses and that DDP waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.checks.between_ranks import BetweenRanks

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation
    from pytest_modelhealth.report.ranks import Disagreement


class UnusedParameters(BetweenRanks):
    """DDP gets a gradient of every parameter that it waits for."""

    name = "unused_parameters"
    summary = "No parameter that DDP waits for is unused on all ranks."
    rank = 53
    role = "parameter_gradients"
    definition = (
        "Every parameter that was trainable when DDP was made without find_unused_parameters and "
        "static_graph gets a gradient in a step."
    )
    source = "DDP: Expected to have finished reduction in the prior iteration"

    def cause(self, found: Disagreement, observation: Observation) -> str:
        """Return how to do without."""
        return (
            "it was frozen after DDP was made, is not called, or the loss leaves its output out: "
            "freeze it before, take it away, or make DDP with find_unused_parameters=True"
        )
