"""Batch norms that see too few samples on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.checks.between_ranks import BetweenRanks
from pytest_modelhealth.settings import Limit, Setting

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation
    from pytest_modelhealth.report.ranks import Disagreement


class SyncedNorm(BetweenRanks):
    """A batch norm that is not synchronised sees enough samples on each rank by itself."""

    name = "synced_norm"
    summary = "Batch norms see enough samples on each rank, or are synchronised over ranks."
    rank = 55
    severity = "warn"
    limit_name = "min_norm_samples"
    definition = (
        "A batch norm in training on data-parallel ranks that is no SyncBatchNorm is given at "
        "least min_norm_samples samples on each rank. It only warns."
    )
    source = "Wu and He 2018, Group Normalization: the error of ResNet-50 grows below 16 a worker"
    settings = (
        Setting(
            "min_norm_samples",
            int,
            default=16,
            minimum=1,
            help="fewest samples of a rank that a batch norm may normalise by, where ranks share "
            "the batch out",
        ),
    )

    def is_beyond(self, value: float, limit: Limit) -> bool:
        """Whether these are too few."""
        return bool(value < limit.value)

    def cause(self, found: Disagreement, observation: Observation) -> str:
        """Return what to do about it."""
        return (
            "mean and variance of so few are noise, and running statistics part between ranks: "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), larger batches or a norm that "
            "needs none"
        )
