"""Ranks that take other ways through a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.checks.between_ranks import BetweenRanks

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation
    from pytest_modelhealth.report.ranks import Disagreement


class SamePath(BetweenRanks):
    """All ranks use the same parameters, unless DDP was told to look for unused ones."""

    name = "same_path"
    summary = "All ranks use the same parameters, where their wrapper waits for each of them."
    rank = 52
    role = "parameter_gradients"
    definition = (
        "A parameter of DDP without find_unused_parameters and static_graph that gets a gradient "
        "on one rank gets one on every rank."
    )
    source = "DDP: a bucket is reduced when all its gradients are there, on every rank"

    def cause(self, found: Disagreement, observation: Observation) -> str:
        """Return why the ways part."""
        return (
            "its forward takes a branch by what is in the batch, or by chance: decide the same on "
            "all ranks, or make DDP with find_unused_parameters=True"
        )
