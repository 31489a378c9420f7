"""A model in one piece and as the stages of a pipeline, with faults and what looks like them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from pytest_modelhealth import Inspector
from pytest_modelhealth.report import HealthReport

SAMPLES, MICROBATCHES = 16, 4


class Front(nn.Module):
    """The first half."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.act, self.norm = nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16)
        self.between = nn.Identity()
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.embed(x))
        if self.way == "log":
            x = torch.log(x - 1)
        if self.way == "detach":
            x = x.detach()
        return self.norm(self.between(x))


class Back(nn.Module):
    """The second half."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.drop, self.head = nn.Linear(16, 16), nn.Dropout(0.0), nn.Linear(16, 3)
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.hidden(x)))
        if self.way == "mask":  # a softmax over what a mask leaves
            scores = x.masked_fill(torch.arange(16) > 12, -math.inf)
            x = torch.softmax(scores, -1) * 16
        return self.head(x)


class Whole(nn.Module):
    """Both, as one model."""

    def __init__(self, front: Front, back: Back) -> None:
        super().__init__()
        for half in (front, back):
            for name, layer in half.named_children():
                setattr(self, name, layer)
        self._halves = [lambda x: Front.forward(self, x), lambda x: Back.forward(self, x)]  # type: ignore[arg-type]
        self._ways = [front.way, back.way]
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        for half, way in zip(self._halves, self._ways, strict=True):
            self.way = way
            x = half(x)
        return x


def _set(layer: str, change: Callable[[Any], Any]) -> Callable[[Front, Back], None]:
    def apply(front: Front, back: Back) -> None:
        with torch.no_grad():
            change(getattr(front, layer, None) or getattr(back, layer))

    return apply


def _go(half: int, way: str) -> Callable[[Front, Back], None]:
    return lambda *halves: setattr(halves[half], "way", way)


def _drop(front: Front, back: Back) -> None:
    back.drop.p = 0.3


FAULTS: dict[str, Callable[[Front, Back], None]] = {
    "a NaN in a weight of the first stage": _set("embed", lambda m: m.weight[0, 0].fill_(math.nan)),
    "a NaN made between the layers of the first stage": _go(0, "log"),
    "dead units in the first stage": _set("embed", lambda m: m.bias.fill_(-100)),
    "dead units in the last stage": _set("hidden", lambda m: m.bias.fill_(-100)),
    "a detach in the first stage": _go(0, "detach"),
    "logits that explode": _set("head", lambda m: m.weight.mul_(1e5)),
    "a layer of the last stage that passes no gradient": _set(
        "hidden", lambda m: m.weight.fill_(0)
    ),
}
"""Each is to be told as of the model in one piece."""

HEALTHY: dict[str, Callable[[Front, Back], None]] = {
    "as it is": lambda front, back: None,
    "a mask of -inf": _go(1, "mask"),
    "half of the units are off": _set("embed", lambda m: m.bias[::2].sub_(0.5)),
    "dropout": _drop,
    "a frozen first layer": _set("embed", lambda m: m.requires_grad_(False)),
}
"""Nothing is wrong."""


def halves(case: str) -> tuple[Front, Back]:
    """Return the stages of a case, the same on every rank."""
    torch.manual_seed(0)
    front, back = Front(), Back()
    {**FAULTS, **HEALTHY}[case](front, back)
    return front, back


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs and classes."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(SAMPLES, 6, generator=generator),
        torch.randint(3, (SAMPLES,), generator=generator),
    )


def in_one_piece(case: str) -> HealthReport:
    """Return what one process says of the model."""
    x, y = batch()
    return Inspector(Whole(*halves(case))).run_inspection(x, y, loss=F.cross_entropy)


def schedule_of(
    module: nn.Module, kind: str = "GPipe", group: Any = None, shapes: Any = None, **options: Any
) -> Any:
    """Return the schedule of this rank, whose stage is `module`.

    Args:
        module: the stage.
        kind: class of the schedule.
        group: the ranks of the pipeline; ``None`` is all.
        shapes: what the stage is given and returns; ``None`` leaves it to the first step.
        options: further arguments of the schedule.
    """
    place = dist.get_rank(group)
    given = {} if shapes is None else dict(zip(("input_args", "output_args"), shapes, strict=True))
    stage = PipelineStage(
        module, place, dist.get_world_size(group), torch.device("cpu"), group=group, **given
    )
    made = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[kind]
    return made(stage, MICROBATCHES, **{"loss_fn": F.cross_entropy, **options})


def in_stages(case: str, kind: str = "GPipe", **options: Any) -> HealthReport:
    """Return what the two ranks of a pipeline say of it."""
    rank = dist.get_rank()
    x, y = batch()
    inspector = Inspector(schedule_of(halves(case)[rank], kind))
    return inspector.run_inspection(None if rank else x, y if rank else None, **options)


def findings(report: HealthReport) -> list[tuple[str, str, tuple[tuple[str, str], ...]]]:
    """Return check and layer of each violation, with those of what follows from it."""
    return [
        (one.check, one.layer, tuple((v.check, v.layer) for v in one.folded))
        for one in report.violations
    ]


SEVERAL_STAGES: dict[str, Any] = {
    "looped": ScheduleLoopedBFS,
    "1F1B": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,  # it splits the backward pass
    "zero bubble, V": ScheduleZBVZeroBubble,
    "dual pipe": ScheduleDualPipeV,  # it splits that of some microbatches
}
"""Schedules by which two ranks have two of four stages each."""


class Quarter(nn.Module):
    """A stage of four, with a parameter that no gradient of its input passes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16 if number else 6, 3 if number == 3 else 16)
        if number < 2:
            self.place, self.scale = nn.Parameter(torch.ones(1, 16)), nn.Linear(16, 16)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.number < 2:
            x = x + self.scale(self.place)
        return x if self.number == 3 else F.relu(x)


def quarters(silent: int | None = None) -> nn.Sequential:
    """Return four stages, the same on every rank; the weights of one may all be zero."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Quarter(number) for number in range(4)))
    if silent is not None:
        model[silent].get_parameter("linear.weight").data.zero_()
    return model


def in_quarters(model: nn.Sequential, kind: str) -> tuple[Any, dict[str, Tensor | None]]:
    """Return the schedule of this rank, and what it is given."""
    rank, (x, y) = dist.get_rank(), batch()
    mine = (rank, 3 - rank if kind in ("zero bubble, V", "dual pipe") else rank + 2)
    stages = [
        PipelineStage(_within(model[n], n), n, 4, torch.device("cpu"))  # named as in one piece
        for n in mine
    ]
    schedule = SEVERAL_STAGES[kind](stages, MICROBATCHES, loss_fn=F.cross_entropy)
    return schedule, {"inputs": x if 0 in mine else None, "target": y if 3 in mine else None}


def _within(stage: nn.Module, number: int) -> nn.Sequential:
    held = nn.Sequential()
    held.add_module(str(number), stage)
    return held
