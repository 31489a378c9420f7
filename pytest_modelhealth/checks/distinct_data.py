"""Ranks that share the batch out and get the same samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.checks.between_ranks import BetweenRanks

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation
    from pytest_modelhealth.report.ranks import Disagreement


class DistinctData(BetweenRanks):
    """Data-parallel ranks see other samples; the ranks of a tensor-parallel group the same ones."""

    name = "distinct_data"
    summary = "Ranks that share the batch out are given different samples."
    rank = 49
    role = "inputs"
    definition = (
        "No two data-parallel ranks are given the same inputs and targets, bit for bit. A batch "
        "that holds fewer than 64 bits of information, such as one of ones, is not compared."
    )
    source = "without a DistributedSampler each rank reads the whole data set, in the same order"

    def cause(self, found: Disagreement, observation: Observation) -> str:
        """Return how ranks come by the same batch."""
        return (
            "the data set is not split over ranks: give the DataLoader a DistributedSampler of the "
            "data-parallel rank and size, or another seed to each of these ranks"
        )
