"""Checks of what the ranks of a process group disagree in: one class a kind of disagreement."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pytest_modelhealth.checks.check import ALWAYS, Check
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Count, Factor, Settings

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Violation


class _BetweenRanks(Check):
    """Its violations are the disagreements of its kind: found by all ranks, the same on each."""

    minimum_evidence = "one batch on two ranks that inspect together"
    occasion = "An inspection on several ranks"
    sign: ClassVar[int] = 1
    """-1 where less than the limit of its setting is a violation."""
    causes: ClassVar[Mapping[str, str]] = {}
    """Other causes, by what a disagreement's role and message hold then."""

    @property
    @abstractmethod
    def cause(self) -> str:
        """The likely cause and the next move, one sentence."""

    def run(self, observation: Observation, settings: Settings) -> Iterator[Violation]:
        """Yield one violation for each thing in which ranks disagree, beyond the limit if any."""
        found = () if observation.ranks is None else observation.ranks.disagreements
        for one in found:
            if one.kind != self.name:
                continue
            limit = ALWAYS
            if self.settings:
                limit = settings.limit(self.settings[0].name, one.layer)
                if not self.sign * one.value > self.sign * limit.value:
                    continue
            said = f"{one.role}: {one.message}"
            made = self.violation(
                place(observation, one.layer),
                one.message,
                value=one.value,
                limit=limit,
                role=one.role,
                tensor=one.tensor,
                cause=next((c for words, c in self.causes.items() if words in said), self.cause),
                affected=[layer for layer in one.layers if layer != one.layer],
                severity="fail" if one.is_sure else "warn",
            )
            yield replace(made, between_ranks=True)


class SameWeights(_BetweenRanks):
    """Averaged gradients keep replicas equal only where they began so, bit by bit."""

    name = "same_weights"
    summary = "Ranks that hold the same part of the model hold the same weights and buffers."
    rank = 48
    role = "parameters"
    cause = (
        "another seed, a checkpoint or a write on some ranks alone, after the wrapper was "
        "made: do it on all ranks, or send the result by torch.distributed.broadcast"
    )
    causes: ClassVar = {
        "buffers: ": "each rank computed or drew it by itself: make it before it is wrapped in "
        "DDP, which sends rank 0's, or send it by torch.distributed.broadcast",
        "got the same batch": "where each rank holds a part of a layer, as in tensor parallelism, "
        "the sum over ranks (all_reduce) is missing behind it; where all should hold the same, "
        "another seed, a checkpoint or a write on some ranks alone",
    }


class DistinctData(_BetweenRanks):
    """Data-parallel ranks see other samples; the ranks of a tensor-parallel group the same ones."""

    name = "distinct_data"
    summary = "Ranks that share the batch out are given different samples."
    rank = 49
    role = "inputs"
    cause = (
        "the data set is not split over ranks: give the DataLoader a DistributedSampler of the "
        "data-parallel rank and size, or another seed to each of these ranks"
    )


class ReplicasAgree(_BetweenRanks):
    """What is not cut is computed on each rank of a tensor-parallel group, with one result."""

    name = "replicas_agree"
    summary = "Layers that every rank of a tensor-parallel group computes return the same values."
    rank = 50
    cause = (
        "a dropout or other noise draws from the rank's own generator: use one seed within a "
        "tensor-parallel group, and another for each data-parallel rank"
    )


class AveragedGradients(_BetweenRanks):
    """Where something shares the batch out, every trainable parameter lies in a wrapper."""

    name = "averaged_gradients"
    summary = "The gradients of all trainable parameters are averaged over data-parallel ranks."
    rank = 51
    role = "parameter_gradients"
    cause = (
        "each rank takes another step, and replicas part: wrap the whole model once, after "
        "layers were added, frozen or thawed"
    )
    causes: ClassVar = {
        "called past its wrapper": "call the DDP module, not its .module: its forward prepares the "
        "reduction"
    }


class SamePath(_BetweenRanks):
    """All ranks use the same parameters, unless DDP was told to look for unused ones."""

    name = "same_path"
    summary = "All ranks use the same parameters, where their wrapper waits for each of them."
    rank = 52
    role = "parameter_gradients"
    cause = (
        "its forward takes a branch by what is in the batch, or by chance: decide the same on "
        "all ranks, or make DDP with find_unused_parameters=True"
    )


class UnusedParameters(_BetweenRanks):
    """DDP gets a gradient of every parameter that it waits for."""

    name = "unused_parameters"
    summary = "No parameter that DDP waits for is unused on all ranks."
    rank = 53
    role = "parameter_gradients"
    cause = (
        "it was frozen after DDP was made, is not called, or the loss leaves its output out: "
        "freeze it before, take it away, or make DDP with find_unused_parameters=True"
    )


class EvenWeights(_BetweenRanks):
    """A sample weighs the same on each rank; a little more in a shorter batch."""

    name = "even_weights"
    summary = "A sample or token weighs about the same, whichever rank it is on."
    rank = 54
    role = "loss"
    settings = (
        Factor(
            "max_weight_ratio",
            default=1.5,
            help="largest weight of a target relative to one of another rank, where each rank's "
            "loss is a mean over its own (one sample fewer of 32: 1.03)",
        ),
    )
    cause = (
        "gradients are averaged over ranks, however many targets each has: divide the sum of "
        "the loss by the number of targets of all ranks, and multiply by the number of ranks"
    )


class SyncedNorm(_BetweenRanks):
    """A batch norm that is not synchronised sees enough samples on each rank by itself."""

    name = "synced_norm"
    summary = "Batch norms see enough samples on each rank, or are synchronised over ranks."
    rank = 55
    severity = "warn"
    sign = -1
    settings = (
        Count(
            "min_norm_samples",
            default=16,
            help="fewest samples of a rank that a batch norm may normalise by, where ranks share "
            "the batch out",
        ),
    )
    cause = (
        "mean and variance of so few are noise, and running statistics part between ranks: "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), larger batches or a norm that "
        "needs none"
    )


class DistinctDropout(_BetweenRanks):
    """Ranks that share the batch out draw each their own masks."""

    name = "distinct_dropout"
    summary = "Data-parallel ranks draw their own random numbers where a dropout is at work."
    rank = 56
    severity = "warn"
    cause = (
        "all ranks were seeded alike, for equal weights: after the model is made, seed each "
        "data-parallel rank by torch.manual_seed(seed + rank)"
    )
