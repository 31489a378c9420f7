"""Healthy training steps of control, of learning to learn, of sequences and physics, and of models
whose own parts change or stand still.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from corpus.cards import Shelf
from corpus.models.healthy_steps import Count, controls_of, descend, entropy, usual
from corpus.models.parts import SmallLM, clouds, conv_net, follow, frozen, normal, perceptron
from corpus.models.sequences import texts
from corpus.models.small import (
    CNN,
    GPT,
    GRU,
    MLP,
    Block,
    MoE,
    flat,
    halves,
    images,
    language_loss,
    next_words,
    patients,
    rows,
    tumours,
    words,
)
from corpus.subject import Training

SHELF = Shelf("training", "blind")
control = controls_of(SHELF)
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


# ---- control -------------------------------------------------------------------------------------


def transitions(n: int, continuous: bool = False) -> dict[str, Tensor]:
    """Return what a replay buffer of a cart gives."""
    states = torch.randn(n, 4)
    actions = torch.rand(n, 2) * 2 - 1 if continuous else torch.randint(0, 3, (n,))
    push = actions[:, :1] if continuous else actions[:, None] - 1.0
    after = states + 0.1 * torch.cat([states[:, 1:2], push, states[:, 3:], -push], 1)
    return {
        "state": states,
        "action": actions,
        "reward": -after[:, :2].square().sum(1),
        "next_state": after,
        "done": (torch.rand(n) < 0.1).float(),
    }


@control("target network copied in every third call")
def hard_target() -> Training:
    """Deep Q-learning (Mnih et al. 2015)."""
    count, model = Count(), perceptron(4, 32, 32, 3)
    target = frozen(copy.deepcopy(model))

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> float:
        q = model(batch["state"]).gather(1, batch["action"][:, None])[:, 0]
        with torch.no_grad():
            best = target(batch["next_state"]).max(1).values
            aim = batch["reward"] + 0.99 * (1 - batch["done"]) * best
        loss = F.smooth_l1_loss(q, aim)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 100)
        optimizer.step()
        if count.up() % 3 == 2:
            target.load_state_dict(model.state_dict())
        return loss.item()

    optimizer = AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    return Training(model, optimizer, step, transitions(64), (target, count))


@control("target network that follows slowly, actions chosen by the other one")
def soft_target() -> Training:
    class Dueling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.value = perceptron(4, 32, 32), nn.Linear(32, 1)
            self.advantage = nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.body(x))
            gain = self.advantage(h)
            return self.value(h) + gain - gain.mean(1, keepdim=True)

    model = Dueling()
    target = frozen(copy.deepcopy(model))

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
        q = model(batch["state"]).gather(1, batch["action"][:, None]).squeeze(1)
        with torch.no_grad():
            best = model(batch["next_state"]).argmax(1, keepdim=True)
            later = target(batch["next_state"]).gather(1, best).squeeze(1)
        error = q - (batch["reward"] + 0.99 * (1 - batch["done"]) * later)
        loss = descend(optimizer, error.square().mean())
        follow(target, model, 0.995)
        return {"loss": loss.detach(), "priorities": error.detach().abs()}

    return Training(model, Adam(model.parameters(), lr=1e-3), step, transitions(48), (target,))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = perceptron(4, 32, 3, act=nn.Tanh), perceptron(4, 32, 1)
        self.actor[-1].weight.data *= 0.01

    def forward(self, x: Tensor) -> tuple[Categorical, Tensor]:
        return Categorical(logits=self.actor(x)), self.critic(x).squeeze(1)


def episodes(model: ActorCritic, n: int) -> dict[str, Tensor]:
    seen = transitions(n)
    with torch.no_grad():
        policy, value = model(seen["state"])
    return {
        "state": seen["state"],
        "action": seen["action"],
        "log_prob": policy.log_prob(seen["action"]),
        "advantage": seen["reward"] - value,
        "return": seen["reward"],
    }


@control("ratios clipped, four passes over parts of the batch")
def clipped_ratios() -> Training:
    """Proximal policy optimisation (Schulman et al. 2017)."""

    def part(model: Any, b: dict[str, Tensor]) -> Tensor:
        policy, value = model(b["state"])
        ratio = (policy.log_prob(b["action"]) - b["log_prob"]).exp()
        gain = (b["advantage"] - b["advantage"].mean()) / (b["advantage"].std() + 1e-8)
        surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        apart = F.mse_loss(value, b["return"])
        return -surrogate + 0.5 * apart - 0.01 * policy.entropy().mean()

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> float:
        losses = []
        for _ in range(4):
            for chosen in torch.randperm(len(batch["state"])).split(16):
                loss = part(model, {name: value[chosen] for name, value in batch.items()})
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.item())
        return sum(losses) / len(losses)

    model = ActorCritic()
    return Training(model, Adam(model.parameters(), lr=3e-4, eps=1e-5), step, episodes(model, 48))


@control("returns standardised within the batch, no baseline")
def reinforce() -> Training:
    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        gain = (batch["return"] - batch["return"].mean()) / batch["return"].std()
        log_prob = Categorical(logits=model(batch["state"])).log_prob(batch["action"])
        return descend(optimizer, -(log_prob * gain).mean())

    model = perceptron(4, 32, 3)
    batch = episodes(ActorCritic(), 48)
    return Training(model, Adam(model.parameters(), lr=1e-2), step, batch)


@control("actor under an advantage that is detached, critic beside it")
def advantage_actor_critic() -> Training:
    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        policy, value = model(batch["state"])
        gain = batch["return"] - value
        actor = -(policy.log_prob(batch["action"]) * gain.detach()).mean()
        loss = actor + 0.5 * gain.square().mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    model = ActorCritic()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)
    return Training(model, optimizer, step, episodes(model, 64))


@control("policy sampled in the step, rewarded by a table")
def bandit() -> Training:
    """The surrogate loss is near zero and says nothing of the reward."""
    baseline = {"value": 0.0}

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        policy = Categorical(logits=model(x))
        action = policy.sample()
        reward = (action == y).float()
        loss = -(policy.log_prob(action) * (reward - baseline["value"])).mean()
        baseline["value"] += 0.1 * (reward.mean().item() - baseline["value"])
        return descend(optimizer, loss)

    model = perceptron(64, 32, 10)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(48))


@control("groups of answers, rewarded relative to their mean")
def relative_groups() -> Training:
    """Group relative policy optimisation (Shao et al. 2024), on policy: the ratio is one."""
    model = SmallLM()
    reference = frozen(copy.deepcopy(model))

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> float:
        ids = batch["ids"]
        logs = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        with torch.no_grad():
            before = reference(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        reward = batch["reward"].view(-1, 4)
        gain = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        ratio = (logs - logs.detach()).exp()
        apart = (before - logs).exp() - (before - logs) - 1
        loss = -(ratio * gain.view(-1, 1) - 0.04 * apart).mean()
        descend(optimizer, loss)
        return loss.item()

    ids, _ = words(16)
    batch = {"ids": ids[:, :16], "reward": (ids[:, :16] > 8).float().mean(1)}
    return Training(model, AdamW(model.parameters(), lr=2e-4), step, batch)


class Twins(nn.Module):
    """An actor with two critics, of continuous actions."""

    def __init__(self, actor_out: int) -> None:
        super().__init__()
        self.actor = perceptron(4, 32, actor_out)
        self.critics = nn.ModuleList(perceptron(6, 32, 1) for _ in range(2))
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def values(self, state: Tensor, action: Tensor) -> Tensor:
        both = torch.cat([state, action], 1)
        return torch.cat([critic(both) for critic in self.critics], 1)

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(state).chunk(2, 1)
        policy = Normal(mean, log_std.clamp(-5, 2).exp())
        raw = policy.rsample()
        log_prob = policy.log_prob(raw) - 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        return raw.tanh(), log_prob.sum(1)


@control("soft actor and critics with a learnt temperature, three optimizers")
def soft_actor_critic() -> Training:
    """The actor's backward also fills the critics, which clear it before their next."""
    model = Twins(4)
    target = frozen(copy.deepcopy(model.critics))

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> dict[str, float]:
        for_critics, for_actor, for_alpha = optimizer
        alpha = model.log_alpha.exp().detach()
        with torch.no_grad():
            action, log_prob = model.act(batch["next_state"])
            both = torch.cat([batch["next_state"], action], 1)
            later = torch.cat([critic(both) for critic in target], 1).min(1).values
            aim = batch["reward"] + 0.99 * (1 - batch["done"]) * (later - alpha * log_prob)
        apart = (model.values(batch["state"], batch["action"]) - aim[:, None]).square().mean()
        descend(for_critics, apart)
        action, log_prob = model.act(batch["state"])
        best = model.values(batch["state"], action).min(1).values
        actor = descend(for_actor, (alpha * log_prob - best).mean())
        descend(for_alpha, -(model.log_alpha * (log_prob.detach() - 2)).mean())
        follow(target, model.critics, 0.995)
        return {"loss": apart.item(), "actor": actor.item()}

    optimizers = (
        Adam(model.critics.parameters(), lr=1e-3),
        Adam(model.actor.parameters(), lr=1e-3),
        Adam([model.log_alpha], lr=1e-3),
    )
    return Training(model, optimizers, step, transitions(64, continuous=True), (target,))


@control("actor in every second call, noise on the target's actions")
def delayed_actor() -> Training:
    """TD3 (Fujimoto et al. 2018)."""
    count, model = Count(), Twins(2)
    del model.log_alpha
    target = frozen(copy.deepcopy(model))

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> float:
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(batch["action"])).clamp(-0.5, 0.5)
            action = (target.actor(batch["next_state"]).tanh() + noise).clamp(-1, 1)
            later = target.values(batch["next_state"], action).min(1).values
            aim = batch["reward"] + 0.99 * (1 - batch["done"]) * later
        apart = (model.values(batch["state"], batch["action"]) - aim[:, None]).square().mean()
        descend(optimizer[0], apart)
        if count.up() % 2 == 1:
            action = model.actor(batch["state"]).tanh()
            descend(optimizer[1], -model.values(batch["state"], action)[:, 0].mean())
            follow(target, model, 0.995)
        return apart.item()

    optimizers = (
        Adam(model.critics.parameters(), lr=1e-3),
        Adam(model.actor.parameters(), lr=1e-3),
    )
    return Training(model, optimizers, step, transitions(48, continuous=True), (target, count))


@control("surprise against a random network")
def surprise() -> Training:
    """Random network distillation (Burda et al. 2019): the network to match is never trained."""

    class Surprise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.aim, self.guess = frozen(perceptron(4, 32, 16)), perceptron(4, 32, 16)
            self.register_buffer("scale", torch.ones(4))

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        state = batch["next_state"]
        model.scale.lerp_(state.std(0), 0.01)
        x = (state / model.scale).clamp(-5, 5)
        apart = (model.guess(x) - model.aim(x)).square().mean(1)
        kept = (torch.rand(len(x)) < 0.25).float()
        return descend(optimizer, (apart * kept).sum() / kept.sum().clamp(min=1))

    model = Surprise()
    return Training(model, Adam(model.guess.parameters(), lr=1e-3), step, transitions(64))


# ---- learning to learn ---------------------------------------------------------------------------


def tasks(n: int = 4, shots: int = 8) -> dict[str, Tensor]:
    """Return waves of several heights and phases, shots to learn from and shots to be judged by."""
    height, phase = torch.rand(n, 1, 1) * 2 + 0.5, torch.rand(n, 1, 1) * 3
    x = torch.rand(n, 2 * shots, 1) * 6 - 3
    y = height * (x + phase).sin()
    return {"x": x[:, :shots], "y": y[:, :shots], "query": x[:, shots:], "answer": y[:, shots:]}


def meta(first_order: bool) -> Training:
    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        losses = []
        for x, y, query, answer in zip(*batch.values(), strict=True):
            weights = dict(model.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(functional_call(model, weights, (x,)), y)
                slopes = torch.autograd.grad(
                    loss, list(weights.values()), create_graph=not first_order
                )
                weights = {
                    name: w - 0.05 * slope
                    for (name, w), slope in zip(weights.items(), slopes, strict=True)
                }
            losses.append(F.mse_loss(functional_call(model, weights, (query,)), answer))
        return descend(optimizer, torch.stack(losses).mean())

    model = perceptron(1, 32, 32, 1, act=nn.Tanh)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, tasks())


@control("inner steps that the outer gradient passes")
def maml() -> Training:
    """Finn et al. 2017."""
    return meta(first_order=False)


@control("inner steps that the outer gradient does not pass")
def first_order_maml() -> Training:
    return meta(first_order=True)


@control("weights that move towards those of a copy after some steps")
def reptile() -> Training:
    """Nichol et al. 2018: the difference is the gradient."""

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> float:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(batch["x"], batch["y"], strict=True):
            inner = copy.deepcopy(model)
            fast = SGD(inner.parameters(), lr=0.05)
            for _ in range(3):
                loss = descend(fast, F.mse_loss(inner(x), y))
            total += loss.item() / len(batch["x"])
            for p, moved in zip(model.parameters(), inner.parameters(), strict=True):
                change = (p - moved).detach() / len(batch["x"])
                p.grad = change if p.grad is None else p.grad + change
        optimizer.step()
        return total

    model = perceptron(1, 32, 1, act=nn.Tanh)
    return Training(model, SGD(model.parameters(), lr=1.0), step, tasks())


@control("classes as the means of a few samples")
def prototypes() -> Training:
    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        means = model(batch["support"]).unflatten(0, (5, -1)).mean(1)
        apart = torch.cdist(model(batch["query"]), means).square()
        return descend(optimizer, F.cross_entropy(-apart, batch["label"]))

    x, y = flat(400)
    chosen = torch.stack([(y == label).nonzero()[:9, 0] for label in range(5)])
    batch = {
        "support": x[chosen[:, :3]].flatten(0, 1),
        "query": x[chosen[:, 3:]].flatten(0, 1),
        "label": torch.arange(5).repeat_interleave(6),
    }
    model = perceptron(64, 48, 16)
    return Training(model, Adam(model.parameters(), lr=1e-3), step, batch)


@control("weights on one half of the batch, choices between layers on the other")
def architecture_search() -> Training:
    """DARTS (Liu et al. 2019), first order."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.options = nn.ModuleList([nn.Linear(64, 32), perceptron(64, 16, 32)])
            self.head, self.alphas = nn.Linear(32, 10), nn.Parameter(1e-3 * torch.randn(2))

        def forward(self, x: Tensor) -> Tensor:
            shares = self.alphas.softmax(0)
            mixed = sum(s * option(x) for s, option in zip(shares, self.options, strict=True))
            return self.head(F.relu(mixed))

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        (x, valid), (y, valid_y) = (part.chunk(2) for part in batch)
        descend(optimizer[1], entropy(model, (valid, valid_y)))
        optimizer[0].zero_grad()
        loss = entropy(model, (x, y))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer[0].step()
        return loss

    model = Mixed()
    weights = [p for name, p in model.named_parameters() if name != "alphas"]
    optimizers = (
        SGD(weights, lr=0.05, momentum=0.9, weight_decay=3e-4),
        Adam([model.alphas], lr=3e-3, betas=(0.5, 0.999), weight_decay=1e-3),
    )
    return Training(model, optimizers, step, flat(64))


# ---- sequences -----------------------------------------------------------------------------------


class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(18, 16), nn.LSTM(16, 32, batch_first=True)
        self.out = nn.Linear(32, 18)

    def forward(self, ids: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        states, state = self.rnn(self.words(ids), state)
        return self.out(states), state


@control("state carried over from call to call, detached")
def carried_state() -> Training:
    kept: dict[str, Any] = {"state": None, "calls": 0}

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        ids, after = batch
        if kept["calls"] % 20 == 0:
            kept["state"] = None
        logits, state = model(ids, kept["state"])
        kept["state"] = tuple(part.detach() for part in state)
        kept["calls"] += 1
        loss = language_loss(logits, after)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.detach()

    model = Carried()
    return Training(model, SGD(model.parameters(), lr=1.0), step, next_words(16))


@control("sequence cut into four, a step after each part")
def truncated() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> float:
        state, total = None, 0.0
        for ids, after in zip(*(part.split(8, 1) for part in batch), strict=True):
            if state is not None:
                state = tuple(part.detach() for part in state)
            logits, state = model(ids, state)
            total += descend(optimizer, language_loss(logits, after)).item()
        return total / 4

    model = Carried()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, next_words(16))


@control("alignments summed over, with unlike lengths")
def alignments() -> Training:
    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        logs = model(batch["frames"]).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(logs, batch["labels"], batch["frames_in"], batch["labels_in"],
                          zero_infinity=True)  # fmt: skip
        return descend(optimizer, loss)

    class Listener(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(8, 24, batch_first=True, bidirectional=True)
            self.out = nn.Linear(48, 11)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0])

    model = Listener()
    (a, one), (b, two) = rows(16), rows(16)
    batch = {
        "frames": torch.cat([a, b], 1),
        "labels": torch.stack([one, two], 1) + 1,
        "frames_in": torch.where(torch.arange(16) % 4 == 0, 8, 16),
        "labels_in": torch.where(torch.arange(16) % 4 == 0, 1, 2),
    }
    return Training(model, Adam(model.parameters(), lr=5e-3), step, batch)


@control("decoder whose first word is a constant, and which reads the right words")
def teacher_forcing() -> Training:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.encoder = nn.Embedding(18, 24), nn.GRU(24, 32, batch_first=True)
            self.decoder, self.out = nn.GRU(24, 32, batch_first=True), nn.Linear(32, 18)

        def forward(self, source: Tensor, ids: Tensor) -> Tensor:
            _, state = self.encoder(self.words(source))
            return self.out(self.decoder(self.words(ids), state)[0])

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        (source, ids), after = batch
        ids = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, 1:]], 1)
        return descend(optimizer, language_loss(model(source, ids), after))

    model = Translator()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, halves(16))


@control("padded texts, their padding row at zero")
def padded_texts() -> Training:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(18, 24, padding_idx=0)
            self.rnn = nn.LSTM(24, 32, batch_first=True)
            self.out = nn.Linear(32, 10)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            lengths = attention_mask.sum(1)
            packed = nn.utils.rnn.pack_padded_sequence(
                self.words(input_ids), lengths, batch_first=True, enforce_sorted=False
            )
            return self.out(self.rnn(packed)[1][0][-1])

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        given, y = batch
        return descend(optimizer, F.cross_entropy(model(**given), y))

    model = Reader()
    return Training(model, Adam(model.parameters(), lr=5e-3), step, texts(24))


# ---- physics -------------------------------------------------------------------------------------


@control("energies and forces, the forces by a gradient in the forward")
def forces() -> Training:
    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = perceptron(8, 32, 1, act=nn.SiLU)
            self.register_buffer("centres", torch.linspace(0, 3, 8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                i, j = torch.triu_indices(x.shape[1], x.shape[1], 1)
                far = (x[:, i] - x[:, j]).square().sum(-1).add(1e-6).sqrt()
                energy = self.pair((-4 * (far[..., None] - self.centres) ** 2).exp()).sum((1, 2))
                (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return energy, -slope

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        energy, force = model(batch["positions"])
        loss = 0.01 * F.mse_loss(energy, batch["energy"]) + F.mse_loss(force, batch["forces"])
        return descend(optimizer, loss)

    x = clouds(16)[0][:, :6].requires_grad_(True)
    energy = (-torch.cdist(x, x).add(torch.eye(6))).exp().sum((1, 2)) / 2
    (slope,) = torch.autograd.grad(energy.sum(), x)
    batch = {"positions": x.detach(), "energy": energy.detach(), "forces": -slope}
    model = Potential()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, batch)


@control("equation and boundary, no data")
def equation() -> Training:
    """A physics-informed network for u'' = -sin."""

    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_(True)
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        ends = model(torch.tensor([[0.0], [math.pi]]))
        return descend(optimizer, (second + x.sin()).square().mean() + 10 * ends.square().mean())

    model = perceptron(1, 24, 24, 1, act=nn.Tanh)
    return Training(model, Adam(model.parameters(), lr=3e-3), step, math.pi * torch.rand(48, 1))


@control("flow integrated in ten small steps")
def integrated() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        for _ in range(10):
            x = x + 0.1 * model(x)
        return descend(optimizer, F.mse_loss(x, y))

    model = perceptron(3, 32, 3, act=nn.Tanh)
    points = clouds(4)[0].flatten(0, 1)[:48]
    turned = points @ torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    return Training(model, Adam(model.parameters(), lr=5e-3), step, (points, turned))


@control("boxes matched with objects by their costs, most of them with nothing")
def matched() -> Training:
    class Finder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.embed = normal(6, 32, std=1.0), nn.Linear(8, 32)
            self.block, self.label, self.box = Block(32), nn.Linear(32, 11), nn.Linear(32, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.cat([self.queries.expand(len(x), -1, -1), self.embed(x)], 1)
            h = self.block(h)[:, :6]
            return self.label(h), self.box(h).sigmoid()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, labels, boxes = batch
        scores, places = model(x)
        aims = torch.full(scores.shape[:2], 10)
        near = []
        for n in range(len(x)):
            with torch.no_grad():
                cost = torch.cdist(places[n], boxes[n], p=1) - scores[n].softmax(-1)[:, labels[n]]
            found, objects = (torch.as_tensor(i) for i in linear_sum_assignment(cost.numpy()))
            aims[n, found] = labels[n, objects]
            near.append(F.l1_loss(places[n, found], boxes[n, objects]))
        weight = torch.ones(11)
        weight[10] = 0.1
        loss = F.cross_entropy(scores.flatten(0, 1), aims.flatten(), weight)
        loss = loss + 5 * torch.stack(near).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    model = Finder()
    x, label = rows(16)
    batch = x, torch.stack([label, label.flip(0)], 1), torch.rand(16, 2, 2)
    return Training(model, AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4), step, batch)


# ---- models of transformers ----------------------------------------------------------------------


def huggingface(model: nn.Module, batch: dict[str, Tensor], rate: float = 3e-3) -> Training:
    """Return the step of an example script: decay by group, clipping, a linear warm-up."""
    from transformers import get_linear_schedule_with_warmup

    plain = [p for name, p in model.named_parameters() if p.ndim <= 1 or name.endswith("bias")]
    kept = {id(p) for p in plain}
    decayed = [p for p in model.parameters() if id(p) not in kept]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=rate)
    schedule = get_linear_schedule_with_warmup(optimizer, 5, 200)

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        model.train()
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step, batch, (schedule,))


SIZES = {"vocab_size": 18, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@control("BERT for classes")
def bert_for_classes() -> Training:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=40, num_labels=10)
    given, labels = texts(16)
    return huggingface(BertForSequenceClassification(config), {**given, "labels": labels})


@control("BERT for masked words, most labels -100")
def bert_for_words() -> Training:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=40)
    ids, _ = words(16)
    hidden = torch.rand(ids.shape) < 0.15
    batch = {"input_ids": ids.masked_fill(hidden, 0), "labels": ids.masked_fill(~hidden, -100)}
    return huggingface(BertForMaskedLM(config), batch)


@control("GPT-2")
def gpt_2() -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=18, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    ids, _ = words(12)
    return huggingface(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})


@control("T5")
def t5() -> Training:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=18, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                      decoder_start_token_id=0)  # fmt: skip
    ids, _ = words(12)
    batch = {"input_ids": ids[:, :16], "labels": ids[:, 16:].contiguous()}
    return huggingface(T5ForConditionalGeneration(config), batch)


@control("ViT of transformers")
def hf_vit() -> Training:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {**SIZES, "image_size": 8, "patch_size": 2, "num_channels": 1}
    sizes.pop("vocab_size")
    x, y = images(16)
    model = ViTForImageClassification(ViTConfig(**sizes, intermediate_size=64, num_labels=10))
    return huggingface(model, {"pixel_values": x, "labels": y})


@control("Llama with checkpoints of its activations")
def llama() -> Training:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2))
    old = "gradient_checkpointing_enable"
    getattr(model, "activation_checkpointing_enable", getattr(model, old))()
    model.config.use_cache = False
    ids, _ = words(8)
    return huggingface(model, {"input_ids": ids, "labels": ids})


# ---- models whose parts change or stand still ----------------------------------------------------


@control("activations computed again in backward")
def checkpointed() -> Training:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
            self.blocks = nn.ModuleList(Block(32) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x.mean(1))

    model = Checkpointed()
    return Training(model, AdamW(model.parameters(), lr=1e-3), usual, rows(16))


@control("spectral norms, whose vectors turn in each forward")
def spectral() -> Training:
    model = perceptron(64, 48, 48, 10)
    for layer in (model[0], model[2]):
        parametrizations.spectral_norm(layer)
    return Training(model, Adam(model.parameters(), lr=3e-3), usual, flat(32))


@control("weights as lengths and directions")
def weight_norms() -> Training:
    model = perceptron(64, 48, 48, 10)
    for layer in (model[0], model[2]):
        parametrizations.weight_norm(layer)
    return Training(model, SGD(model.parameters(), lr=0.1), usual, flat(32))


@control("tied embeddings, in the optimizer once")
def tied() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        ids, after = batch
        return descend(optimizer, language_loss(model(ids), after))

    model = GPT(depth=2, tied=True)
    return Training(model, AdamW(model.parameters(), lr=2e-3), step, next_words(12))


@control("batch norms that average over all calls, and a count of samples")
def cumulative_norms() -> Training:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(64, 48), nn.BatchNorm1d(48, momentum=None), nn.ReLU(),
                nn.Linear(48, 32), nn.BatchNorm1d(32, affine=False), nn.ReLU(),
                nn.Linear(32, 10))  # fmt: skip
            self.register_buffer("seen", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen += len(x)
            return self.net(x)

    model = Counted()
    return Training(model, SGD(model.parameters(), lr=0.1), usual, flat(32))


def straight(x: Tensor, made: Tensor) -> Tensor:
    """Return the second, with the gradient of the first."""
    return x + (made - x).detach()


class Coarse(nn.Linear):
    """Rounds weights and inputs to four bits, with the gradient straight through."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("top", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.top.lerp_(x.detach().abs().max(), 0.1)
        step, grain = self.top / 7, self.weight.detach().abs().max() / 7
        x = straight(x, (x / step).round().clamp(-8, 7) * step)
        return F.linear(x, straight(self.weight, (self.weight / grain).round() * grain), self.bias)


@control("weights and activations rounded to four bits")
def rounded() -> Training:
    model = nn.Sequential(Coarse(64, 48), nn.ReLU(), Coarse(48, 32), nn.ReLU(), Coarse(32, 10))
    return Training(model, Adam(model.parameters(), lr=3e-3), usual, flat(32))


@control("signs of weights in the forward, the weights clipped to one after each step")
def binary_weights() -> Training:
    """BinaryConnect (Courbariaux et al. 2015)."""

    class Binary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, straight(self.weight, self.weight.sign()), self.bias)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        for layer in model:
            if isinstance(layer, Binary):
                layer.weight.data.clamp_(-1, 1)
        return loss

    model = nn.Sequential(
        Binary(64, 48), nn.BatchNorm1d(48), nn.Hardtanh(), Binary(48, 10), nn.BatchNorm1d(10)
    )
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(48))


class Spike(torch.autograd.Function):
    """A step function with the slope of a bump (Neftci et al. 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (1 + 5 * x.abs()) ** 2


@control("spikes with a surrogate slope")
def spikes() -> Training:
    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            current, v, total = self.into(x), 0.0, 0.0
            for _ in range(6):
                v = 0.8 * v + current
                spike = Spike.apply(v - 1)
                v = v - spike.detach()
                total = total + self.out(spike)
            return total / 6

    model = Spiking()
    return Training(model, Adam(model.parameters(), lr=3e-3), usual, flat(32))


@control("experts of which some get no sample of this batch")
def idle_experts() -> Training:
    model = MoE(experts=12)
    return Training(model, Adam(model.parameters(), lr=2e-3), usual, flat(16))


@control("two best experts, noise on the router, a loss that balances them")
def balanced_experts() -> Training:
    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.head = nn.Linear(64, 6, bias=False), nn.Linear(32, 10)
            self.experts = nn.ModuleList(perceptron(64, 32, 32) for _ in range(6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.router(x)
            if self.training:
                scores = scores + 0.1 * torch.randn_like(scores)
            shares = scores.softmax(-1)
            kept, chosen = shares.topk(2)
            gates = torch.zeros_like(shares).scatter(1, chosen, kept)
            made = torch.stack([expert(x) for expert in self.experts], 1)
            load = 6 * (shares.mean(0) * (gates > 0).float().mean(0)).sum()
            return self.head((gates[..., None] * made).sum(1)), load

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        output, load = model(x)
        return descend(optimizer, F.cross_entropy(output, y) + 0.01 * load)

    model = Balanced()
    return Training(model, AdamW(model.parameters(), lr=3e-3), step, flat(32))


@control("experts balanced by biases that no gradient moves")
def biased_experts() -> Training:
    """DeepSeek-V3: after each step a bias goes up or down by a constant."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.head = nn.Linear(64, 6), nn.Linear(32, 10)
            self.experts = nn.ModuleList(perceptron(64, 32, 32) for _ in range(6))
            self.register_buffer("bias", torch.zeros(6))
            self.register_buffer("load", torch.zeros(6), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.router(x).sigmoid()
            chosen = (scores + self.bias).topk(2).indices
            gates = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
            self.load.copy_((gates > 0).float().mean(0))
            made = torch.stack([expert(x) for expert in self.experts], 1)
            return self.head((gates[..., None] * made).sum(1))

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        model.bias.add_((model.load.mean() - model.load).sign(), alpha=1e-3)
        return loss

    model = Biased()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(32))


@control("weights drawn from a posterior in each forward")
def drawn_weights() -> Training:
    """Bayes by backprop (Blundell et al. 2015)."""

    class Drawn(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.mean, self.rho = normal(outputs, inputs, std=0.1), normal(outputs, inputs)
            self.rho.data -= 4

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.mean + F.softplus(self.rho) * torch.randn_like(self.mean))

        def divergence(self) -> Tensor:
            std = F.softplus(self.rho)
            return (0.5 * (std**2 + self.mean**2 - 1) - std.log()).sum()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        return descend(optimizer, loss + 1e-5 * (model[0].divergence() + model[2].divergence()))

    model = nn.Sequential(Drawn(64, 48), nn.ReLU(), Drawn(48, 10))
    return Training(model, Adam(model.parameters(), lr=3e-3), step, flat(32))


@control("fixed point found without a graph, one pass with one")
def fixed_point() -> Training:
    """A deep equilibrium with the cheapest of gradients (Fung et al. 2022)."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.cell, self.out = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
            nn.init.orthogonal_(self.cell.weight, 0.5)

        def forward(self, x: Tensor) -> Tensor:
            given, z = self.into(x), torch.zeros(len(x), 32)
            with torch.no_grad():
                for _ in range(12):
                    z = torch.tanh(given + self.cell(z))
            return self.out(torch.tanh(given + self.cell(z)))

    model = Equilibrium()
    return Training(model, Adam(model.parameters(), lr=3e-3), usual, flat(32))


@control("embeddings held below a norm by the forward")
def held_norms() -> Training:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(18, 24, max_norm=1.0), nn.Linear(24, 10)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.words(ids).mean(1))

    model = Held()
    return Training(model, Adam(model.parameters(), lr=1e-2), usual, words(32))


@control("feedback by fixed random matrices in place of the transposed weights")
def feedback_alignment() -> Training:
    """Lillicrap et al. 2016."""

    class Feedback(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, back: Tensor) -> Tensor:
            ctx.save_for_backward(x, back)
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            x, back = ctx.saved_tensors
            return gradient @ back, gradient.T @ x, gradient.sum(0), None

    class Aligned(nn.Linear):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.register_buffer("back", torch.randn_like(self.weight) * sizes[0] ** -0.5)

        def forward(self, x: Tensor) -> Tensor:
            return Feedback.apply(x, self.weight, self.bias, self.back)

    model = nn.Sequential(Aligned(64, 64), nn.Tanh(), Aligned(64, 32), nn.Tanh(), Aligned(32, 10))
    return Training(model, SGD(model.parameters(), lr=0.1, momentum=0.9), usual, flat(32))


@control("each layer trained by a loss of its own")
def local_losses() -> Training:
    """Forward-forward in its spirit: no gradient goes from layer to layer."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 48), nn.Linear(48, 48)])
            self.heads = nn.ModuleList([nn.Linear(48, 10), nn.Linear(48, 10)])

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        for layer, head, own in zip(model.layers, model.heads, optimizer, strict=True):
            x = F.relu(layer(x.detach()))
            loss = descend(own, F.cross_entropy(head(x), y))
        return loss

    model = Local()
    optimizers = tuple(
        Adam([*layer.parameters(), *head.parameters()], lr=3e-3)
        for layer, head in zip(model.layers, model.heads, strict=True)
    )
    return Training(model, optimizers, step, flat(32))


@control("weights made by another net from an embedding of the task")
def made_weights() -> Training:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tasks, self.maker = nn.Embedding(4, 8), nn.Linear(8, 64 * 10)

        def forward(self, x: Tensor, task: Tensor) -> Tensor:
            weight = self.maker(self.tasks(task)).view(-1, 10, 64)
            return (weight @ x[..., None])[..., 0]

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        output = model(batch["x"], batch["task"])
        return descend(optimizer, F.cross_entropy(output, batch["y"]))

    model, (x, y) = Hyper(), flat(32)
    batch = {"x": x, "y": y, "task": torch.randint(0, 2, (32,))}
    return Training(model, Adam(model.parameters(), lr=1e-2), step, batch)


@control("everything in double precision")
def doubles() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = (part.double() for part in batch)
        return descend(optimizer, F.smooth_l1_loss(model(x), y))

    model = MLP(10, 32, 1).double()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, patients(48))


@control("temperature that falls with each step, by a buffer")
def annealed() -> Training:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(64, 32), nn.Linear(32, 64)
            self.register_buffer("temperature", torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            codes = F.gumbel_softmax(self.encoder(x).view(-1, 4, 8), float(self.temperature))
            return self.decoder(codes.flatten(1))

    def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        loss = descend(optimizer, F.mse_loss(model(batch), batch))
        model.temperature.mul_(0.995).clamp_(min=0.5)
        return loss

    model = Annealed()
    return Training(model, Adam(model.parameters(), lr=1e-2), step, flat(48)[0])


@control("residual branches that begin at zero")
def zero_branches() -> Training:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = perceptron(32, 64, 32), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale * self.inner(x)

    model = nn.Sequential(nn.Linear(64, 32), *(Branch() for _ in range(4)), nn.Linear(32, 10))
    return Training(model, Adam(model.parameters(), lr=3e-3), usual, flat(32))


@control("head that begins at zero")
def zero_head() -> Training:
    model = conv_net(32).append(nn.Linear(32, 10))
    for parameter in model[-1].parameters():
        nn.init.zeros_(parameter)
    return Training(model, SGD(model.parameters(), lr=0.1, momentum=0.9), usual, images(32))


@control("rare class weighted nine times, the bias set to its rate")
def prior_bias() -> Training:
    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(
            model(x)[:, 0], (y == 3).float(), pos_weight=torch.tensor(9.0)
        )
        return descend(optimizer, loss)

    model = GRU()
    nn.init.constant_(model.head.bias, -math.log(9))
    return Training(model, Adam(model.parameters(), lr=3e-3), step, rows(48))


@control("quantiles by a tilted loss, several heads sorted")
def quantiles() -> Training:
    levels = torch.tensor([0.1, 0.5, 0.9])

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        gap = y - model(x).sort(1).values
        return descend(optimizer, torch.max(levels * gap, (levels - 1) * gap).mean())

    model = perceptron(10, 32, 3)
    return Training(model, Adam(model.parameters(), lr=5e-3), step, patients(48))


@control("samples of a survival study, of which most are censored")
def censored() -> Training:
    """Cox's partial likelihood: each event is compared with all that are still at risk."""

    def step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        order = batch["time"].argsort(descending=True)
        risk = model(batch["x"])[order, 0]
        event = batch["event"][order]
        loss = -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum()
        return descend(optimizer, loss)

    model, (x, y) = perceptron(30, 24, 1), tumours(48)
    time = torch.rand(48) * (1 + y[:, 0])
    batch = {"x": x, "time": time, "event": (torch.rand(48) < 0.3).float()}
    return Training(model, Adam(model.parameters(), lr=3e-3), step, batch)


@control("norms of their own for clean and for shifted samples")
def split_norms() -> Training:
    """Auxiliary batch norm (Xie et al. 2020): clean and shifted samples have norms of their own."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(64, 48), nn.Linear(48, 10)
            self.norms = nn.ModuleList([nn.BatchNorm1d(48), nn.BatchNorm1d(48)])

        def forward(self, x: Tensor, which: int) -> Tensor:
            return self.out(F.relu(self.norms[which](self.into(x))))

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x, 0), y)
        return descend(optimizer, loss + F.cross_entropy(model(x + 0.3 * x.sign(), 1), y))

    model = Split()
    return Training(model, SGD(model.parameters(), lr=0.05, momentum=0.9), step, flat(32))


@control("soft targets from the model itself in evaluation, then back to training")
def dropout_teacher() -> Training:
    """Targets come from the model itself without dropout, then it is set back to training."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        model.eval()
        with torch.no_grad():
            aim = model(x).softmax(1)
        model.train()
        output = model(x)
        loss = F.cross_entropy(output, y) + 0.3 * F.cross_entropy(output, aim)
        return descend(optimizer, loss)

    model = CNN()
    return Training(model, Adam(model.parameters(), lr=3e-3), step, images(32))
