"""Schedules of pipeline parallelism, on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from pytest_modelhealth import InspectionError, Inspector
from tests.ranks.launching import on_ranks

KINDS = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
MICROBATCHES = 4


class Stage(nn.Module):
    """Some layers of a model."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6 if first else 3)
        # a schedule's own first step runs later stages on memory that nobody has written, and
        # their running statistics take that in
        self.norm = nn.BatchNorm1d(6, track_running_stats=first)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.b(F.relu(self.norm(self.a(x)))))


def halves() -> list[Stage]:
    """The two stages, the same on every rank."""
    torch.manual_seed(0)
    return [Stage(first=True), Stage(first=False)]


def batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(8, 6, generator=generator),
        torch.randint(3, (8,), generator=generator),
    )


def schedule_of(kind: str, module: nn.Module, **options: Any) -> Any:
    """The schedule of this rank."""
    rank = dist.get_rank()
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    return KINDS[kind](stage, MICROBATCHES, **{"loss_fn": F.cross_entropy, **options})


def given() -> dict[str, Any]:
    """What this rank passes."""
    x, y = batch()
    return {"inputs": x if dist.get_rank() == 0 else None, "target": y if dist.get_rank() else None}


def trained(schedule: Any, module: nn.Module, steps: int) -> list[torch.Tensor]:
    """Train; return parameters, buffers and gradients."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step)
        schedule.step(*([x] if dist.get_rank() == 0 else []), target=y if dist.get_rank() else None)
        optimizer.step()
    held = [t.detach().clone() for t in (*module.parameters(), *module.buffers())]
    return held + [p.grad.clone() for p in module.parameters() if p.grad is not None]


def untouched(kind: str, before: int) -> list[bool]:
    """Whether training goes on as it would: after an inspection, after two, after a forward."""
    module = halves()[dist.get_rank()]
    twin = copy.deepcopy(module)
    schedule, other = schedule_of(kind, module), schedule_of(kind, twin)
    trained(schedule, module, before), trained(other, twin, before)
    gradients = [p.grad for p in module.parameters()]
    held = [t.clone() for t in (*module.parameters(), *module.buffers())]
    inspector = Inspector(schedule)
    inspector.run_inspection(**given())
    inspector.run_inspection(**given(), backward=False)
    now = [*module.parameters(), *module.buffers()]
    kept = all(map(torch.equal, held, now))
    kept &= all(p.grad is g for p, g in zip(module.parameters(), gradients, strict=True))
    after, expected = trained(schedule, module, 3), trained(other, twin, 3)
    return [kept, all(map(torch.equal, after, expected))]


def seen(kind: str) -> dict[str, Any]:
    """What the inspection of this rank's stage says."""
    module = halves()[dist.get_rank()]
    report = Inspector(schedule_of(kind, module), ranks=False).run_inspection(**given())
    numbers = {
        layer.name: (
            layer.calls,
            layer.activations.mean,
            layer.gradients.norm if layer.gradients else None,
            {n: s.norm for n, s in layer.parameter_gradients.items()},
        )
        for layer in report
    }
    return {
        "loss": report.loss,
        "layers": numbers,
        "verdict": str(report.verdict),
        "say": str(report),
    }


def whole() -> dict[str, Any]:
    """The same in one process, a microbatch at a time."""
    first, second = halves()
    x, y = batch()
    seen: dict[str, list[torch.Tensor]] = {}
    kept: list[torch.Tensor] = []
    for stage, prefix in ((first, "0"), (second, "1")):
        for name, module in stage.named_modules():

            def hook(_m, _a, out, key=(prefix, name)):
                out.retain_grad()
                kept.append(out)
                seen.setdefault(key, []).append(out)

            module.register_forward_hook(hook)
    losses = []
    for x_, y_ in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        loss = F.cross_entropy(second(first(x_)), y_)
        (loss / MICROBATCHES).backward()
        losses.append(loss.item())
    return {
        "loss": sum(losses) / len(losses),
        "mean": {k: torch.cat(v).double().mean().item() for k, v in seen.items()},
        "gradient": {
            k: torch.cat([t.grad for t in v]).double().norm().item() for k, v in seen.items()
        },
        "parameters": [
            {n: p.grad.double().norm().item() for n, p in stage.named_parameters()}
            for stage in (first, second)
        ],
    }


def several_stages() -> tuple[list[str], bool]:
    """Names of layers where a rank has two stages of four, and whether those are untouched."""
    torch.manual_seed(0)
    every = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4)]
    mine = [every[dist.get_rank()], every[dist.get_rank() + 2]]
    stages = [
        PipelineStage(module, dist.get_rank() + 2 * number, 4, torch.device("cpu"))
        for number, module in enumerate(mine)
    ]
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=lambda out, y: out.sum())
    report = Inspector(schedule, ranks=False).run_inspection(**given())
    calls = [f"{layer.name} {layer.calls}" for layer in report if layer.name]
    return calls, all(p.grad is None for module in mine for p in module.parameters())


def refusals() -> list[str]:
    """What is refused, before anything is sent."""
    module = halves()[dist.get_rank()]
    schedule, said = schedule_of("GPipe", module), []
    asked: list[dict[str, Any]] = [{"loss": F.cross_entropy}, {"backward": lambda loss: None}]
    for options in asked:
        with pytest.raises(InspectionError) as caught:
            Inspector(schedule).run_inspection(None, **options)
        said.append(str(caught.value))
    with pytest.raises(InspectionError) as caught:
        Inspector(schedule._stage).run_inspection(None)
    said.append(str(caught.value))
    without = schedule_of("GPipe", module, loss_fn=None)
    with pytest.raises(InspectionError) as caught:
        Inspector(without).run_inspection(None, backward=True)
    return [*said, str(caught.value)]


def all_of_it() -> dict[str, Any]:
    """One launch for all."""
    return {
        "untouched": {(k, n): untouched(k, n) for k in KINDS for n in (0, 2)},
        "seen": {kind: seen(kind) for kind in KINDS},
        "several stages": several_stages(),
        "refusals": refusals(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What two ranks found."""
    return on_ranks(2, all_of_it)


def test_a_schedule_goes_on_as_if_never_inspected(ranks: list[dict[str, Any]]) -> None:
    """Before its first step, and after two."""
    for rank in ranks:
        assert all(all(kept) for kept in rank["untouched"].values()), rank["untouched"]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_one_process(ranks: list[dict[str, Any]], kind: str) -> None:
    """Which runs one microbatch after the other, and differentiates their mean loss."""
    expected = whole()
    for number, rank in enumerate(ranks):
        report = rank["seen"][kind]
        for name in ("", "a", "b", "norm"):
            calls, mean, gradient, own = report["layers"][name]
            assert calls == MICROBATCHES
            assert mean == pytest.approx(expected["mean"][str(number), name], rel=1e-5, abs=1e-7)
            assert gradient == pytest.approx(expected["gradient"][str(number), name], rel=1e-5)
            for parameter, norm in own.items():
                whole_name = f"{name}.{parameter}" if name else parameter
                assert norm == pytest.approx(expected["parameters"][number][whole_name], abs=1e-6)
    assert ranks[0]["seen"][kind]["loss"] is None
    assert ranks[1]["seen"][kind]["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_layers_of_several_stages_have_the_stage_in_their_name(
    ranks: list[dict[str, Any]],
) -> None:
    """So that none has the name of another."""
    for number, rank in enumerate(ranks):
        calls, is_untouched = rank["several stages"]
        names = [f"stage{stage}.{inner}" for stage in (number, number + 2) for inner in (0, 1)]
        assert calls == [f"{name} {MICROBATCHES}" for name in names]
        assert is_untouched


def test_what_the_schedule_decides_is_refused(ranks: list[dict[str, Any]]) -> None:
    """Before anything is run, with what to do instead."""
    said = ranks[0]["refusals"]
    assert "ScheduleGPipe has a loss of its own" in said[0]
    assert "runs the backward pass itself" in said[1]
    assert "inspect the schedule that runs it" in said[2]
    assert "was made without loss_fn" in said[3]
