"""Published steps and trainings that look like what people report: each is meant."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from corpus.cards import Shelf
from corpus.models.healthy_steps import controls_of
from corpus.models.parts import captions, follow, frozen
from corpus.models.reported_steps import (
    SGD,
    Adam,
    AdamW,
    Headed,
    Pair,
    classified,
    course,
    go_down,
    net,
)
from corpus.models.small import CNN, MLP, flat, images, itself, language_loss, next_words, patients
from corpus.models.trainings import moves
from corpus.models.usual import LoRA
from corpus.subject import Training

SHELF = Shelf("steps", "blind")
control = controls_of(SHELF)


def usual(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    return go_down(optimizer, classified(model, batch))


# ---- steps ---------------------------------------------------------------------------------------


@control("first forward without gradients, second with them, under one autocast")
def recycled() -> Training:
    """What the first makes is fed to the second, as AlphaFold recycles."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                before = model(torch.cat([x, x.new_zeros(len(x), 10)], 1))
            made = model(torch.cat([x, before.float()], 1))
            loss = F.cross_entropy(made, y)
        return go_down(optimizer, loss)

    model = net(74, 64, 10)
    return Training(model, Adam(model.parameters(), lr=2e-3), step, flat(32))


@control("gradient of an adapted copy taken for that of the model")
def first_order() -> Training:
    """First-order meta learning (Nichol et al. 2018)."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        (x, y), (query, answer) = (tuple(t[i::2] for t in batch) for i in range(2))
        fast = copy.deepcopy(model)
        go_down(SGD(fast.parameters(), lr=0.05), F.mse_loss(fast(x), y))
        loss = F.mse_loss(fast(query), answer)
        slopes = torch.autograd.grad(loss, list(fast.parameters()))
        optimizer.zero_grad()
        for parameter, slope in zip(model.parameters(), slopes, strict=True):
            parameter.grad = slope
        optimizer.step()
        return loss.detach()

    model = MLP(10, 32, 1)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, patients(48))


@control("second pass of a sharpness-aware step without statistics of norms")
def sharp_once() -> Training:
    """Norms count the first pass alone, by a momentum of zero in the second."""

    def count(model: nn.Module, momentum: float) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = momentum

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classified(model, batch)
        loss.backward()
        size = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
        moved = [0.05 * p.grad / size for p in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moved)
        optimizer.zero_grad()
        count(model, 0.0)
        classified(model, batch).backward()
        count(model, 0.1)
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moved)
        optimizer.step()
        return loss.detach()

    model = CNN()
    return Training(model, SGD(model.parameters(), lr=0.1, momentum=0.9), step, images(32))


@control("error of a value differentiated on both sides")
def residual_gradient() -> Training:
    """The residual gradient (Baird 1995): the target is trained as well, by design."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        state, _, reward, following = batch
        error = reward[:, None] + 0.9 * model(following) - model(state)
        return go_down(optimizer, error.pow(2).mean())

    model = net(2, 32, 1)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, moves(64))


@control("ratio of a policy to itself, one pass a batch")
def on_policy() -> Training:
    """Strictly on policy the ratio is one, and its slope that of the log probability."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        state, action, reward, _ = batch
        said = model(state).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
        ratio = (said - said.detach()).exp()
        gain = reward - reward.mean()
        gained = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return go_down(optimizer, -gained.mean())

    model = net(2, 32, 4)
    return Training(model, Adam(model.parameters(), lr=1e-2), step, moves(64))


class Switched(nn.Module):
    """A net of tokens with adapters that can be left out for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(18, 32).requires_grad_(False)
        self.body = LoRA(nn.Linear(32, 32))
        self.head = LoRA(nn.Linear(32, 18))
        self.on = True

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer, then in ((self.body, F.gelu), (self.head, lambda x: x)):
            x = then(layer(x) if self.on else layer.base(x))
        return x


@control("reference that is the same net with its adapters left out")
def adapters_off() -> Training:
    """As preferences are learnt with adapters; at first policy and reference say the same."""

    def score(model: nn.Module, ids: Tensor) -> Tensor:
        said = model(ids[:, :-1]).log_softmax(-1)
        return said.gather(-1, ids[:, 1:, None]).sum((1, 2))

    def step(model: Switched, optimizer: Any, batch: Any) -> Tensor:
        good, bad = batch[0], batch[0].flip(1)
        model.on = False
        with torch.no_grad():
            before = score(model, good) - score(model, bad)
        model.on = True
        now = score(model, good) - score(model, bad)
        return go_down(optimizer, -F.logsigmoid(0.1 * (now - before)).mean())

    model = Switched()
    learnt = [p for p in model.parameters() if p.requires_grad]
    return Training(model, AdamW(learnt, lr=3e-3), step, next_words(16))


@control("held near the weights that it begins with, a penalty that is zero at first")
def held_near() -> Training:
    """L2-SP (Li et al. 2018), in its first step."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        far = sum((p - q).pow(2).sum() for p, q in zip(model.parameters(), start, strict=True))
        return go_down(optimizer, classified(model, batch) + 0.1 * far)

    model = MLP()
    start = [p.detach().clone() for p in model.parameters()]
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, flat(32))


@control("slopes of embeddings kept, then handed to parts run again with the same masks")
def cached() -> Training:
    """GradCache (Gao et al. 2021): a large contrastive batch in parts."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        parts, states = batch[0].split(16), []
        with torch.no_grad():
            made = []
            for part in parts:
                states.append(torch.get_rng_state())
                made.append(model(part))
        reps = torch.cat(made).requires_grad_()
        a, b = F.normalize(reps, dim=-1).view(2, -1, reps.shape[-1])
        loss = F.cross_entropy(8 * a @ b.T, torch.arange(len(a)))
        slopes = torch.autograd.grad(loss, reps)[0].split(16)
        later = torch.get_rng_state()
        optimizer.zero_grad()
        for part, state, slope in zip(parts, states, slopes, strict=True):
            torch.set_rng_state(state)
            model(part).backward(slope)
        torch.set_rng_state(later)
        optimizer.step()
        return loss.detach()

    model = net(64, 48, 48, 16, dropout=0.2)
    x = flat(32)[0]
    pair = torch.cat([x, x + 0.2 * torch.randn_like(x)])
    return Training(model, Adam(model.parameters(), lr=3e-3), step, (pair,))


@control("perturbation and weights moved by one backward, replayed four times")
def free() -> Training:
    """Adversarial training for free (Shafahi et al. 2019)."""

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        delta = torch.zeros_like(x)
        losses = []
        for _ in range(4):
            delta.requires_grad_()
            loss = F.cross_entropy(model(x + delta), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            delta = (delta.detach() + 0.1 * delta.grad.sign()).clamp(-0.2, 0.2)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    model = MLP()
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, flat(32))


class Turned(torch.autograd.Function):
    """What it is given, with its slope turned around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return -slope


@control("generator and critic by one backward, the slope turned between them")
def one_backward() -> Training:
    def step(model: Pair, optimizers: Any, batch: Any) -> Tensor:
        real = batch[0]
        made = Turned.apply(model.generator(torch.randn(len(real), 8)))
        loss = F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(made)).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    model = Pair(generator=net(8, 32, 64), critic=net(64, 32, 1))
    optimizers = tuple(Adam(part.parameters(), lr=2e-3) for part in model.children())
    return Training(model, optimizers, step, itself(48))


@control("body and head clipped each to a norm of its own, by lists made before")
def clipped_apart() -> Training:
    def step(model: Headed, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classified(model, batch)
        loss.backward()
        for parameters, norm in limits:
            nn.utils.clip_grad_norm_(parameters, norm)
        optimizer.step()
        return loss.detach()

    model = Headed()
    limits = [(list(model.body.parameters()), 0.05), (list(model.head.parameters()), 0.5)]
    return Training(model, SGD(model.parameters(), lr=0.1, momentum=0.9), step, flat(32))


@control("adapters recomputed without reentry behind a frozen embedding")
def recomputed_adapters() -> Training:
    def step(model: nn.ModuleDict, optimizer: Any, batch: Any) -> Tensor:
        x = model["embedding"](batch[0])
        for block in model["blocks"]:
            x = x + checkpoint(block, x, use_reentrant=False)
        return go_down(optimizer, language_loss(model["head"](x), batch[1]))

    blocks = [nn.Sequential(LoRA(nn.Linear(32, 32)), nn.GELU()) for _ in range(2)]
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(18, 32).requires_grad_(False),
            "blocks": nn.ModuleList(blocks),
            "head": LoRA(nn.Linear(32, 18)),
        }
    )
    learnt = [p for p in model.parameters() if p.requires_grad]
    return Training(model, AdamW(learnt, lr=3e-3), step, next_words(16))


@control("image tower against captions held still, then the other way round")
def towers_in_turn() -> Training:
    def step(model: Pair, optimizers: Any, batch: Any) -> Tensor:
        total, own = torch.zeros(()), torch.arange(len(batch[0][0]))
        for index, optimizer in enumerate(optimizers):
            made = zip(towers(model), batch[0], strict=True)
            sides = [F.normalize(tower(x), dim=-1) for tower, x in made]
            sides[1 - index] = sides[1 - index].detach()
            total += go_down(optimizer, F.cross_entropy(10 * sides[0] @ sides[1].T, own))
        return total / 2

    def towers(model: Pair) -> list[Any]:
        return [lambda x: model.image(x.flatten(1)), lambda x: model.words(x).mean(1)]

    words = nn.Sequential(nn.Embedding(18, 24), nn.Linear(24, 16))
    shape = captions(2)[0][0].flatten(1).shape[1]
    model = Pair(image=net(shape, 48, 16), words=words)
    optimizers = tuple(Adam(part.parameters(), lr=3e-3) for part in model.children())
    return Training(model, optimizers, step, captions(32))


@control("loss between two levels of noise, one of them by an average of the weights")
def consistent() -> Training:
    """Consistency training (Song et al. 2023)."""

    def clean(model: nn.Module, z: Tensor, level: Tensor) -> Tensor:
        return (1 - level) * z + level * model(torch.cat([z, level], 1))

    def step(model: Pair, optimizer: Any, batch: Any) -> Tensor:
        x = batch[0]
        level, noise = torch.rand(len(x), 1), torch.randn_like(x)
        with torch.no_grad():
            goal = clean(model.slow, x + 0.8 * level * noise, 0.8 * level)
        loss = go_down(optimizer, F.mse_loss(clean(model.fast, x + level * noise, level), goal))
        follow(model.slow, model.fast, 0.95)
        return loss

    made = net(65, 64, 64)
    model = Pair(fast=made, slow=frozen(copy.deepcopy(made)))
    return Training(model, Adam(model.fast.parameters(), lr=2e-3), step, itself(48))


# ---- trainings -----------------------------------------------------------------------------------


@control("tasks one after the other, with a memory of old samples")
def rehearsed() -> Training:
    """New digits every ten steps: the loss jumps, and comes down again."""
    seen: list[Any] = []

    def batches(number: int) -> Any:
        x, y = flat(400)
        new = (y // 3 == min(number // 10, 3)).nonzero().squeeze(1)[:24]
        now = x[new], y[new]
        old = [t[:8] for t in seen[number % len(seen)]] if seen else [t[:0] for t in now]
        seen.append(now)
        return tuple(torch.cat(pair) for pair in zip(now, old, strict=True))

    model = MLP()
    t = course(model, Adam(model.parameters(), lr=3e-3), usual, steps=40)
    t.batches = batches
    return t


@control("weights pruned little by little, the mask held")
def gradually_pruned() -> Training:
    """A cubic schedule to seven tenths (Zhu and Gupta 2017)."""
    numbers = itertools.count(1)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        share = 0.7 * (1 - (1 - min(1.0, next(numbers) / 30)) ** 3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(parameter.abs() >= parameter.abs().quantile(share))
        return loss

    model = net(64, 96, 64, 10)
    return course(model, Adam(model.parameters(), lr=3e-3), step, steps=40)


@control("weights set back towards slow ones in every fifth step")
def looked_ahead() -> Training:
    """Lookahead around SGD (Zhang et al. 2019)."""
    numbers = itertools.count(1)

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        if next(numbers) % 5 == 0:
            with torch.no_grad():
                for fast, slow in zip(model.parameters(), kept, strict=True):
                    slow.lerp_(fast, 0.5)
                    fast.copy_(slow)
        return loss

    model = MLP()
    kept = [p.detach().clone() for p in model.parameters()]
    return course(model, SGD(model.parameters(), lr=0.1, momentum=0.9), step, steps=40)


@control("layers thawed one after the other, from the head down")
def thawed_in_turn() -> Training:
    """Gradual unfreezing (Howard and Ruder 2018)."""
    numbers = itertools.count()

    def step(model: nn.Sequential, optimizer: Any, batch: Any) -> Tensor:
        first = max(0, len(model) - 1 - 2 * (next(numbers) // 8))
        for index, layer in enumerate(model):
            layer.requires_grad_(index >= first)
        return usual(model, optimizer, batch)

    model = net(64, 64, 64, 64, 10)
    return course(model, Adam(model.parameters(), lr=3e-3), step, steps=36)


@control("batches that double twice, with the rate")
def doubled() -> Training:
    numbers = itertools.count()

    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        optimizer.param_groups[0]["lr"] = 0.03 * 2 ** (next(numbers) // 12)
        return usual(model, optimizer, batch)

    model = MLP()
    t = course(model, SGD(model.parameters(), lr=0.03, momentum=0.9), step, steps=36)
    t.batches = lambda number: flat(16 * 2 ** (number // 12))
    return t


@control("deviation of the actions lowered by a plan to a bound")
def calmer() -> Training:
    def step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        state = batch[0]
        spread = max(0.1, 1.0 - next(numbers) / 20)
        chances = torch.distributions.Normal(model(state), spread)
        action = chances.sample()
        reward = -(action - state).pow(2).sum(-1)
        gain = (reward - reward.mean()) / (reward.std() + 1e-8)
        return go_down(optimizer, -(chances.log_prob(action).sum(-1) * gain).mean())

    model, numbers = net(2, 32, 2), itertools.count()
    return course(model, Adam(model.parameters(), lr=5e-3), step, moves, 64, 36)
