"""The stages of a pipeline are told of as the model in one piece, the same on all ranks."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from pytest_modelhealth import Inspector, compare
from pytest_modelhealth.report import ROLES, LayerRecord, Observation
from tests.ranks import pipelines
from tests.ranks.engines import told
from tests.ranks.launching import on_ranks

CASES = {**pipelines.FAULTS, **pipelines.HEALTHY}


def _outcome(act: Any) -> Any:
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - it is what the test looks at
        return f"{type(error).__name__}: {error}"


def in_two_stages() -> dict[str, Any]:
    """Return what one of two ranks is told, of each case and of what goes wrong."""
    found: dict[str, Any] = {}
    for number, case in enumerate(CASES):
        report = pipelines.in_stages(case, ("GPipe", "1F1B")[number % 2])
        seen = report.observation
        found[case] = pipelines.findings(report), pickle.dumps(seen), told(seen), str(report)
    for kind in pipelines.SEVERAL_STAGES:
        found[kind] = _several_stages(kind)
    schedule = pipelines.schedule_of(pipelines.halves("as it is")[dist.get_rank()])
    found["compared"] = _outcome(lambda: compare(schedule, schedule, *pipelines.batch()))
    found["alike"] = list(_alike().layers)
    found["probes"] = told(pipelines.in_stages("as it is", probes=True).observation.probes)
    found["calls"] = pipelines.in_stages("as it is").observation.loss_calls[0].targets.count
    rank = dist.get_rank()
    front, back = pipelines.halves("as it is")
    if rank:
        back.head = nn.Linear(5, 3)  # does not fit
    schedule = pipelines.schedule_of((front, back)[rank])
    x, y = pipelines.batch()
    begun = time.monotonic()
    inspector = Inspector(schedule, rank_timeout=2)
    found["raised"] = _outcome(
        lambda: inspector.run_inspection(None if rank else x, y if rank else None)
    )
    found["seconds"] = time.monotonic() - begun
    time.sleep(max(0.0, 4.0 - found["seconds"]))
    return found


def _alike() -> Observation:
    """Return what is seen of stages with equal names, the last of which is one layer."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 6))),
        nn.Sequential(nn.Linear(6, 3)),
    ]
    schedule = pipelines.schedule_of(stages[rank])
    x, y = pipelines.batch()
    report = Inspector(schedule).run_inspection(None if rank else x, y if rank else None)
    return report.observation


def _several_stages(kind: str) -> dict[str, Any]:
    """Return what is told where each rank has two stages, and whether a training is as without."""
    model = pipelines.quarters()
    schedule, given = pipelines.in_quarters(model, kind)
    seen = Inspector(schedule).run_inspection(**given).observation
    twin = pipelines.quarters()
    other, _ = pipelines.in_quarters(twin, kind)
    steps = [_stepped(model, schedule, given), _stepped(twin, other, given)]
    silent, given = pipelines.in_quarters(pipelines.quarters(silent=2), kind)
    return {
        "seen": pickle.dumps(seen),
        "told": told(seen),
        "untouched": list(map(torch.equal, *steps)),
        "silent": pipelines.findings(Inspector(silent).run_inspection(**given)),
    }


def _stepped(model: nn.Module, schedule: Any, given: dict[str, Any]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = () if given["inputs"] is None else (given["inputs"],)
    for _ in range(2):
        optimizer.zero_grad()
        schedule.step(*inputs, target=given["target"])
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """What two ranks were told."""
    return on_ranks(2, in_two_stages)


@pytest.mark.parametrize("case", CASES)
def test_verdict_is_that_of_one_piece(two: list[dict[str, Any]], case: str) -> None:
    """The same violations of the same layers, and every bit the same on both ranks."""
    verdict, seen, *_ = two[0][case]
    whole = pipelines.in_one_piece(case)
    assert verdict == pipelines.findings(whole)
    assert bool(verdict) is (case in pipelines.FAULTS)
    assert two[1][case][2] == two[0][case][2]
    joint = pickle.loads(seen)
    assert joint.errors == ()
    if case != "dropout":  # which each microbatch draws for itself
        _require_same(whole.observation, joint)


def _require_same(whole: Observation, joint: Observation) -> None:
    assert list(joint.layers) == list(whole.layers)
    assert joint.samples == pipelines.SAMPLES
    assert joint.loss == pytest.approx(whole.loss, rel=1e-6, nan_ok=True)
    for name, record in whole.layers.items():
        _require_same_record(record, joint.layers[name])


def _require_same_record(record: LayerRecord, other: LayerRecord) -> None:
    assert other.status is record.status
    for role in ROLES:
        one, two = record.tensors(role), other.tensors(role)
        assert one.keys() == two.keys(), (record.name, role)
        for own, seen in one.items():
            assert two[own].count == seen.count, (record.name, role)
            assert two[own].nonfinite_count == seen.nonfinite_count
            near = 1e-5 * (seen.rms or 1.0)
            assert two[own].rms == pytest.approx(seen.rms, rel=1e-5, abs=near, nan_ok=True)
            assert two[own].abs_max == pytest.approx(seen.abs_max, rel=1e-5, nan_ok=True)


def test_each_layer_says_where_it_ran(two: list[dict[str, Any]]) -> None:
    """Which rank has its stage, its largest value and its NaN; the flow goes on behind a stage."""
    case = "a NaN in a weight of the first stage"
    joint = pickle.loads(two[0][case][1])
    for name, rank in (("embed", 0), ("norm", 0), ("hidden", 1), ("head", 1)):
        assembly = joint.layers[name].assembled["activations"]
        assert (assembly.stage, assembly.how, assembly.ranks) == ((rank,), "one rank", 1)
        assert assembly.nonfinite == (rank,)
    assert "in its parameter 'weight' on rank 0" in two[1][case][3]
    assert "on 2 ranks (pipeline of 2 stages)" in two[1][case][3]
    flow = joint.flow
    assert flow.is_exact
    assert flow.producers("hidden") == ("norm",)
    assert "head" in flow.reach("embed")
    assert flow.producers("embed") == ("input 0",)
    assert [group.dimension for group in joint.ranks.groups] == ["stage"]


def test_names_clash_only_where_they_do(two: list[dict[str, Any]]) -> None:
    """A stage's name stands before those that another stage has, too."""
    assert two[0]["alike"] == ["", "stage0.0", "1", "1.0", "1.1", "stage1.0"]


@pytest.mark.parametrize("kind", pipelines.SEVERAL_STAGES)
def test_several_stages_on_a_rank(two: list[dict[str, Any]], kind: str) -> None:
    """The numbers, ways and verdicts of one piece, also where the backward pass is split."""
    x, y = pipelines.batch()

    def whole(**fault: int) -> Any:
        return Inspector(pipelines.quarters(**fault)).run_inspection(x, y, loss=F.cross_entropy)

    first, second = (rank[kind] for rank in two)
    assert first["told"] == second["told"]
    assert all(first["untouched"] + second["untouched"])
    joint, alone = pickle.loads(first["seen"]), whole().observation
    assert {name: joint.flow.consumers(name) for name in alone.layers if name} == {
        name: alone.flow.consumers(name) for name in alone.layers if name
    }
    for name, record in alone.layers.items():
        if ".scale" not in name:  # which each microbatch calls anew
            _require_same_record(record, joint.layers[name])
    beside = joint.layers["1.scale"].gradients
    assert beside.count == pipelines.MICROBATCHES * 16
    assert beside.abs_max > 0
    assert first["silent"] == pipelines.findings(whole(silent=2)) != []


def test_a_pipeline_is_not_compared(two: list[dict[str, Any]]) -> None:
    """The error names what can be."""
    assert two[0]["compared"] == (
        "InspectionError: the reference is a ScheduleGPipe, of which each rank runs a part: "
        "compare the model in one piece, or a stage's own module with a batch of its own, "
        "stage.submod"
    )


def test_what_runs_a_model_again_is_not_for_a_pipeline(two: list[dict[str, Any]]) -> None:
    """A probe says so; the loss of all microbatches counts as one."""
    outcomes = {record["reason"] for record in dict(two[0]["probes"])["records"]}
    assert outcomes == {"this rank has a part of the model alone: probe the model in one piece"}
    assert two[0]["calls"] == pipelines.SAMPLES


def test_an_error_in_one_stage_reaches_all(two: list[dict[str, Any]]) -> None:
    """The rank that raises has its own; the other learns whose, and does not wait for long."""
    assert two[1]["raised"].startswith("RuntimeError")
    assert two[0]["raised"].startswith(
        "InspectionError: rank 1 of 2 raised RuntimeError: mat1 and mat2 shapes cannot be"
    )
    assert two[0]["seconds"] < 8


def _spread(engine: str, module: nn.Module, mesh: Any) -> nn.Module:
    if engine == "fsdp":
        return fully_shard(module, mesh=mesh)
    return DistributedDataParallel(module, process_group=mesh.get_group())


def _mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))


def _shapes(engine: str, stage: int) -> Any:
    """Return what a stage in DDP is given and returns: to find out, torch would train it first."""
    if engine == "fsdp":
        return None
    samples = pipelines.SAMPLES // 2 // pipelines.MICROBATCHES
    inside = torch.empty(samples, 16, requires_grad=True)
    return (inside, torch.empty(samples, 3)) if stage else (torch.empty(samples, 6), inside)


def _given(mesh: Any) -> dict[str, Tensor | None]:
    stage = mesh.get_local_rank("stage")
    x, y = (t.chunk(2)[mesh.get_local_rank("data")] for t in pipelines.batch())
    return {"inputs": None if stage else x, "target": y if stage else None}


def _trained(schedule: Any, given: dict[str, Any], steps: int) -> list[Tensor]:
    module = schedule._stage.submod
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = () if given["inputs"] is None else (given["inputs"],)
        schedule.step(*inputs, target=given["target"])
        optimizer.step()
    held = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    return [tensor.detach().clone() for tensor in held]


def in_two_pipelines() -> dict[str, Any]:
    """Return what one of four ranks is told: two pipelines that share the batch out."""
    mesh = _mesh()
    stage, group = mesh.get_local_rank("stage"), mesh.get_group("stage")
    given = _given(mesh)
    found: dict[str, Any] = {}
    for engine in ("ddp", "fsdp"):
        module = pipelines.halves("as it is")[stage]
        twin = _spread(engine, copy.deepcopy(module), mesh["data"])
        module = _spread(engine, module, mesh["data"])
        shapes = _shapes(engine, stage)
        mine, other = (
            pipelines.schedule_of(one, group=group, shapes=shapes) for one in (module, twin)
        )
        seen = Inspector(mine).run_inspection(**given).observation
        found[engine] = pickle.dumps(seen), told(seen)
        after = _trained(mine, given, 3)
        found[f"{engine} untouched"] = list(map(torch.equal, after, _trained(other, given, 3)))
        Inspector(mine).run_inspection(**given, backward=False)
        again = [_trained(one, given, 1) for one in (mine, other)]
        found[f"{engine} untouched"] += list(map(torch.equal, *again))
    found["tensor parallel"] = _in_tensor_parallel(mesh)
    module = pipelines.halves("as it is")[stage]
    module = _spread("ddp", module, mesh["data"])
    if dist.get_rank() == 3:
        with torch.no_grad():
            module.module.hidden.weight[0, 0] += 1
    odd = pipelines.schedule_of(module, group=group)
    found["weights"] = _violations(Inspector(odd).run_inspection(**given))
    module = _spread("ddp", pipelines.halves("as it is")[stage], mesh["data"])
    alike = pipelines.schedule_of(module, group=group)
    x, y = (part[:8] for part in pipelines.batch())
    inputs, target = (None, y) if stage else (x, None)
    found["batch"] = _violations(Inspector(alike).run_inspection(inputs, target))
    if dist.get_rank() == 3:
        module.module.head.eval()
    found["structure"] = _outcome(lambda: Inspector(alike).run_inspection(**given))
    return found


def _in_tensor_parallel(mesh: Any) -> tuple[bytes, Any]:
    """Return what is told where two ranks share the tensors of a stage, and see the same batch."""
    stage, (x, y) = mesh.get_local_rank("stage"), pipelines.batch()
    module = pipelines.halves("as it is")[stage]
    gathered = ColwiseParallel(output_layouts=Replicate())
    plans = {"embed": gathered}, {"hidden": ColwiseParallel(), "head": RowwiseParallel()}
    parallelize_module(module, mesh["data"], plans[stage])
    schedule = pipelines.schedule_of(module, group=mesh.get_group("stage"))
    report = Inspector(schedule).run_inspection(None if stage else x, y if stage else None)
    assert report.healthy, report
    return pickle.dumps(report.observation), told(report.observation)


def _violations(report: Any) -> list[str]:
    return [f"{one.check} {one.layer}: {one.message}" for one in report.violations]


def test_pipelines_that_share_the_batch_are_one_model() -> None:
    """Stages in DDP, `fully_shard` or tensor parallel: as one process, untouched, faults named."""
    ranks = on_ranks(4, in_two_pipelines)
    whole = pipelines.in_one_piece("as it is").observation
    for engine in ("ddp", "fsdp", "tensor parallel"):
        _require_same(whole, pickle.loads(ranks[0][engine][0]))
        assert all(rank[engine][1] == ranks[0][engine][1] for rank in ranks), engine
    for engine in ("ddp", "fsdp"):
        assert all(all(rank[f"{engine} untouched"]) for rank in ranks), engine
    for rank in ranks:
        assert rank["weights"] == [
            "same_weights hidden: rank 3 has other values of 'hidden.weight' than rank 2"
        ]
        assert rank["batch"] == ["distinct_data : ranks 0 and 1 got the same batch"]
        assert (
            "rank 3 came to the run with something else than rank 2 as stage 1"
            in (rank["structure"])
        )
