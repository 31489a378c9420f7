"""What is wrong between ranks in a later batch, and what may be meant."""

from __future__ import annotations

from typing import Any

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
from pytest_modelhealth.ranks.evidence import fingerprint
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


def seen() -> tuple[Any, ...]:
    """Return what all of these say on this rank."""
    return tensor_parallel_by_hand(), left_out_of_shards(), faults_in_later_batches()


def test_what_may_be_meant_and_what_a_later_batch_brings() -> None:
    """Of one batch on all ranks, with other weights on each, nothing is said.

    What shards leave out only warns: the wrapper does not remember. Of what batches show nothing
    is lost when they are merged. All ranks say the same.
    """
    first, second = on_ranks(2, seen)
    assert first == second
    by_hand, left_out, (violations, nonfinite, _) = first
    assert by_hand == []
    assert [one[:2] for one in left_out] == [("averaged_gradients", "second")]
    assert "'second.weight' and 1 more parameter" in left_out[0][2]
    texts = dict(violations)
    assert texts["distinct_data"] == "ranks 0 and 1 got the same batch"
    assert "on rank 1 alone" in texts["finite"]
    assert nonfinite == (1,)


VALUES = torch.arange(1.0, 25.0).reshape(4, 6)


def test_tensors_have_one_number_as_far_as_they_are_equal() -> None:
    """Order, shape, dtype, sign and the last bit count; memory and graph do not."""
    last_bit = VALUES.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(24.000002))
    others = [VALUES.flip(0), VALUES.reshape(6, 4), VALUES.double(), last_bit, VALUES.t(), -VALUES]
    assert len({*map(fingerprint, others), fingerprint(VALUES)}) == 7
    for same in (VALUES.clone(), VALUES.t().contiguous().t(), torch.nn.Parameter(VALUES.clone())):
        assert fingerprint(same) == fingerprint(VALUES)
    for one in (
        torch.zeros(0, 3),
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.empty(3, device="meta"),
        torch.tensor(float("nan")),
    ):
        assert fingerprint(one) == fingerprint(one.clone())
