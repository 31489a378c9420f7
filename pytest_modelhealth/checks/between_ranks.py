"""What the ranks of a process group disagree in: a row a kind of disagreement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from pytest_modelhealth.checks.check import ALWAYS, Listed
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.report import Finding, Observation
from pytest_modelhealth.settings import Settings


def findings(check: Listed, observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the disagreements of a check's kind, beyond the limit if any: the same on each rank."""
    found = () if observation.ranks is None else observation.ranks.disagreements
    for one in found:
        if one.check != check.name:
            continue
        limit = ALWAYS
        if check.settings:
            limit = settings.limit(check.settings[0].name, one.layer)
            sign = -1 if check.name == "synced_norm" else 1  # less than the limit fails
            if not sign * one.value > sign * limit.value:
                continue
        layer = place(observation, one.layer).name
        yield replace(
            one, layer=layer, cause=_CAUSES[check.name], limit=limit.value, origin=limit.origin
        )


_CAUSES: Mapping[str, str] = {
    "same_weights": "another seed, a checkpoint or a write on some ranks alone, after the wrapper "
    "was made, or a buffer that each rank draws: make it before, or send rank 0's by "
    "torch.distributed.broadcast",
    "distinct_data": "the data set is not split over ranks: give the DataLoader a "
    "DistributedSampler of the data-parallel rank and size, or another seed to each of these ranks",
    "replicas_agree": "a dropout or other noise draws from the rank's own generator: use one seed "
    "within a tensor-parallel group, and another for each data-parallel rank",
    "averaged_gradients": "each rank takes another step, and replicas part: wrap the whole model "
    "once, after layers were added, frozen or thawed, and call the wrapper, not its .module",
    "same_path": "its forward takes a branch by what is in the batch, or by chance: decide the "
    "same on all ranks, or make DDP with find_unused_parameters=True",
    "unused_parameters": "it was frozen after DDP was made, is not called, or the loss leaves its "
    "output out: freeze it before, take it away, or make DDP with find_unused_parameters=True",
    "even_weights": "gradients are averaged over ranks, however many targets each has: divide the "
    "sum of the loss by the number of targets of all ranks, and multiply by the number of ranks",
    "synced_norm": "mean and variance of so few are noise, and running statistics part between "
    "ranks: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), larger batches or a norm that "
    "needs none",
    "distinct_dropout": "all ranks were seeded alike, for equal weights: after the model is made, "
    "seed each data-parallel rank by torch.manual_seed(seed + rank)",
}
"""The likely cause and the next move."""
