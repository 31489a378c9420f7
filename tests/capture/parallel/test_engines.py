"""Models on several ranks are inspected, refused, and left as they were: now and in later steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from corpus.ranks.engines import (
    ENGINES,
    Case,
    Net,
    batch,
    chosen_cases,
    held,
    loss_of,
    make,
    same,
    train,
)
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.inspector import Inspector
from tests.capture.parallel.comparing import differences
from tests.ranks.launching import on_ranks


def violations_and_errors() -> dict[str, tuple[Any, ...]]:
    """Return, for each engine, what checks say of parameters, and what went wrong."""
    checks = {"missing_gradients", "unregistered_parameters"}
    found = {}
    for engine in ENGINES:
        x, y = batch(engine, 99)
        report = Inspector(make(engine)[0]).run_inspection(x, y, loss=loss_of)
        observation = report.observation
        states = {layer.status.value for layer in observation.layers.values()}
        found[engine] = (
            [v.check for v in report.violations if v.check in checks],
            observation.errors,
            states - {"observed", "not_called"},
        )
    return found


def collectives() -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Return the collectives of a step with its optimizer, and of an inspection."""
    from torch.distributed.tensor.debug import CommDebugMode  # it imports inductor

    def counted(run: Callable[[], Any]) -> dict[str, int]:
        with CommDebugMode() as counter:
            run()
        return {str(name): count for name, count in counter.get_comm_counts().items()}

    found = {}
    for engine in ("DDP", "FSDP2", "HSDP", "tensor parallel", "sequence parallel"):
        model, optimizer = make(engine)
        train(engine, model, optimizer, 0)
        x, y = batch(engine, 99)
        inspector = Inspector(model, ranks=False)
        inspected = counted(partial(inspector.run_inspection, x, y, loss=loss_of))
        found[engine] = counted(partial(train, engine, model, optimizer, 1)), inspected
    return found


def one_alone() -> str:
    """Inspect on rank 0 alone, where the reducer is about to cut its buckets anew."""
    model, optimizer = make("DDP")
    train("DDP", model, optimizer, 0)
    if dist.get_rank() == 0:
        x, y = batch("DDP", 99)
        Inspector(model, ranks=False).run_inspection(x, y, loss=loss_of)
    train("DDP", model, optimizer, 1)
    return "went on"


def refused() -> list[str]:
    """Return what is said of what cannot be put back."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel

    def why(run: Callable[..., Any], *inputs: Any, **options: Any) -> str:
        try:
            run(*inputs, loss=loss_of, **options)
        except InspectionError as error:
            return str(error)
        return "runs"

    x, y = batch("DDP", 99)
    said = []
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(
            nn.Linear(6, 3), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        said.append(why(Inspector(model).run_inspection, x, y))
    for engine, steps in (("DDP", 0), ("DDP, PowerSGD hook", 3), ("FSDP2", 2), ("DDP", 2)):
        model, optimizer = make(engine)
        twin, its = make(engine)
        for step in range(steps):
            train(engine, model, optimizer, step)
            train(engine, twin, its, step)
        said.append(why(Inspector(model).run_step, optimizer=optimizer, inputs=x, target=y))
        train(engine, model, optimizer, 10)
        train(engine, twin, its, 10)
        assert same(held(model), held(twin)), engine
    return [*said, why(Inspector(replicate(nn.Linear(6, 3))).run_inspection, x, y)]


def beside() -> dict[str, tuple[int, bool]]:
    """Return how models go on after a summary and after all probes."""
    found = {}
    for engine in ("DDP", "DDP, static_graph", "FSDP2", "tensor parallel"):
        (model, optimizer), (twin, its) = make(engine), make(engine)
        x, y = batch(engine, 99)
        summary = Inspector(model).summary(x)
        Inspector(model).run_inspection(x, y, loss=loss_of, probes=True)
        for step in range(3):
            train(engine, model, optimizer, step)
            train(engine, twin, its, step)
        is_same = same(held(model), held(twin))
        found[engine] = summary.to_dict()["totals"]["parameters"], is_same
    return found


def parallel_loss() -> tuple[tuple[str, ...], float | None, float]:
    """Return errors and loss where that is computed on shards of the classes, and as it is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 4))
    x, y = batch("tensor", 99)
    expected = loss_of(model(x), y).item()
    plan = {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with loss_parallel():
        parallel = parallelize_module(model, mesh, plan)
        seen = Inspector(parallel).run_inspection(x, y, loss=loss_of).observation
    return seen.errors, seen.loss, expected


WAYS = (one_alone, violations_and_errors, collectives, refused, beside, parallel_loss)


def each_way() -> dict[str, Any]:
    """Return what all of these say on this rank."""
    warnings.simplefilter("ignore")
    return {way.__name__: way() for way in WAYS}


@cache
def said() -> list[dict[str, Any]]:
    """Return what each of two ranks says."""
    return on_ranks(2, each_way, seconds=120)


def test_no_false_alarms() -> None:
    """No engine has parameters without gradients, leaves that nobody knows, or errors of ours.

    One rank alone inspects DDP and waits for nobody.
    """
    fine: tuple[Any, ...] = ([], (), set())
    for found in said():
        engines = found["violations_and_errors"]
        assert {engine: told for engine, told in engines.items() if told != fine} == {}
        assert found["one_alone"] == "went on"


def test_the_inspection_adds_no_collective() -> None:
    """FSDP2 and tensor parallelism take those of a step with its optimizer, and DDP none at all."""
    for found in said():
        for engine, (bare, inspected) in found["collectives"].items():
            assert bare, engine
            assert inspected == ({} if engine == "DDP" else bare), engine


def test_what_cannot_be_put_back_is_refused() -> None:
    """Before anything runs; DDP that has settled is run as often as you like."""
    flat, original, early, hook, sharded, settled, hidden = said()[0]["refused"]
    assert flat == original == hidden
    assert "fully_shard(module)" in flat
    assert "train for two steps first" in early
    assert "communication hook with a state" in hook
    assert "plain model, in one process" in sharded
    assert settled == "runs"


def test_summaries_and_probes_leave_no_trace() -> None:
    """Sizes are those of the whole model."""
    wide = sum(p.numel() for p in Net(hidden=12).parameters())
    size = sum(p.numel() for p in Net().parameters())
    found = said()[0]["beside"]
    assert found.pop("tensor parallel") == (wide, True)
    assert {*found.values()} == {(size, True)}


def test_a_loss_on_shards_of_the_classes() -> None:
    """It is the loss of one process, without an error."""
    for found in said():
        errors, loss, expected = found["parallel_loss"]
        assert errors == ()
        assert loss == pytest.approx(expected, 1e-5)


def one_way_each() -> list[Case]:
    """Return each engine in one of its ways, the next in the next."""
    cases, ways = chosen_cases(), len(chosen_cases()) // len(ENGINES)
    return [cases[ways * place + place % ways] for place in range(len(ENGINES))]


THREE = [
    ("DDP", 0, "whole"),
    ("DDP", 1, "loss raises"),
    ("DDP, static_graph", 1, "whole"),
    ("FSDP2", 0, "forward alone"),
    ("FSDP2", 2, "whole"),
]
"""Sums of three are in another order where buckets were cut anew; 3 rows leave some with 1."""


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, one_way_each(), id="one way each"),
        pytest.param(2, chosen_cases(), id="all ways", marks=pytest.mark.slow),
        pytest.param(3, THREE, id="three ranks"),
    ],
)
def test_every_engine_goes_on_as_its_twin_that_nobody_inspected(
    ranks: int, cases: list[Case]
) -> None:
    """Gradients, parameters, buffers, the hook's state and three more steps, bit for bit."""
    assert len(ENGINES) > 16
    for found in on_ranks(ranks, differences, cases, seconds=240):
        assert {case: unlike for case, unlike in found.items() if unlike} == {}
        assert len(found) == len(cases)
