"""What ranks see over batches, in a monitored training, and beside a snapshot or another model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from corpus.ranks.blind_faults import rows, seeded
from corpus.ranks.networks import Mlp
from corpus.ranks.spread import batch, distributed, loss, net, share, sharing
from pytest_modelhealth import HealthReport, Inspector, compare
from pytest_modelhealth.ranks.evidence import fingerprint
from pytest_modelhealth.snapshot.drift import detect_drift
from pytest_modelhealth.snapshot.file_format import dump, load
from pytest_modelhealth.snapshot.snapshot import Snapshot, from_observation
from tests.ranks.engines import inspected
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


# ---- a monitor on two ranks ----------------------------------------------------------------------


ENGINES = ("ddp", "static graph", "fsdp")


def _spread(engine: str) -> nn.Module:
    if engine == "static graph":
        return DistributedDataParallel(net(), static_graph=True)
    return distributed(net(), engine)


def _trained(model: nn.Module, optimizer: Any, steps: int, monitor: Any = None) -> list[Tensor]:
    """Train; return losses, gradients and parameters of each step."""
    found = []
    x, y = share(batch(8), dist.get_rank(), dist.get_world_size())
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model(x + step), y)
        value.backward()
        held = [value, *(p.grad for p in model.parameters())]
        optimizer.step()
        held += model.parameters()
        found += [copy.deepcopy(_local(tensor.detach())) for tensor in held]
        if monitor is not None:
            monitor.step_end(step, loss=value)
    return found


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def watched() -> dict[str, Any]:
    """Return whether a training went as its twin's, and what the monitor says."""
    found = {}
    for engine in ENGINES:
        model, twin = _spread(engine), _spread(engine)
        mine, other = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin))
        with Inspector(model).monitor() as monitor:
            seen = _trained(model, mine, 3, monitor)
        seen += _trained(model, mine, 2)
        unseen = _trained(twin, other, 3) + _trained(twin, other, 2)
        same = [torch.equal(*pair) for pair in zip(seen, unseen, strict=True)]
        observation = monitor.report.observation
        gradient = observation.layers["head"].parameter_gradients["weight"].count
        found[engine] = all(same), list(observation.notes), observation.errors, gradient
    return found


def test_a_training_on_two_ranks_goes_on_as_if_never_watched() -> None:
    """Losses, gradients and parameters of five steps, bit for bit; the first three are watched."""
    for rank, found in enumerate(on_ranks(2, watched)):
        for engine, (same, notes, errors, count) in found.items():
            assert same, engine
            assert errors == ()
            assert notes[0].startswith(f"these are numbers of rank {rank} of 2 alone"), notes
            assert ("its shards" in notes[0]) is (engine == "fsdp")
            assert count == (32 if engine == "fsdp" else 64)


# ---- snapshots and comparisons -------------------------------------------------------------------


SPREAD = ("ddp", "fsdp", "fsdp+tp")


def scaled(factor: float = 1.0) -> nn.Module:
    """Return the model with one layer scaled."""
    model = net()
    with torch.no_grad():
        model.second.weight.mul_(factor)
    return model


def calibrated(model: nn.Module, engine: str = "") -> HealthReport:
    """Return a report with its noise measured."""
    size = dist.get_world_size() if engine else 1
    shares = sharing(engine, size) if engine else 1
    rank = dist.get_rank() * shares // size if engine else 0
    x, y = share(batch(), rank, shares)
    return Inspector(model, calibrate=True).run_inspection(x, y, loss=loss)


def read() -> dict[str, Any]:
    """Return what this rank sees of the model under each engine, and of one that has drifted."""
    found: dict[str, Any] = {e: pickle.dumps((inspected(e, 8, 0), None)) for e in SPREAD}
    for name, factor in (("calibrated", 1.0), ("drifted", 1.001)):
        report = calibrated(distributed(scaled(factor), "ddp"), "ddp")
        found[name] = pickle.dumps((report.observation, report._noise))
        found[f"{name} noise"] = report._noise
    return found


def snapshot(observation: Any, noise: Any) -> Snapshot:
    """Return what is read back of a snapshot's file."""
    return load(dump(from_observation(observation, noise)))


def test_a_snapshot_of_one_process_is_read_on_four_ranks() -> None:
    """Nothing has drifted under any engine; a layer scaled by 1.001 has."""
    ranks = on_ranks(4, read)
    plain = calibrated(net())
    before = snapshot(plain.observation, plain._noise)
    seen = {name: pickle.loads(ranks[0][name]) for name in (*SPREAD, "calibrated", "drifted")}
    for name in (*SPREAD, "calibrated"):
        report = detect_drift(before, from_observation(*seen[name]))
        assert not report.drifts, (name, report.drifts[:3])
    drifts = detect_drift(before, from_observation(*seen["drifted"])).drifts
    assert "second" in {drift.label for drift in drifts}
    assert "first" not in {d.label for d in drifts if d.role == "activations"}
    again = detect_drift(snapshot(*seen["calibrated"]), from_observation(plain.observation, None))
    assert not again.drifts
    assert all(rank["calibrated noise"] == ranks[0]["calibrated noise"] for rank in ranks)


def compared() -> list[tuple[bool, str]]:
    """Return the verdicts of this rank on the plain model and others."""
    x, y = batch()
    found = []
    for engine in ("ddp", "fsdp", "tp"):
        for factor in (1.0, 1.01):
            other = distributed(scaled(factor), engine)
            result = compare(net(), other, x, y, loss=loss)
            found.append((result.equivalent, str(result).splitlines()[0]))
    return found


def test_a_distributed_model_is_compared_with_the_plain_one() -> None:
    """It is equivalent, and is not where a layer is scaled; the same on all ranks."""
    first, second = on_ranks(2, compared)
    assert first == second
    assert [verdict for verdict, _ in first] == [True, False] * 3, first
    assert all("second" in text for verdict, text in first if not verdict), first
