"""Reported steps wrong in clipping, rates, micro-batches, recomputation or what is frozen."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.checkpoint import checkpoint

from corpus.cards import Shelf
from corpus.models.healthy_steps import Count
from corpus.models.reported_steps import (
    CLIPPED,
    EVERYWHERE,
    FROZEN,
    PILED,
    RAISES,
    RATE,
    SAMPLES,
    SCALED,
    SGD,
    STATISTICS,
    STILL,
    UNGIVEN,
    Adam,
    AdamW,
    Headed,
    classified,
    go_down,
    parts,
)
from corpus.models.small import MLP, flat, language_loss, next_words, patients
from corpus.models.usual import LoRA
from corpus.subject import Training

SHELF = Shelf("steps", "blind")
report = SHELF.report
GITHUB = "https://github.com/"


# ---- clipping ------------------------------------------------------------------------------------


@report(
    GITHUB + "pytorch/pytorch/issues/148259",
    "clipped by a generator of parameters that the log had used up",
    EVERYWHERE,
    (*CLIPPED, "generator", "empty", "exhaust", "used up"),
)
def logged_norm(fixed: bool) -> Training:
    """Nothing is clipped, as the loop for the log has gone through all parameters."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classified(model, batch)
        loss.backward()
        parameters = model.parameters()
        if fixed:
            parameters = list(parameters)
        largest = max(p.grad.abs().max() for p in parameters)
        nn.utils.clip_grad_norm_(parameters, 0.1)
        optimizer.step()
        return loss.detach() + 0 * largest

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.1, momentum=0.9), step, flat(32))


@report(
    GITHUB + "pytorch/pytorch/issues/31367",
    "clipped to the norm -1, which was to mean off",
    EVERYWHERE,
    (*CLIPPED, "negative", "sign", "ascen", "uphill", "rises", "increas"),
)
def clipped_to_less_than_nothing(fixed: bool) -> Training:
    """A negative norm turns all gradients around, and each step goes uphill."""
    max_norm = 1.0 if fixed else -1.0

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return loss.detach()

    model = MLP(10, 32, 1)
    return Training(model, SGD(model.parameters(), lr=0.02), step, patients(48))


@report(
    GITHUB + "simchowitzlabpublic/nano-world-model/pull/22",
    "clipped before backward",
    EVERYWHERE,
    (*CLIPPED, "before backward", "order", "no gradient"),
)
def clipped_in_the_loss(fixed: bool) -> Training:
    """There is no gradient yet when it is clipped, and that of the step stays as it is."""

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        loss = language_loss(model(batch[0]), batch[1])
        if not fixed:
            clip(model)
        return loss

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if fixed:
            clip(model)
        optimizer.step()
        return loss.detach()

    model = nn.Sequential(nn.Embedding(18, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 18))
    return Training(model, SGD(model.parameters(), lr=0.3), step, next_words(16))


@report(
    GITHUB + "tenstorrent/tt-metal/issues/17568",
    "clipped after each micro-batch",
    EVERYWHERE,
    (*CLIPPED, "micro", "accumul", "more than once", "times"),
)
def clipped_too_often(fixed: bool) -> Training:
    """What the first micro-batches gave is clipped again with each later one, and counts less."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in parts(batch, 8):
            loss = classified(model, part) / 4
            loss.backward()
            total += loss.detach()
            if not fixed:
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        return total

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.2), step, flat(32))


# ---- rates ---------------------------------------------------------------------------------------


@report(
    GITHUB + "pytorch/pytorch/issues/78917",
    "rate where a factor is asked for",
    EVERYWHERE,
    (*RATE, *STILL, "small", "tiny"),
)
def rate_squared(fixed: bool) -> Training:
    """LambdaLR multiplies by what the function returns, so that the rate is squared."""
    rate = 1e-3

    def decayed(number: int) -> float:
        return (1.0 if fixed else rate) * (1 + 0.001 * number) ** -0.75

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = go_down(optimizer, classified(model, batch))
        plan.step()
        return loss

    model = MLP()
    optimizer = SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-3, nesterov=True)
    plan = LambdaLR(optimizer, decayed)
    return Training(model, optimizer, step, flat(32), (plan,))


@report(
    GITHUB + "ClementPinard/SfmLearner-Pytorch/issues/5",
    "schedule stepped in the optimizer's place",
    EVERYWHERE,
    (*STILL, "optimizer.step"),
)
def schedule_or_step(fixed: bool) -> Training:
    """Where there is a schedule, nobody steps the optimizer."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classified(model, batch)
        loss.backward()
        if fixed:
            optimizer.step()
        plan.step()
        return loss.detach()

    model = MLP()
    optimizer = Adam(model.parameters(), lr=2e-3)
    plan = StepLR(optimizer, 50)
    return Training(model, optimizer, step, flat(32), (plan,))


@report(
    GITHUB + "deepspeedai/DeepSpeed/pull/7969",
    "first group alone warmed up",
    ("", "head", "*.bias", "body.*"),
    (*RATE, "group", "warm"),
)
def warmed_groups(fixed: bool) -> Training:
    """Groups are zipped with a list of one rate, and all but the first begin at the full one."""

    def warm(optimizer: Any) -> None:
        rate = 0.05 * min(1.0, number.up() / 20)
        rates = [rate] * (len(optimizer.param_groups) if fixed else 1)
        for group, value in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = value

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        warm(optimizer)
        return go_down(optimizer, classified(model, batch))

    model, number = Headed(), Count(1)
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters()}]
    return Training(model, SGD(groups, lr=0.05, momentum=0.9), step, flat(32), (number,))


@report(
    GITHUB + "tracel-ai/burn/issues/5695",
    "schedule stepped with each micro-batch",
    EVERYWHERE,
    (*RATE, "micro", "times"),
)
def hurried_schedule(fixed: bool) -> Training:
    """The rate falls four times as fast as the steps of the optimizer go."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in parts(batch, 8):
            loss = classified(model, part) / 4
            loss.backward()
            total += loss.detach()
            if not fixed:
                plan.step()
        optimizer.step()
        if fixed:
            plan.step()
        return total

    model = MLP()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    plan = LambdaLR(optimizer, lambda number: max(0.0, 1 - number / 24))
    return Training(model, optimizer, step, flat(32), (plan,))


# ---- what moves, and should not ------------------------------------------------------------------


class DecayingFirst(torch.optim.Optimizer):
    """Signs of a momentum, with decay; which parameters have a gradient is asked too late."""

    def __init__(self, parameters: Any, lr: float, decay: float, skips: bool) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})
        self.skips = skips

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None and self.skips:
                    continue
                parameter.mul_(1 - group["lr"] * group["decay"])
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                    momentum.lerp_(parameter.grad, 0.1)
                    parameter.sub_(momentum.sign(), alpha=group["lr"])


@report(
    GITHUB + "KellerJordan/Muon/issues/54",
    "optimizer decays what got no gradient",
    ("", "body", "body.*"),
    (*FROZEN, "decay", "shrink", "without a gradient", "no gradient"),
)
def decayed_though_frozen(fixed: bool) -> Training:
    """The frozen body shrinks step by step, as decay comes before the look for a gradient."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        return go_down(optimizer, classified(model, batch))

    model = Headed()
    model.body.requires_grad_(False)
    optimizer = DecayingFirst(model.parameters(), 2e-3, 1.0, fixed)
    return Training(model, optimizer, step, flat(32))


@report(
    "https://discuss.pytorch.org/t/why-there-is-still-a-small-change-in-frozen-layer-parameters/153740",
    "layer frozen while it had a gradient and a momentum",
    ("", "body", "body.*"),
    (*FROZEN, "momentum", "decay"),
)
def frozen_on_the_way(fixed: bool) -> Training:
    """Its gradient is kept at zero rather than none, so momentum and decay move it on."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = classified(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = Headed()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for _ in range(5):
        step(model, optimizer, flat(32))
    optimizer.zero_grad(set_to_none=False)
    model.body.requires_grad_(False)
    if fixed:
        for parameter in model.body.parameters():
            parameter.grad = None
    return Training(model, optimizer, step, flat(32))


@report(
    GITHUB + "ultralytics/yolov5/issues/1213",
    "frozen layers set to require gradients by the loop",
    ("", "body", "body.*"),
    FROZEN,
)
def thawed(fixed: bool) -> Training:
    """The loop sets requires_grad of every parameter, also of those frozen by an option."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = not (fixed and name.startswith("body"))
        return go_down(optimizer, classified(model, batch))

    model = Headed()
    model.body.requires_grad_(False)
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, flat(32))


# ---- micro-batches -------------------------------------------------------------------------------


@report(
    GITHUB + "NVIDIA-NeMo/Automodel/pull/2257",
    "micro-batches after the last full window dropped",
    EVERYWHERE,
    (*SAMPLES, *PILED, "last", "unused"),
)
def trailing(fixed: bool) -> Training:
    """The epoch has five micro-batches in windows of two, and the fifth is never stepped on."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        losses = []
        epoch = parts(batch, 8)
        for number, part in enumerate(epoch, 1):
            window = 2 if number <= 4 else 1
            loss = classified(model, part)
            (loss / window).backward()
            losses.append(loss.detach())
            if number % 2 == 0 or (fixed and number == len(epoch)):
                optimizer.step()
                optimizer.zero_grad()
        return torch.stack(losses).mean()

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.05), step, flat(40))


@report(
    GITHUB + "Lightning-AI/pytorch-lightning/issues/19987",
    "short window divided by the length of a full one",
    EVERYWHERE,
    (*SCALED, *SAMPLES),
)
def short_window(fixed: bool) -> Training:
    """The last window has one micro-batch and is divided by four, so it counts a quarter."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        losses = []
        for number, part in enumerate(parts(batch, 8), 1):
            window = 1 if fixed and number == 5 else 4
            loss = classified(model, part)
            (loss / window).backward()
            losses.append(loss.detach())
            if number in (4, 5):
                optimizer.step()
                optimizer.zero_grad()
        return torch.stack(losses).mean()

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.1), step, flat(40))


@report(
    GITHUB + "ml-explore/mlx-lm/pull/1413",
    "mean of the means of micro-batches with unlike numbers of tokens",
    EVERYWHERE,
    (*SCALED, *SAMPLES, "token", "mean"),
)
def unlike_tokens(fixed: bool) -> Training:
    """A token of a short answer counts many times as much as one of a long answer."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        ids, following = batch
        micro = parts((ids, following), 4)
        counts = [int((target != -100).sum()) for _, target in micro]
        total = torch.zeros(())
        for (x, target), count in zip(micro, counts, strict=True):
            share = count / sum(counts) if fixed else 1 / len(micro)
            loss = share * F.cross_entropy(model(x).transpose(1, 2), target, ignore_index=-100)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    ids, following = next_words(16)
    lengths = torch.tensor([2] * 4 + [4] * 4 + [30] * 8)
    target = following.masked_fill(torch.arange(31) >= lengths[:, None], -100)
    model = nn.Sequential(nn.Embedding(18, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 18))
    return Training(model, SGD(model.parameters(), lr=0.3), step, (ids, target))


@report(
    GITHUB + "huggingface/accelerate/issues/641",
    "gradients unscaled at each micro-batch",
    EVERYWHERE,
    (*RAISES, "unscale"),
)
def unscaled_too_often(fixed: bool) -> Training:
    """The scaler refuses to take its scale away twice between two steps."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        micro = parts(batch, 16)
        for number, part in enumerate(micro, 1):
            with torch.autocast("cpu", torch.bfloat16):
                loss = classified(model, part) / len(micro)
            scaler.scale(loss).backward()
            total += loss.detach().float()
            if not fixed or number == len(micro):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return total

    model, scaler = MLP(), torch.amp.GradScaler("cpu", init_scale=256.0)
    return Training(model, Adam(model.parameters(), lr=1e-3), step, flat(32), (scaler,))


# ---- recomputation -------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """Residual blocks whose activations are computed again in backward."""

    def __init__(self, block: Any, start: int = 0, **options: Any) -> None:
        super().__init__()
        self.start = start
        self.stem = nn.Linear(64, 32)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(32, 10)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block[self.start :], block[: self.start](x), **self.options)
        return self.head(x)


def step_down(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    return go_down(optimizer, classified(model, batch))


@report(
    GITHUB + "openai/guided-diffusion/issues/167",
    "recomputed under another mask of dropout",
    ("", "blocks", "blocks.*"),
    ("dropout", "mask", "random", "recomput", "seed", "checkpoint", "generator"),
)
def other_mask(fixed: bool) -> Training:
    """Backward draws a new mask, so the gradient is not that of the loss."""
    model = Recomputed(
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 32)),
        use_reentrant=True,
        preserve_rng_state=fixed,
    )
    return Training(model, SGD(model.parameters(), lr=0.1), step_down, flat(32))


@report(
    GITHUB + "pytorch/pytorch/issues/96136",
    "statistics of norms counted again by recomputation",
    ("", "blocks", "blocks.*"),
    STATISTICS,
)
def counted_twice(fixed: bool) -> Training:
    """Each batch enters the running statistics twice, once in forward and once in backward."""

    def block() -> nn.Module:
        layers = (nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        return nn.Sequential(nn.BatchNorm1d(32), *layers)

    model = Recomputed(block, start=int(fixed), use_reentrant=False)
    return Training(model, SGD(model.parameters(), lr=0.1), step_down, flat(32))


class Adapted(nn.Module):
    """A frozen net of tokens with adapters, each block recomputed in backward."""

    def __init__(self, needs: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, 32).requires_grad_(False)
        self.blocks = nn.ModuleList(
            nn.Sequential(LoRA(nn.Linear(32, 32)), nn.GELU(), LoRA(nn.Linear(32, 32)))
            for _ in range(2)
        )
        self.head = nn.Linear(32, 18)
        self.needs = needs

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.needs:
            x.requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return self.head(x)


@report(
    GITHUB + "locuslab/open-unlearning/issues/178",
    "adapters recomputed behind a frozen embedding",
    ("", "blocks", "blocks.*"),
    (*UNGIVEN, *STILL, "checkpoint", "require", "cut"),
)
def behind_a_checkpoint(fixed: bool) -> Training:
    """No input of the reentrant checkpoint needs a gradient, and none reaches the adapters."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        return go_down(optimizer, language_loss(model(batch[0]), batch[1]))

    model = Adapted(fixed)
    learnt = [p for p in model.parameters() if p.requires_grad]
    return Training(model, AdamW(learnt, lr=3e-3), step, next_words(16))
