"""What is wrong between ranks in a later batch, and what may be meant."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from corpus.ranks.blind_faults import rows, seeded
from corpus.ranks.networks import Mlp
from pytest_modelhealth import Inspector
from tests.ranks.launching import on_ranks


def left_out_of_shards() -> list[tuple[str, str, str]]:
    """Inspect a model of which `fully_shard` was told to ignore a layer."""
    seeded(0)
    model = Mlp()
    dp = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=dp, ignored_params=set(model.second.parameters()))
    torch.manual_seed(10 + dist.get_rank())
    report = Inspector(model).run_inspection(*rows(dist.get_rank()), loss=F.cross_entropy)
    assert not report.violations
    return [(found.check, found.layer, found.message) for found in report.warnings]


def faults_in_later_batches() -> tuple[list[tuple[str, str]], tuple[int, ...], int]:
    """Inspect three batches: the second the same on both ranks, the third with a NaN on rank 1."""
    seeded(0)
    rank = dist.get_rank()
    model = DistributedDataParallel(Mlp())
    batches = [rows(rank), rows(7), rows(10 + rank)]
    if rank == 1:
        batches[2][0][0, 0] = float("nan")
    torch.manual_seed(10 + rank)
    report = Inspector(model).run_batches(batches, loss=F.cross_entropy)
    found = [(violation.check, violation.message) for violation in report.violations]
    ranks = report.observation.ranks
    assert ranks is not None
    return found, report[""].ill_ranks["inputs"], len(ranks.disagreements)


class Halves(nn.Module):
    """Two linear layers of which each rank holds one half, between two that all hold."""

    def __init__(self) -> None:
        super().__init__()
        seeded(0)
        self.into, self.out = nn.Linear(24, 8), nn.Linear(8, 10)
        seeded(1 + dist.get_rank())
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        h = self.into(x)
        part = self.down(self.up(h).relu())
        return self.out(h + all_reduce(part, "sum", dist.group.WORLD))


def tensor_parallel_by_hand() -> list[str]:
    """Inspect it."""
    model, (x, y) = Halves(), rows(0)
    report = Inspector(model, ranks=True).run_inspection(x, y, loss=F.cross_entropy)
    kinds = ("same_weights", "distinct_data", "replicas_agree")
    return [v.check for v in (*report.violations, *report.warnings) if v.check in kinds]


def test_parts_by_hand_are_no_other_seed() -> None:
    """Of one batch on all ranks, with other weights on each, nothing is said."""
    assert on_ranks(2, tensor_parallel_by_hand) == [[], []]


def test_what_shards_leave_out_only_warns() -> None:
    """It may be meant so, and the wrapper does not remember."""
    first, second = on_ranks(2, left_out_of_shards)
    assert first == second
    assert [found[:2] for found in first] == [("averaged_gradients", "second")]
    assert "'second.weight' and 1 more parameter" in first[0][2]


def test_a_run_tells_of_each_batch() -> None:
    """Neither is lost when batches are merged, and both ranks say the same."""
    first, second = on_ranks(2, faults_in_later_batches)
    assert first == second
    found, nonfinite, _ = first
    texts = dict(found)
    assert texts["distinct_data"] == "ranks 0 and 1 got the same batch"
    assert "on rank 1 alone" in texts["finite"]
    assert nonfinite == (1,)
