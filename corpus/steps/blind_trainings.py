"""Reported trainings that go wrong on the way, each with its fix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau

from corpus.cards import Shelf
from corpus.models.parts import frozen
from corpus.models.reported_steps import (
    EVERYWHERE,
    FROZEN,
    GROWS,
    NONFINITE,
    RATE,
    SGD,
    STILL,
    Adam,
    classified,
    course,
    go_down,
    net,
)
from corpus.models.small import MLP, flat, next_words, patients, some_digits
from corpus.models.trainings import moves
from corpus.subject import Training

SHELF = Shelf("steps", "blind")
report = SHELF.report
GITHUB = "https://github.com/"

RISES = ("rises", "rose", "again", "increas", "swing", "oscillat", "restart", "jump", "returns")


def usual(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    return go_down(optimizer, classified(model, batch))


def in_turn(t: Training, change: Callable[[int, Any], Any]) -> Training:
    """Have `change` make each batch of it, from its number and the usual batch."""
    draw = t.batches
    t.batches = lambda number: change(number, draw(number))
    return t


# ---- numbers that are none -----------------------------------------------------------------------


@report(
    GITHUB + "pytorch/pytorch/issues/70348",
    "one batch in which every label is ignored",
    EVERYWHERE,
    (*NONFINITE, "ignore", "label"),
)
def all_ignored(fixed: bool) -> Training:
    """The mean over no label at all is not a number, and so is each weight from then on."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        said = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-100, reduction="sum")
        count = (y != -100).sum()
        return go_down(optimizer, said / (count.clamp(min=1) if fixed else count))

    def masked(number: int, batch: Any) -> Any:
        x, y = batch
        kept = torch.rand(y.shape) < (0.0 if number == 18 else 0.4)
        return x, y.masked_fill(~kept, -100)

    model = nn.Sequential(nn.Embedding(18, 24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 18))
    t = course(model, Adam(model.parameters(), lr=3e-3), step, next_words, 8)
    return in_turn(t, masked)


@report(
    GITHUB + "pytorch/pytorch/issues/8069",
    "angle to itself: the slope of acos at one",
    EVERYWHERE,
    (*NONFINITE, "acos", "slope", "gradient"),
)
def angles(fixed: bool) -> Training:
    """Two samples that are the same have the cosine 1, where the slope of acos is infinite."""
    edge = 1 - 1e-6 if fixed else 1.0

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        a, b = F.normalize(model(x), dim=-1).chunk(2)
        angle = (a * b).sum(-1).clamp(-edge, edge).acos()
        same = (y.chunk(2)[0] == y.chunk(2)[1]).float()
        loss = (same * angle + (1 - same) * (1.5 - angle).relu()).mean()
        return go_down(optimizer, loss)

    def repeated(number: int, batch: Any) -> Any:
        x, y = batch
        if number >= 15:
            x[16], y[16] = x[0], y[0]
        return x, y

    model = net(64, 48, 16)
    return in_turn(course(model, Adam(model.parameters(), lr=2e-3), step), repeated)


@report(
    GITHUB + "DLR-RM/stable-baselines3/issues/325",
    "gain of one sample divided by its deviation",
    EVERYWHERE,
    (*NONFINITE, "std", "deviation", "one sample", "batch of one"),
)
def single(fixed: bool) -> Training:
    """The last part of the rollout has one sample, whose deviation is not a number."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        state, action, gain, _ = batch
        if len(gain) > 1 or not fixed:
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        said = model(state).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        return go_down(optimizer, -(said * gain).mean())

    def cut(number: int, batch: Any) -> Any:
        return tuple(t[:1] for t in batch) if number == 24 else batch

    model = net(2, 32, 4)
    return in_turn(course(model, Adam(model.parameters(), lr=3e-3), step, moves), cut)


class Noisy(nn.Module):
    """A regression whose outputs have noise of a variance that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.variance = net(10, 32, 1), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        made = self.net(x)
        return made + self.variance.sqrt() * torch.randn_like(made)


@report(
    GITHUB + "facebookresearch/habitat-lab/pull/2229",
    "infinite gradient of one parameter clipped together with all others",
    EVERYWHERE,
    (*NONFINITE, "clip"),
)
def clipped_infinity(fixed: bool) -> Training:
    """Infinity divided by the norm of all is not a number, and nothing of the model is left."""

    def step(model: Noisy, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.variance.data.clamp_(min=1e-4 if fixed else 0.0)
        return loss.detach()

    model = Noisy()
    return course(model, SGD(model.parameters(), lr=0.02), step, patients)


@report(
    GITHUB + "espnet/espnet/pull/3283",
    "gradients not cleared where a step is left out for them",
    EVERYWHERE,
    (*NONFINITE, *STILL, "zero_grad", "cleared", "skip", "left out"),
)
def never_again(fixed: bool) -> Training:
    """What is not a number is added to, and no later step is taken either."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        x, y, shift = batch
        logits = model(x)
        apart = (logits - model(x + shift)).pow(2).sum(-1).sqrt().mean()
        loss = F.cross_entropy(logits, y) + 0.1 * apart
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if norm.isfinite():
            optimizer.step()
        if norm.isfinite() or fixed:
            optimizer.zero_grad()
        return loss.detach()

    def shifted(number: int, batch: Any) -> Any:
        x, y = batch
        return x, y, (0.0 if number == 9 else 0.1) * torch.randn_like(x)

    model = MLP()
    return in_turn(course(model, Adam(model.parameters(), lr=2e-3), step, steps=36), shifted)


# ---- rates that go another way -------------------------------------------------------------------


@report(
    GITHUB + "md-mohaiminul/ViS4mer/issues/4",
    "rate lowered because the accuracy rises",
    EVERYWHERE,
    (*RATE, *STILL, "small", "lowered"),
)
def accuracy_for_loss(fixed: bool) -> Training:
    """The plan takes the accuracy for a loss, and each gain for a reason to slow down."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        with torch.no_grad():
            right = (model(batch[0]).argmax(1) == batch[1]).float().mean()
        plan.step(right)
        return loss

    model = MLP()
    optimizer = Adam(model.parameters(), lr=3e-3)
    plan = ReduceLROnPlateau(optimizer, "max" if fixed else "min", patience=2, factor=0.1)
    return course(model, optimizer, step, flat, 64, 40, (plan,))


@report(
    GITHUB + "Tencent-Hunyuan/UniRL/pull/223",
    "cosine that comes up again before the end",
    EVERYWHERE,
    (*RATE, *RISES),
)
def back_up(fixed: bool) -> Training:
    """Its half period is shorter than the training, so the rate reaches zero and rises again."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        plan.step()
        return loss

    model = MLP()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = CosineAnnealingLR(optimizer, 40 if fixed else 22)
    return course(model, optimizer, step, flat, 32, 40, (plan,))


@report(
    GITHUB + "Vision-CAIR/MiniGPT-4/pull/263",
    "warm-up that begins anew with each epoch",
    EVERYWHERE,
    (*RATE, *RISES, "warm"),
)
def warmed_anew(fixed: bool) -> Training:
    """It counts the steps of the epoch, and the rate falls back each time."""
    numbers = itertools.count()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        number = next(numbers)
        counted = number if fixed else number % 10
        for group in optimizer.param_groups:
            group["lr"] = 1e-5 + 3e-3 * min(1.0, counted / 25)
        return usual(model, optimizer, batch)

    model = MLP()
    return course(model, Adam(model.parameters(), lr=3e-3), step, flat, 32, 40)


@report(
    GITHUB + "ultralytics/yolov5/issues/8352",
    "high first rate of biases on the weights",
    EVERYWHERE,
    (*RATE, *GROWS, "warm", "group"),
)
def other_group(fixed: bool) -> Training:
    """Groups were put into another order, and the warm-up from a high rate hits the matrices."""
    numbers = itertools.count()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        share = min(1.0, next(numbers) / 20)
        for index, group in enumerate(optimizer.param_groups):
            start = 4.0 if index == (0 if fixed else 1) else 0.0
            group["lr"] = start + share * (0.1 - start)
        return usual(model, optimizer, batch)

    model = net(64, 64, 64, 10)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 1]},
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 5e-4},
    ]
    return course(model, SGD(groups, lr=0.1, momentum=0.9), step, flat, 32, 36)


@report(
    GITHUB + "lindermanlab/S5/issues/11",
    "decay that is counted during the warm-up",
    EVERYWHERE,
    (*RATE, "drop", "fall", "sudden", "jump"),
)
def sharp_drop(fixed: bool) -> Training:
    """When the warm-up ends the cosine is half over, and the rate drops at once."""

    def factor(number: int) -> float:
        if number < 20:
            return number / 20
        gone = (number - 20) / 20 if fixed else number / 30
        return 0.5 * (1 + math.cos(math.pi * min(1.0, gone)))

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        plan.step()
        return loss

    model = MLP()
    optimizer = Adam(model.parameters(), lr=3e-3)
    plan = LambdaLR(optimizer, factor)
    return course(model, optimizer, step, flat, 32, 40, (plan,))


@report(
    GITHUB + "Lightning-AI/pytorch-lightning/issues/6675",
    "weights of the range test kept for the training",
    EVERYWHERE,
    (*RATE, *GROWS, "dead", "saturat"),
)
def after_the_range_test(fixed: bool) -> Training:
    """The test ends where the training diverges, and the training goes on from there."""
    model = net(64, 64, 64, 64, 10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(12):
        usual(model, optimizer, flat(32))
        optimizer.param_groups[0]["lr"] *= 2.8
    if fixed:
        model.load_state_dict(before)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return course(model, optimizer, usual, flat, 32, 40)


# ---- batches -------------------------------------------------------------------------------------


@report(
    GITHUB + "Deci-AI/super-gradients/issues/416",
    "loader that goes through one class after the other",
    EVERYWHERE,
    ("class", "label", "swing", "oscillat", "shuffl", "batch", "jump", "sorted", "forget", "spike"),
)
def one_class_at_a_time(fixed: bool) -> Training:
    """Batches are of one class each, and the net says of all what the last one was."""

    def batches(number: int) -> Any:
        x, y = flat(600)
        if fixed:
            return x[:32], y[:32]
        kept = (y == number // 4 % 10).nonzero().squeeze(1)[:32]
        return x[kept], y[kept]

    model = MLP()
    t = course(model, SGD(model.parameters(), lr=0.1, momentum=0.9), usual, flat, 32, 40)
    t.batches = batches
    return t


@report(
    GITHUB + "ZhaoJ9014/face.evoLVe/pull/39",
    "first batch of the loader in every step",
    EVERYWHERE,
    ("same", "identical", "repeat", "batch", "constant"),
)
def always_the_first(fixed: bool) -> Training:
    """The iterator is made anew in each step, and gives its first batch each time."""
    model = MLP()
    t = course(model, Adam(model.parameters(), lr=3e-3), usual, flat, 32, 40)
    first = flat(32)
    if not fixed:
        t.batches = lambda _: (first[0].clone(), first[1].clone())
    return t


# ---- parts that run away, or stand still ---------------------------------------------------------


class Gaussian(nn.Module):
    """A policy of a continuous action, whose deviation is a parameter."""

    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.mean, self.log_std, self.bounded = net(2, 32, 2), nn.Parameter(torch.zeros(2)), bounded

    def forward(self, state: Tensor) -> torch.distributions.Normal:
        log_std = self.log_std.clamp(-3.0, 0.5) if self.bounded else self.log_std
        return torch.distributions.Normal(self.mean(state), log_std.exp())


@report(
    GITHUB + "astooke/rlpyt/issues/124",
    "deviation of the actions without a bound",
    EVERYWHERE,
    (*GROWS, "log_std", "entropy"),
)
def wilder_and_wilder(fixed: bool) -> Training:
    """The reward falls off to nothing, and what is left makes the actions ever wilder."""

    def step(model: Gaussian, optimizer: Any, batch: Any) -> Tensor:
        state = batch[0]
        chances = model(state)
        action = chances.sample()
        reward = (-8 * (action - 3 * state).pow(2).sum(-1)).exp()
        said = chances.log_prob(action).sum(-1)
        gained = (said * (reward - reward.mean())).mean()
        return go_down(optimizer, -gained - 0.1 * chances.entropy().mean())

    model = Gaussian(fixed)
    return course(model, Adam(model.parameters(), lr=0.15), step, moves, 64, 40)


class Values(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = net(2, 32, 32, 4), net(2, 32, 32, 4)
        self.target.load_state_dict(self.online.state_dict())
        frozen(self.target)

    def forward(self, state: Tensor) -> Tensor:
        return self.online(state)


@report(
    GITHUB + "navneet-nmk/pytorch-rl/issues/2",
    "what comes after the end of an episode counted",
    EVERYWHERE,
    (*GROWS, "target", "terminal", "done"),
)
def after_the_end(fixed: bool) -> Training:
    """Values feed on themselves with nothing to end them, and grow from step to step."""

    def step(model: Values, optimizer: Any, batch: Any) -> Tensor:
        state, action, _, following = batch
        done = torch.ones(len(state)) if fixed else torch.zeros(len(state))
        goal = 1.0 + 0.99 * (1 - done) * model.target(following).amax(1)
        value = model(state).gather(1, action[:, None]).squeeze(1)
        loss = go_down(optimizer, F.mse_loss(value, goal))
        model.target.load_state_dict(model.online.state_dict())
        return loss

    model = Values()
    return course(model, Adam(model.online.parameters(), lr=1e-2), step, moves, 64, 40)


@report(
    GITHUB + "jim-meyer/lottery_ticket_pruner/issues/17",
    "mask of pruned weights put on once an epoch",
    EVERYWHERE,
    (*FROZEN, "mask", "prun", "zero", "jump", "outside"),
)
def grown_back(fixed: bool) -> Training:
    """Between two epochs the pruned weights grow back, and are thrown away again."""
    numbers = itertools.count()

    @torch.no_grad()
    def prune(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name in masks:
                parameter.mul_(masks[name])

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        if next(numbers) % 10 == 0:
            prune(model)
        loss = usual(model, optimizer, batch)
        if fixed:
            prune(model)
        return loss

    model = net(64, 64, 64, 10)
    masks = {
        name: (p.abs() > p.abs().quantile(0.7)).float()
        for name, p in model.named_parameters()
        if p.ndim > 1
    }
    return course(model, Adam(model.parameters(), lr=1e-2), step, flat, 32, 40)


class Codes(nn.Module):
    """An autoencoder through codes that follow, by averages, what is nearest to them."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.encoder, self.decoder = net(64, 32, 8), net(8, 32, 64)
        for name, start in (("codes", torch.randn(16, 8)), ("sums", torch.zeros(16, 8))):
            self.register_buffer(name, start)
        self.register_buffer("counts", torch.zeros(16))
        self.after, self.number = after, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        with torch.no_grad():
            one_hot = F.one_hot(nearest, 16).to(z)
            self.counts.lerp_(one_hot.sum(0), 0.1)
            self.sums.lerp_(one_hot.T @ z, 0.1)
            self.number += 1
            if self.number % self.after == 0:
                used = self.counts > 1e-3
                self.codes[used] = (self.sums / self.counts[:, None])[used]
        code = self.codes[nearest]
        return self.decoder(z + (code - z).detach()), F.mse_loss(z, code)


@report(
    GITHUB + "umran666/UniqToken/issues/12",
    "codes written after a hundred updates at the earliest",
    EVERYWHERE,
    (*STILL, "codes", "codebook", "buffer"),
)
def random_codes(fixed: bool) -> Training:
    """The averages are kept, and the codes are still those that were drawn when it ends."""

    def step(model: Codes, optimizer: Any, batch: Any) -> Tensor:
        made, commitment = model(batch[0])
        return go_down(optimizer, F.mse_loss(made, batch[0]) + 0.25 * commitment)

    model = Codes(1 if fixed else 100)
    return course(model, Adam(model.parameters(), lr=3e-3), step, flat, 64, 40)


@report(
    GITHUB + "pytorch/pytorch/issues/5953",
    "quasi-Newton steps on batches that change, without a line search",
    EVERYWHERE,
    (*NONFINITE, *GROWS),
)
def newton_astray(fixed: bool) -> Training:
    """Curvature is read off slopes of other batches, and nothing holds a wrong step back."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        def closure() -> Tensor:
            pixels, labels = some_digits(16) if not fixed else seen
            optimizer.zero_grad()
            loss = F.cross_entropy(model((pixels - 4.9) / 6.0), labels)
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    seen = some_digits(1700)
    model = net(64, 24, 10)
    search = "strong_wolfe" if fixed else None
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=3, line_search_fn=search)
    return course(model, optimizer, step, flat, 16, 24)


@report(
    GITHUB + "sthalles/SimCLR/issues/8",
    "schedule counted in batches, stepped in epochs",
    EVERYWHERE,
    (*RATE, "constant", "never"),
)
def schedule_in_epochs(fixed: bool) -> Training:
    """Its length is that of the training in batches, and it is stepped once in ten of them."""
    numbers = itertools.count(1)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        if next(numbers) % 10 == 0 or fixed:
            plan.step()
        return loss

    model = MLP()
    optimizer = Adam(model.parameters(), lr=3e-3)
    plan = CosineAnnealingLR(optimizer, 40)
    return course(model, optimizer, step, flat, 32, 40, (plan,))
