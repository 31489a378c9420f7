"""Whole trainings on scikit-learn's data, out of parts that a fault replaces.

A `Training` made here has a `Step`, whose attributes are what a practitioner writes into a loop: the
loss, the clipping, the schedule. What happens in the course of it is put in by `before`,
`from_step`, `each_step` and `spoil`.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from corpus.models.parts import follow, frozen
from corpus.models.small import (
    GRU,
    VAE,
    Autoencoder,
    MLP,
    cnn,
    flat,
    gpt,
    he,
    resnet,
    vit,
    images,
    itself,
    patients,
    plain,
    rows,
    views,
)
from corpus.subject import Draw, Subject, Training, loss_of, run, subject

Loss = Callable[[nn.Module, Any], Tensor]
Act = Callable[[nn.Module, Any], object]


@dataclass
class Step:
    """One usual step of a training.

    Args:
        loss: the loss of a model on a batch.
        clip: the largest norm of the gradient, or none.
        schedule: of the rate, told of each step.
        number: how many steps are done.
    """

    loss: Loss
    clip: float | None = None
    schedule: Any = None
    number: int = 0

    def clear(self, optimizer: Any) -> None:
        optimizer.zero_grad()

    def update(self, model: nn.Module, optimizer: Any) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        optimizer.step()

    def __call__(self, model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        self.clear(optimizer)
        loss = self.loss(model, batch)
        loss.backward()
        self.update(model, optimizer)
        if self.schedule is not None:
            self.schedule.step()
        self.number += 1
        return loss.detach()


def training(
    model: nn.Module,
    optimizer: Any,
    step: Any,
    draw: Callable[[int], Any],
    n: int = 64,
    steps: int = 120,
    restore: Iterable[Any] = (),
) -> Training:
    """Return a training on batches of `n` samples."""
    return Training(model, optimizer, step, draw(n), tuple(restore), lambda _: draw(n), steps)


def trains(
    healthy: Subject,
    optimizer: Callable[[Any], Any],
    n: int = 64,
    steps: int = 120,
    clip: float | None = None,
    schedule: Callable[[Any], Any] | None = None,
) -> Training:
    """Return the training of a subject with a usual step."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, target = batch
        return loss_of(healthy, run(model, inputs), target)

    used = optimizer([p for p in healthy.model.parameters() if p.requires_grad])
    plan = schedule(used) if schedule else None
    kept = () if plan is None else (plan,)
    return training(
        healthy.model, used, Step(loss, clip, plan), healthy.draw, n, steps, kept
    )


def sgd(rate: float, momentum: float = 0.9, **options: Any) -> Callable[[Any], Any]:
    return lambda parameters: torch.optim.SGD(parameters, rate, momentum, **options)


def adam(rate: float = 3e-3, **options: Any) -> Callable[[Any], Any]:
    return lambda parameters: torch.optim.Adam(parameters, rate, **options)


def adamw(rate: float = 3e-3, **options: Any) -> Callable[[Any], Any]:
    return lambda parameters: torch.optim.AdamW(parameters, rate, **options)


def warmed_cosine(warm: int, steps: int) -> Callable[[Any], LambdaLR]:
    """Rise linearly from 0, then fall to 0 by half a cosine."""

    def factor(number: int) -> float:
        if number < warm:
            return number / warm
        return 0.5 * (1 + math.cos(math.pi * (number - warm) / (steps - warm)))

    return lambda optimizer: LambdaLR(optimizer, factor)


# ---- what happens in the course of a training ----------------------------------------------------


def before(t: Training, number: int, act: Act) -> None:
    """Call `act` with model and optimizer once, before the step of this number."""
    each_step(t, lambda done, model, optimizer: act(model, optimizer) if done == number else None)


def each_step(t: Training, act: Callable[[int, nn.Module, Any], object]) -> None:
    """Call `act` with number, model and optimizer before each step."""
    inner, numbers = t.step, itertools.count()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Any:
        act(next(numbers), model, optimizer)
        return inner(model, optimizer, batch)

    t.step = step


def from_step(t: Training, number: int, other: Any) -> None:
    """Take another step from this number on."""
    inner, numbers = t.step, itertools.count()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Any:
        chosen = inner if next(numbers) < number else other
        return chosen(model, optimizer, batch)

    t.step = step


def loss_from(t: Training, number: int, other: Callable[[Loss, nn.Module, Any], Tensor]) -> None:
    """Take another loss from this step on; it is called with the one before, model and batch."""
    usual: Step = t.step
    inner = usual.loss

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return inner(model, batch) if usual.number < number else other(inner, model, batch)

    usual.loss = loss


def spoil(t: Training, numbers: Callable[[int], bool], change: Callable[[Any], Any]) -> None:
    """Change the batches of these numbers."""
    draw = t.batches
    t.batches = lambda number: change(draw(number)) if numbers(number) else draw(number)


def rate_of(t: Training, layer: str, rate: float) -> None:
    """Give a layer a group of its own, with this rate."""
    chosen = list(t.model.get_submodule(layer).parameters())
    group, ids = t.optimizer.param_groups[0], set(map(id, chosen))
    group["params"] = [p for p in group["params"] if id(p) not in ids]
    t.optimizer.add_param_group({"params": chosen, "lr": rate})


# ---- healthy trainings that faults are put into --------------------------------------------------


def by_sgd() -> Training:
    """An MLP on digits by SGD with momentum."""
    return trains(subject(MLP(), flat, F.cross_entropy), sgd(0.05))


def by_adam() -> Training:
    """Convolutions, batch norm and dropout by Adam."""
    return trains(cnn(), adam(1e-2), steps=120)


def language() -> Training:
    """A small GPT with warm-up, cosine and clipping."""
    return trains(gpt(), adamw(5e-3), 8, 100, clip=1.0, schedule=warmed_cosine(10, 100))


def recurrent() -> Training:
    """A tanh net over the rows of digits, clipped."""
    model = GRU(nn.RNN(8, 32, batch_first=True))
    return trains(subject(model, rows, F.cross_entropy), adam(5e-3), 64, 120, clip=1.0)


def compressed() -> Training:
    return trains(subject(Autoencoder(), itself, F.mse_loss), adam(3e-3), 64, 150)


def progression() -> Training:
    """A regression on 10 features."""
    return trains(subject(MLP(10, 32, 1), patients, F.mse_loss), adam(3e-3), 64, 150)


def pictures() -> Training:
    """A residual net with a cosine over the whole training."""
    return trains(resnet(), adamw(5e-3), 16, 80, schedule=warmed_cosine(5, 80))


def seen() -> Training:
    """A vision transformer."""
    return trains(vit(), adamw(3e-3), 16, 120, clip=1.0, schedule=warmed_cosine(10, 120))


def deep_relu() -> Training:
    """Eight layers of ReLU by SGD."""
    return trains(subject(he(plain(64, *[64] * 8, 10)), flat, F.cross_entropy), sgd(0.02))


class Byol(nn.Module):
    """An encoder that predicts what a slow copy makes of another view (Grill et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = self._encoder(), self._head(16, 32, 16)
        self.teacher = frozen(copy.deepcopy(self.online))

    @staticmethod
    def _head(*sizes: int) -> nn.Sequential:
        a, b, c = sizes
        return nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, c))

    @classmethod
    def _encoder(cls) -> nn.Sequential:
        return cls._head(64, 64, 16)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.teacher(b)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(a)), goal, dim=-1).mean()


def byol() -> Training:
    model = Byol()

    def step(model: Byol, optimizer: Any, batch: Any) -> float:
        a, b = batch[0]
        optimizer.zero_grad()
        loss = (model(a, b) + model(b, a)) / 2
        loss.backward()
        optimizer.step()
        follow(model.teacher, model.online, 0.97)
        return loss.item()

    trained = [*model.online.parameters(), *model.predictor.parameters()]
    return training(model, adam(3e-3)(trained), step, views, 64, 150)


def annealed() -> Training:
    """A VAE whose divergence counts for more from step to step, up to its weight."""
    model = VAE()

    def loss(model: VAE, batch: Any) -> Tensor:
        pixels, _ = batch
        made, mean, log_variance = model(pixels)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        return F.mse_loss(made, pixels) + step.weight() * divergence

    step = Step(loss)
    step.weight = lambda: 0.1 * min(1.0, step.number / 80)
    return training(model, adam(3e-3)(model.parameters()), step, itself, 64, 200)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = plain(8, 64, 64)
        self.critic = plain(64, 64, 1, activation=nn.LeakyReLU)

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)


def train_critic(model: Gan, optimizer: Any, real: Tensor) -> Tensor:
    made = model(torch.randn(len(real), 8)).detach()
    loss = F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(made)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train_generator(model: Gan, optimizer: Any, n: int) -> Tensor:
    loss = F.softplus(-model.critic(model(torch.randn(n, 8)))).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def gan() -> Training:
    """The two losses of a GAN swing against each other."""
    model = Gan()

    def step(model: Gan, optimizers: Any, batch: Any) -> float:
        critic = train_critic(model, optimizers[1], batch[0])
        return float(critic + train_generator(model, optimizers[0], len(batch[0])))

    optimizers = tuple(
        torch.optim.Adam(part.parameters(), 2e-3, betas=(0.5, 0.999))
        for part in (model.generator, model.critic)
    )
    return training(model, optimizers, step, itself, 64, 250)
