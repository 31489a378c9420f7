"""What inspections of models on several ranks say, collected on each rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from corpus.ranks.engines import ENGINES, batch, held, loss_of, make, same, train
from pytest_modelhealth.capture.engine import Request, find_engine
from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.report import Observation


def averaged(gradients: list[Held]) -> list[Held]:
    """Return the means over ranks of gradients of DDP."""
    means = []
    for layer, name, gradient in gradients:
        mean = gradient.clone()
        dist.all_reduce(mean)
        means.append((layer, name, mean / dist.get_world_size()))
    return means


def seen(engines: list[str]) -> dict[str, Observation]:
    """Return what is seen of each engine, in evaluation mode, in which no rank differs."""
    return {engine: _observed(engine) for engine in engines}


def _observed(engine: str) -> Observation:
    model = make(engine)[0].eval()
    x, y = batch(engine, 99)
    request = Request(model, x, y, loss_of, averager=averaged if engine == "DDP" else None)
    observation = find_engine(model).run(request)
    return replace(observation, layers=dict(observation.layers), flow=None)


def violations_and_errors() -> dict[str, tuple[Any, ...]]:
    """Return, for each engine, what checks say of parameters, and what went wrong."""
    warnings.simplefilter("ignore")
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
    found = {}
    for engine in ("DDP", "FSDP2", "HSDP", "tensor parallel", "sequence parallel"):
        model, optimizer = make(engine)
        train(engine, model, optimizer, 0)
        x, y = batch(engine, 99)
        inspector = Inspector(model, ranks=False)
        inspected = _counted(partial(inspector.run_inspection, x, y, loss=loss_of))
        found[engine] = _counted(partial(train, engine, model, optimizer, 1)), inspected
    return found


def _counted(run: Callable[[], Any]) -> dict[str, int]:
    from torch.distributed.tensor.debug import CommDebugMode  # it imports inductor

    with CommDebugMode() as counter:
        run()
    return {str(name): count for name, count in counter.get_comm_counts().items()}


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

    x, y = batch("DDP", 99)
    said = []
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(
            nn.Linear(6, 3), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        said.append(_why(partial(Inspector(model).run_inspection, x, y, loss=loss_of)))
    for engine, steps in (("DDP", 0), ("DDP, PowerSGD hook", 3), ("FSDP2", 2), ("DDP", 2)):
        model, optimizer = make(engine)
        twin, its = make(engine)
        for step in range(steps):
            train(engine, model, optimizer, step)
            train(engine, twin, its, step)
        options = {"optimizer": optimizer, "inputs": x, "target": y, "loss": loss_of}
        said.append(_why(partial(Inspector(model).run_step, **options)))
        train(engine, model, optimizer, 10)
        train(engine, twin, its, 10)
        assert same(held(model), held(twin)), engine
    hidden = Inspector(replicate(nn.Linear(6, 3)))
    return [*said, _why(partial(hidden.run_inspection, x, y, loss=loss_of))]


def _why(run: Callable[[], Any]) -> str:
    try:
        run()
    except InspectionError as error:
        return str(error)
    return "runs"


def beside() -> dict[str, str]:
    """Return how models go on after a summary and after all probes."""
    warnings.simplefilter("ignore")
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
        found[engine] = f"{summary.to_dict()['totals']['parameters']} {is_same}"
    return found


def parallel_loss() -> tuple[tuple[str, ...], float | None]:
    """Return errors and loss where the loss is computed on shards of the classes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(3)
    plan = {"0": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(nn.Sequential(nn.Linear(6, 4)), mesh, plan)
    x, y = batch("tensor", 99)
    with loss_parallel():
        seen = Inspector(model).run_inspection(x, y, loss=loss_of).observation
    return seen.errors, seen.loss


def plain_loss_of_rank_0() -> float:
    """Return the loss of `parallel_loss` in one process, which has no rank."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 4))
    generator = torch.Generator().manual_seed(9900)
    x = torch.randn(4, 6, generator=generator)
    return loss_of(model(x), torch.randint(0, 3, (4,), generator=generator)).item()
