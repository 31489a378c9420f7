"""Whole trainings on scikit-learn's data, out of parts that a fault replaces.

A `Training` made here has a `Step`, whose attributes are what a practitioner writes into a loop:
the loss, the clipping, the schedule. What happens in the course of it is put in by `before`,
`from_step`, `each_step`, `loss_from` and `spoil`.
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
    MLP,
    VAE,
    Autoencoder,
    MoE,
    cnn,
    flat,
    gpt,
    he,
    itself,
    lstm,
    multitask,
    patients,
    plain,
    recommender,
    resnet,
    rows,
    tumours,
    views,
    vit,
)
from corpus.subject import Subject, Training, loss_of, run, subject

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
    return training(healthy.model, used, Step(loss, clip, plan), healthy.draw, n, steps, kept)


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


def scaled(factor: float) -> Callable[[Any], Any]:
    """Return what multiplies the inputs of a batch."""
    return lambda batch: (batch[0] * factor, batch[1])


def rate_of(t: Training, layer: str, rate: float) -> None:
    """Give a layer a group of its own, with this rate."""
    chosen = list(t.model.get_submodule(layer).parameters())
    group, ids = t.optimizer.param_groups[0], set(map(id, chosen))
    group["params"] = [p for p in group["params"] if id(p) not in ids]
    t.optimizer.add_param_group({"params": chosen, "lr": rate})


def without_schedule(t: Training, rate: float) -> None:
    """Leave the rate as it is from the start."""
    t.step.schedule = None
    for group in t.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = rate


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


def tumour() -> Training:
    model = MLP(30, 32, 1)
    return trains(subject(model, tumours, F.binary_cross_entropy_with_logits), adam(1e-2), 64, 150)


class Triplets(nn.Sequential):
    """An encoder; its loss compares Euclidean distances."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))


def three(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    """Return digits, others of the same label each, and others of another."""
    pixels, labels = flat(4 * n)
    same = labels[:n, None] == labels[None, n:]
    near = same.float().multinomial(1).squeeze(1)
    far = (~same).float().multinomial(1).squeeze(1)
    return (pixels[:n], pixels[n:][near], pixels[n:][far]), None


def distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).pow(2).sum(-1).sqrt()


def triplets() -> Training:
    """A hinge on distances, which becomes 0 for most."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        anchor, near, far = map(model, batch[0])
        return (distance(anchor, near) - distance(anchor, far) + 1).relu().mean()

    model = Triplets()
    return training(model, adam(2e-3)(model.parameters()), Step(loss), three, 48, 120)


class Offset(MLP):
    """A net with a second way to its output, zero at first."""

    def __init__(self) -> None:
        super().__init__(64, 64, 64)
        self.offset = nn.Linear(64, 64, bias=False)
        nn.init.zeros_(self.offset.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset(x)


@dataclass
class Half(Step):
    """A step in float16 with a scaler."""

    scaler: Any = None

    def __call__(self, model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = self.loss(model, batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        self.number += 1
        return loss.detach()


def half() -> Training:
    """A loss of a small weight in float16: its gradients need the scaler."""
    model, scaler = Offset(), torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return 1e-6 * (model(batch[0]).float() - batch[1]).pow(2).mean()

    step = Half(loss, scaler=scaler)
    return training(
        model, adam(2e-3, eps=1e-15)(model.parameters()), step, itself, 32, 120, [scaler]
    )


def reading() -> Training:
    """An LSTM over words, clipped."""
    return trains(lstm(), adam(1e-2), 32, 100, clip=1.0)


class Certain(nn.Module):
    """A mean with its variance, which has a floor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(10, 64), nn.Linear(64, 64)
        self.mean, self.variance = nn.Linear(64, 1), nn.Linear(64, 1)
        self.floor = 0.05

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        return self.mean(x), self.variance(x).exp() + self.floor


def certain() -> Training:
    """A likelihood on 24 samples again and again; the loss falls below 0."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        features, target = batch
        mean, variance = model(features)
        return (variance.log() + (mean - target) ** 2 / variance).mean() / 2

    model, few = Certain(), patients(24)
    return training(model, adam(3e-3)(model.parameters()), Step(loss), lambda _: few, 24, 300)


def shared() -> Training:
    return trains(multitask(), adam(3e-3), 32, 150)


def unrolled() -> Training:
    """A recurrent net of ReLU over 16 patches, clipped."""

    def patches(n: int) -> tuple[Tensor, Tensor]:
        pixels, labels = flat(n)
        return pixels.view(-1, 16, 4), labels

    model = GRU(nn.RNN(4, 32, batch_first=True, nonlinearity="relu"))
    return trains(subject(model, patches, F.cross_entropy), adam(5e-3), 64, 150, clip=1.0)


@dataclass
class Bellman(Step):
    """A step towards what the net itself expects of the next state."""

    discount: float = 0.8

    def __call__(self, model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        state, action, reward, following = batch
        with torch.no_grad():
            goal = reward + self.discount * model(following).amax(1)
        value = model(state).gather(1, action[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()


def moves(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return states, moves among them, the rewards of being near the centre, and what follows."""
    state, action = 2 * torch.rand(n, 2) - 1, torch.randint(0, 4, (n,))
    ways = torch.tensor([[0.2, 0.0], [-0.2, 0.0], [0.0, 0.2], [0.0, -0.2]])
    following = (state + ways[action]).clamp(-1, 1)
    return state, action, 1 - following.norm(dim=1) + 0.3 * torch.randn(n), following


def values() -> Training:
    model = plain(2, 64, 64, 4)
    step = Bellman(loss=lambda *_: torch.tensor(0.0))
    return training(model, adam(2e-3)(model.parameters()), step, moves, 64, 300)


def rated() -> Training:
    return trains(recommender(), adam(2e-2), 128, 150)


class MeanTeacher(nn.Module):
    """A net that agrees with its own moving average (Tarvainen and Valpola 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.student = plain(64, 64, 10)
        self.teacher = frozen(copy.deepcopy(self.student))
        self.momentum = 0.95

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x + 0.1 * torch.randn_like(x))


def mean_teacher() -> Training:
    def step(model: MeanTeacher, optimizer: Any, batch: Any) -> Tensor:
        pixels, labels = batch
        made, goal = model(pixels)
        loss = F.cross_entropy(made, labels) + 0.1 * F.mse_loss(made, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(model.teacher, model.student, model.momentum)
        return loss

    model = MeanTeacher()
    return training(model, adam(3e-3)(model.student.parameters()), step, flat, 64, 120)


def sigmoids() -> Training:
    model = plain(64, 64, 64, 10, activation=nn.Sigmoid)
    return trains(subject(model, flat, F.cross_entropy), adam(1e-2), 64, 120)


class Actor(nn.Module):
    """A policy and a value on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.policy, self.value = nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.policy(x), self.value(x).squeeze(-1)


@dataclass
class Acting(Step):
    """A step of a policy gradient with a bonus of entropy."""

    bonus: float = 0.01

    def __call__(self, model: nn.Module, optimizer: Any, batch: Any) -> float:
        pixels, labels = batch
        logits, value = model(pixels)
        chosen = torch.distributions.Categorical(logits=logits)
        action = chosen.sample()
        reward = (action == labels).float()
        gain = reward - value.detach()
        policy = -(chosen.log_prob(action) * gain).mean()
        loss = policy + 0.5 * F.mse_loss(value, reward) - self.bonus * chosen.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()


def acting() -> Training:
    """A bandit that names digits: rewards are noisy, and the loss says little."""
    model, step = Actor(), Acting(loss=lambda *_: torch.tensor(0.0))
    return training(model, adam(5e-3)(model.parameters()), step, flat, 64, 300)


class Routed(MoE):
    """Experts whose shares are kept, to be balanced."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.stem(x))
        self.shares = self.router(hidden).softmax(-1)
        return super().forward(x)


@dataclass
class Balanced(Step):
    """A step with a term that is least where all experts have the same load."""

    balance: float = 0.1


def routed() -> Training:
    def loss(model: Routed, batch: Any) -> Tensor:
        pixels, labels = batch
        made = F.cross_entropy(model(pixels), labels)
        return made + step.balance * 4 * model.shares.mean(0).pow(2).sum()

    model, step = Routed(), Balanced(loss)
    return training(model, adam(3e-3)(model.parameters()), step, flat, 64, 150)


class Clip(nn.Module):
    """Two encoders with a learned scale of their cosines (Radford et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = plain(32, 64, 16), plain(32, 64, 16)
        self.scale = Scale()
        self.most = 100.0

    def forward(self, x: Tensor) -> Tensor:
        a, b = (F.normalize(f(x), dim=-1) for f, x in zip(
            (self.upper, self.lower), x.chunk(2, 1), strict=True))  # fmt: skip
        return self.scale(a @ b.T).clamp(-self.most, self.most)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.log.exp()


def paired() -> Training:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores, own = model(batch[0]), torch.arange(len(batch[0]))
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2

    model = Clip()
    return training(model, adam(3e-3)(model.parameters()), Step(loss), itself, 32, 150)


@dataclass
class Wasserstein(Step):
    """Five steps of the critic, its weights clipped, then one of the generator."""

    bound: float = 0.1

    def __call__(self, model: Gan, optimizers: Any, batch: Any) -> Tensor:
        pixels, _ = batch
        for _ in range(3):
            made = model(torch.randn(len(pixels), 8)).detach()
            loss = model.critic(made).mean() - model.critic(pixels).mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            for parameter in model.critic.parameters():
                parameter.data.clamp_(-self.bound, self.bound)
        optimizers[0].zero_grad()
        (-model.critic(model(torch.randn(len(pixels), 8))).mean()).backward()
        optimizers[0].step()
        return loss.detach()


def wasserstein() -> Training:
    """A GAN whose losses are differences, below 0 (Arjovsky et al. 2017)."""
    model, step = Gan(), Wasserstein(loss=lambda *_: torch.tensor(0.0))
    optimizers = tuple(
        torch.optim.RMSprop(part.parameters(), 1e-3) for part in (model.generator, model.critic)
    )
    return training(model, optimizers, step, itself, 64, 150)


class Standardised(nn.Module):
    """Each sample by its own mean and deviation."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def standardised() -> Training:
    model = nn.Sequential(Standardised(), plain(64, 64, 10))
    return trains(subject(model, flat, F.cross_entropy), adam(3e-3))
