"""Healthy training steps by what stands around forward and backward.

Clearing, accumulating, clipping, scaling and scheduling, what is frozen, what is returned, and what
is done to batch and gradient in between.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from corpus.cards import Shelf
from corpus.models.healthy_steps import (
    Count,
    controls_of,
    descend,
    entropy,
    trained,
    usual,
)
from corpus.models.parts import SmallLM, conv_net, perceptron
from corpus.models.small import (
    CNN,
    GPT,
    LSTM,
    MLP,
    ResNet,
    UNet,
    ViT,
    flat,
    images,
    language_loss,
    next_words,
    noisy,
    patients,
    words,
)
from corpus.subject import Training

SHELF = Shelf("training", "blind")
control = controls_of(SHELF)

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def momentum(model: nn.Module, rate: float = 0.05) -> SGD:
    return SGD(model.parameters(), lr=rate, momentum=0.9)


# ---- when gradients are cleared ------------------------------------------------------------------


@control("gradients cleared after the step")
def cleared_after() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = perceptron(64, 32, 10)
    return Training(model, momentum(model), step, flat(32))


@control("gradients cleared between loss and backward")
def cleared_between() -> Training:
    model = CNN()
    return Training(model, Adam(model.parameters()), usual, images(32))


@control("gradients set to zero rather than to none")
def cleared_to_zero() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = entropy(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    model = ResNet(8, 2)
    return Training(model, momentum(model), step, images(32))


@control("gradients cleared by the model")
def cleared_by_model() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        model.train()
        model.zero_grad()
        loss = entropy(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    model = LSTM()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, words(32))


@control("gradients cleared one parameter at a time")
def cleared_by_hand() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = entropy(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = ViT()
    return Training(model, AdamW(model.parameters(), lr=1e-3), step, images(16))


@control("gradients zeroed in place where there are any")
def zeroed_in_place() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()
        loss.backward()
        optimizer.step()
        return loss

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.1), step, flat(32))


@control("gradients handed to the optimizer, never kept by backward")
def taken_by_autograd() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        parameters = list(model.parameters())
        loss = entropy(model, batch)
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()
        return loss

    model = perceptron(64, 48, 10, act=nn.Tanh)
    return Training(model, Adam(model.parameters(), lr=2e-3), step, flat(24))


# ---- accumulation --------------------------------------------------------------------------------


@control("four micro-batches, each loss divided by four")
def accumulated() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> float:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(*(part.chunk(4) for part in batch), strict=True):
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    model = MLP()
    return Training(model, AdamW(model.parameters(), lr=2e-3), step, flat(64))


def accumulated_over(calls: int, begin: int = 0, keep: bool = True) -> Training:
    count = Count(begin)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        (loss / calls).backward()
        if (count.up() + 1) % calls == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    model = perceptron(64, 32, 32, 10)
    return Training(model, momentum(model), step, flat(16), (count,) if keep else ())


@control("a step of the optimizer in every fourth call")
def accumulated_over_calls() -> Training:
    return accumulated_over(4)


@control("a step of the optimizer in every second call, counted in the closure")
def accumulated_over_two_calls() -> Training:
    return accumulated_over(2, keep=False)


@control("micro-batches of uneven size, weighted by their samples")
def accumulated_unevenly() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> float:
        optimizer.zero_grad()
        x, y = batch
        total = 0.0
        for part, labels in zip(x.split(12), y.split(12), strict=True):
            loss = F.cross_entropy(model(part), labels, reduction="sum") / len(x)
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    model = perceptron(64, 32, 10)
    return Training(model, SGD(model.parameters(), lr=0.2), step, flat(40))


@control("tokens of all micro-batches counted before the first backward")
def accumulated_by_tokens() -> Training:
    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        ids, labels = batch["input_ids"], batch["labels"]
        tokens = (labels != -100).sum()
        losses = []
        for part, after in zip(ids.split(4), labels.split(4), strict=True):
            logits = model(part)
            losses.append(
                F.cross_entropy(logits.flatten(0, 1), after.flatten(), reduction="sum") / tokens
            )
            losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum().detach()

    ids, labels = next_words(16)
    labels = labels.masked_fill(torch.arange(31) < torch.randint(4, 24, (16, 1)), -100)
    model = SmallLM()
    batch = {"input_ids": ids, "labels": labels}
    return Training(model, AdamW(model.parameters(), lr=2e-3), step, batch)


# ---- clipping and other changes of gradients -----------------------------------------------------


def between(change: Any, model: nn.Module, optimizer: Any, batch: Any) -> Training:
    """Return a training that changes the gradients of all parameters before the step."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = entropy(model, batch)
        loss.backward()
        change([p for p in model.parameters() if p.grad is not None])
        optimizer.step()
        return loss

    return Training(model, optimizer, step, batch)


@control("gradients clipped to a norm of one")
def clipped_to_norm() -> Training:
    model = ResNet(8, 2)
    return between(
        lambda given: nn.utils.clip_grad_norm_(given, 1.0), model, momentum(model), images(32)
    )


@control("gradients clipped to a tenth, as for DETR")
def clipped_hard() -> Training:
    model = ViT()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    return between(
        lambda given: nn.utils.clip_grad_norm_(given, 0.1, error_if_nonfinite=True),
        model,
        optimizer,
        images(16),
    )


@control("gradients clipped by value")
def clipped_by_value() -> Training:
    model = LSTM()
    return between(
        lambda given: nn.utils.clip_grad_value_(given, 0.01),
        model,
        torch.optim.RMSprop(model.parameters(), lr=2e-3),
        words(32),
    )


@control("gradients clipped relative to the weights of each unit")
def clipped_adaptively() -> Training:
    """Adaptive gradient clipping (Brock et al. 2021)."""

    def norms(t: Tensor) -> Tensor:
        return t.flatten(1).norm(dim=1).view(-1, *[1] * (t.ndim - 1)) if t.ndim > 1 else t.abs()

    @torch.no_grad()
    def clip(given: list[nn.Parameter]) -> None:
        for parameter in given:
            limit = 0.05 * norms(parameter).clamp(min=1e-3)
            parameter.grad.mul_((limit / norms(parameter.grad).clamp(min=1e-6)).clamp(max=1))

    model = conv_net(10)
    return between(clip, model, momentum(model), images(32))


@control("noise added to gradients")
def noise_on_gradients() -> Training:
    """Annealed gradient noise (Neelakantan et al. 2015), at its start."""

    def shake(given: list[nn.Parameter]) -> None:
        for parameter in given:
            parameter.grad.add_(0.01 * torch.randn_like(parameter))

    model = perceptron(64, 32, 32, 10)
    return between(shake, model, SGD(model.parameters(), lr=0.1), flat(32))


@control("gradients of each unit centred")
def centred_gradients() -> Training:
    """Gradient centralisation (Yong et al. 2020)."""

    def centre(given: list[nn.Parameter]) -> None:
        for parameter in given:
            if parameter.ndim > 1:
                axes = tuple(range(1, parameter.ndim))
                parameter.grad.sub_(parameter.grad.mean(axes, keepdim=True))

    model = CNN()
    return between(centre, model, momentum(model), images(32))


@control("signs of gradients")
def signs_of_gradients() -> Training:
    def signs(given: list[nn.Parameter]) -> None:
        for parameter in given:
            parameter.grad.sign_()

    model = perceptron(64, 32, 10)
    return between(signs, model, SGD(model.parameters(), lr=1e-3), flat(32))


@control("largest tenth of each gradient, the rest kept for later steps")
def compressed_gradients() -> Training:
    """Sparsified gradients with a memory of what was left out (Stich et al. 2018)."""
    model = perceptron(64, 32, 10)
    rest = [torch.zeros_like(p) for p in model.parameters()]

    def compress(given: list[nn.Parameter]) -> None:
        for parameter, left in zip(given, rest, strict=True):
            left += parameter.grad
            limit = left.abs().flatten().quantile(0.9)
            parameter.grad.copy_(left * (left.abs() >= limit))
            left -= parameter.grad

    return between(compress, model, SGD(model.parameters(), lr=0.1), flat(32))


@control("gradients of each sample clipped, and noise added")
def private() -> Training:
    """Differentially private SGD (Abadi et al. 2016)."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

        gradients, losses = vmap(grad_and_value(of_one), (None, 0, 0))(weights, x, y)
        norms = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
        for name, parameter in model.named_parameters():
            kept = torch.einsum("n,n...->...", (1 / norms).clamp(max=1), gradients[name])
            parameter.grad = (kept + 0.3 * torch.randn_like(kept)) / len(x)
        optimizer.step()
        optimizer.zero_grad()
        return losses.mean()

    model = perceptron(64, 32, 10, act=nn.Tanh)
    return Training(model, SGD(model.parameters(), lr=0.5), step, flat(32))


# ---- half precision ------------------------------------------------------------------------------


def mixed(
    model: nn.Module,
    optimizer: Any,
    batch: Any,
    scaler: torch.amp.GradScaler,
    dtype: torch.dtype = torch.float16,
    clip: float = 1.0,
) -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype):
            loss = entropy(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Training(model, optimizer, step, batch, (scaler,))


@control("float16 with a scaler, unscaled before clipping")
def scaled() -> Training:
    model = MLP()
    return mixed(
        model, Adam(model.parameters(), lr=2e-3), flat(32), torch.amp.GradScaler("cpu", 2.0**10)
    )


@control("float16 with a scale that overflows at first, so steps are skipped")
def scaled_too_high() -> Training:
    model = perceptron(64, 64, 10)
    return mixed(model, momentum(model), flat(32), torch.amp.GradScaler("cpu", 2.0**24))


@control("bfloat16 with a scaler that is switched off")
def scaler_off() -> Training:
    model, scaler = CNN(), torch.amp.GradScaler("cpu", enabled=False)
    return mixed(model, momentum(model), images(32), scaler, torch.bfloat16)


@control("bfloat16 without a scaler")
def brain_floats() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        ids, after = batch
        with torch.autocast("cpu", torch.bfloat16):
            loss = language_loss(model(ids), after)
        return descend(optimizer, loss).detach()

    model = GPT()
    return Training(model, AdamW(model.parameters(), lr=2e-3), step, next_words(16))


@control("scaled steps without clipping, the loss in full precision")
def scaled_without_clipping() -> Training:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        x, y = batch
        with torch.autocast("cpu", torch.float16):
            output = model(x)
        loss = F.cross_entropy(output.float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    model = perceptron(64, 32, 10)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(32), (scaler,))


@control("scaled micro-batches, unscaled once")
def scaled_and_accumulated() -> Training:
    scaler = torch.amp.GradScaler("cpu", 2.0**9)

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        total = 0.0
        for x, y in zip(*(part.chunk(2) for part in batch), strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x), y) / 2
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return total

    model = perceptron(64, 32, 32, 10, act=nn.GELU)
    return Training(model, AdamW(model.parameters(), lr=2e-3), step, flat(64), (scaler,))


@control("schedule held back where the scaler skips a step")
def scheduled_with_scaler() -> Training:
    model, scaler = perceptron(64, 32, 10), torch.amp.GradScaler("cpu", 2.0**22)
    optimizer = Adam(model.parameters(), lr=3e-3)
    schedule = CosineAnnealingLR(optimizer, 100)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = entropy(model, batch)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        return loss.detach()

    return Training(model, optimizer, step, flat(32), (scaler, schedule))


# ---- schedules -----------------------------------------------------------------------------------


def scheduled(model: nn.Module, optimizer: Any, batch: Any, schedule: Any) -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = entropy(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    return Training(model, optimizer, step, batch, (schedule,))


@control("warm-up from a rate of zero")
def warmed_up() -> Training:
    model = ViT()
    optimizer = AdamW(model.parameters(), lr=3e-3)
    return scheduled(
        model, optimizer, images(16), LambdaLR(optimizer, lambda done: min(1.0, done / 10))
    )


@control("long warm-up that has just begun")
def long_warm_up() -> Training:
    """4000 steps of warm-up: the first rates are a millionth (Vaswani et al. 2017)."""
    count = Count()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        done = count.up() + 1
        for group in optimizer.param_groups:
            group["lr"] = 32**-0.5 * min(done**-0.5, done * 4000**-1.5)
        ids, after = batch
        return descend(optimizer, language_loss(model(ids), after))

    model = GPT(depth=2)
    optimizer = Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9)
    return Training(model, optimizer, step, next_words(16), (count,))


@control("one cycle")
def one_cycle() -> Training:
    model = CNN()
    optimizer = momentum(model)
    return scheduled(model, optimizer, images(32), OneCycleLR(optimizer, 0.2, total_steps=200))


@control("cosine that is stepped in each step")
def cosine() -> Training:
    model = MLP()
    optimizer = momentum(model)
    return scheduled(model, optimizer, flat(32), CosineAnnealingLR(optimizer, 60))


@control("cosine with a restart in every third step")
def warm_restarts() -> Training:
    model = MLP()
    optimizer = momentum(model)
    return scheduled(model, optimizer, flat(32), CosineAnnealingWarmRestarts(optimizer, 3))


@control("rate and momentum that cycle")
def cyclic() -> Training:
    model = perceptron(64, 32, 10)
    optimizer = momentum(model)
    schedule = CyclicLR(optimizer, 1e-3, 0.1, step_size_up=20)
    return scheduled(model, optimizer, flat(32), schedule)


@control("linear warm-up, then a cosine")
def two_schedules() -> Training:
    model = ResNet(8, 2)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    parts = [LinearLR(optimizer, 1e-3, total_iters=5), CosineAnnealingLR(optimizer, 100)]
    return scheduled(model, optimizer, images(32), SequentialLR(optimizer, parts, [5]))


@control("rate that waits for the loss to stand still")
def plateau() -> Training:
    model = MLP(10, 32, 1)
    optimizer = Adam(model.parameters(), lr=3e-3)
    schedule = ReduceLROnPlateau(optimizer, patience=2)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        loss = descend(optimizer, F.mse_loss(model(x), y))
        schedule.step(loss.item())
        return loss

    return Training(model, optimizer, step, patients(32), (schedule,))


@control("learning rate finder at its start")
def rate_finder() -> Training:
    """From 1e-7, by a factor in each step (Smith 2017)."""
    model = MLP()
    optimizer = SGD(model.parameters(), lr=1e-7)
    return scheduled(model, optimizer, flat(32), ExponentialLR(optimizer, 10 ** (7 / 100)))


@control("polynomial rate set by hand in every group")
def polynomial() -> Training:
    count = itertools.count()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 - min(next(count), 199) / 200) ** 0.9
        x, mask = batch
        return descend(optimizer, F.binary_cross_entropy_with_logits(model(x), mask))

    model = UNet()
    return Training(model, momentum(model), step, noisy(16))


@control("last steps of a schedule, at a rate of next to nothing")
def end_of_schedule() -> Training:
    model = trained(perceptron(64, 32, 10), flat)
    optimizer = momentum(model)
    schedule = CosineAnnealingLR(optimizer, 20)
    made = scheduled(model, optimizer, flat(32), schedule)
    for _ in range(17):
        made.step(model, optimizer, made.batch)
    return made
