"""Published designs that look like what people report: each is meant, and nothing is wrong."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import attend, follow, frozen, lookalikes_of, zeroed
from corpus.models.small import (
    citations,
    flat,
    images,
    itself,
    language_loss,
    next_words,
    noisy,
    patients,
    rows,
    views,
    words,
)

SHELF = Shelf("reported", "blind")
design = lookalikes_of(SHELF)


def pixels(n: int) -> tuple[Tensor, None]:
    return flat(n)[0], None


def mean(x: Tensor) -> Tensor:
    return x.mean()


def mlp(a: int, b: int, c: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Linear(b, c))


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = mlp(width, 2 * width, width)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(attend(q, k, v, **options))
        return x + self.mlp(self.norm2(x))


# ---- shared on purpose ---------------------------------------------------------------------------


@design("ALBERT: one block run again and again", rows)
class Albert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(8, 32), Block(), nn.Linear(32, 10)
        self.place = nn.Parameter(0.02 * torch.randn(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        for _ in range(4):
            x = self.block(x)
        return self.head(x.mean(1))


@design("deep equilibrium: a cell iterated to a fixed point, the last steps differentiated", flat)
class Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inject, self.cell, self.head = (
            nn.Linear(64, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        given = self.inject(x)
        z = torch.zeros_like(given)
        with torch.no_grad():
            for _ in range(6):
                z = torch.tanh(self.cell(z) + given)
        z = torch.tanh(self.cell(z) + given)
        return self.head(z)


@design("Siamese network", views, lambda out: F.cross_entropy(out, torch.arange(len(out))))
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(64, 48, 16)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (F.normalize(self.encoder(x), dim=1) for x in (a, b))
        return a @ b.T / 0.2


@design("neural ODE by Euler steps", flat)
class NeuralODE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.field, self.head = nn.Linear(64, 32), mlp(33, 32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for t in torch.linspace(0, 1, 5):
            x = x + 0.2 * self.field(torch.cat([x, t.expand(len(x), 1)], 1))
        return self.head(x)


@design("language model with tied embeddings", next_words, language_loss, 16)
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(18, 32), Block()
        self.head = nn.Linear(32, 18, bias=False)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.head.weight = self.embed.weight
        self.place = nn.Parameter(0.02 * torch.randn(32, 32))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        return self.head(self.block(x, is_causal=True))


# ---- gradients stopped on purpose ----------------------------------------------------------------


@design("SimSiam: the other view's projection is detached", views, mean)
class SimSiam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = mlp(64, 48, 16), mlp(16, 8, 16)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        za, zb = self.encoder(a), self.encoder(b)
        pa, pb = self.predictor(za), self.predictor(zb)
        near = F.cosine_similarity(pa, zb.detach()) + F.cosine_similarity(pb, za.detach())
        return -0.5 * near


@design("BYOL: target network that follows, frozen", views, mean)
class BYOL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = mlp(64, 48, 16), mlp(16, 8, 16)
        self.target = frozen(copy.deepcopy(self.online))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            follow(self.target, self.online)
            ta, tb = self.target(a), self.target(b)
        pa, pb = self.predictor(self.online(a)), self.predictor(self.online(b))
        return 2 - F.cosine_similarity(pa, tb) - F.cosine_similarity(pb, ta)


@design("VQ-VAE with straight-through gradients", pixels, mean)
class VQ(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 32, 8), mlp(8, 32, 64)
        self.codes = nn.Embedding(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(1)
        code = self.codes(nearest)
        again = self.decoder(z + (code - z).detach())
        commit = (z - code.detach()).pow(2) + (code - z.detach()).pow(2)
        return (again - x).pow(2).mean(1) + commit.mean(1)


@design("policy gradient with a baseline", pixels, lambda out: out)
class Reinforce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = mlp(64, 32, 10), mlp(64, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.distributions.Categorical(logits=self.policy(x))
        action = chosen.sample()
        reward = (action % 3 == 0).float()
        value = self.value(x)[:, 0]
        advantage = reward - value.detach()
        return (-chosen.log_prob(action) * advantage + (value - reward).pow(2)).mean()


@design("Q-learning against a target network", pixels, lambda out: out)
class DQN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.target = mlp(64, 32, 4), frozen(mlp(64, 32, 4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.q(x).gather(1, torch.randint(0, 4, (len(x), 1)))[:, 0]
        with torch.no_grad():
            wanted = 1.0 + 0.9 * self.target(x.roll(1, 0)).amax(1)
        return F.smooth_l1_loss(chosen, wanted)


@design("generator judged by a frozen discriminator", pixels, lambda s: F.softplus(-s).mean())
class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draw, self.judge = mlp(8, 32, 64), frozen(mlp(64, 32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.draw(torch.randn(len(x), 8)))


@design("distillation from a frozen teacher", pixels, lambda out: out)
class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(64, 24, 10), frozen(mlp(64, 48, 10)).eval()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = (self.teacher(x) / 4.0).softmax(1)
        return F.kl_div((self.student(x) / 4.0).log_softmax(1), wanted, reduction="batchmean") * 16


@design("linear probe on a frozen backbone", flat)
class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = frozen(mlp(64, 48, 32)), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


@design(
    "momentum contrast with a queue",
    views,
    lambda s: F.cross_entropy(s, s.new_zeros(len(s)).long()),
)
class MoCo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = mlp(64, 48, 16)
        self.key = frozen(copy.deepcopy(self.query))
        self.register_buffer("queue", F.normalize(torch.randn(128, 16), dim=1))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            k = F.normalize(self.key(b), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1)
        with torch.no_grad():
            self.queue = torch.cat([k, self.queue])[:128]
        return scores / 0.1


# ---- parts that rest -----------------------------------------------------------------------------


@design("mixture of experts, one a sample, some of them unused", flat, batch=12)
class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 12)
        self.experts = nn.ModuleList(nn.Linear(64, 32) for _ in range(12))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 32)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero()[:, 0]
            if len(at):
                out = out.index_add(0, at, expert(x[at]) * weight[at, None])
        return self.head(out.relu())


@design("stochastic depth: blocks left out by chance", flat)
class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.blocks = nn.ModuleList(mlp(32, 32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.3:
                x = x + block(x)
        return self.head(x)


@design("adapters of other languages rest", words)
class Languages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(18, 32)
        self.adapters = nn.ModuleDict({name: mlp(32, 8, 32) for name in ("de", "en", "fr")})
        self.head, self.language = nn.Linear(32, 10), "en"

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head((x + self.adapters[self.language](x)).mean(1))


@design("ReZero: gates that start at zero", flat)
class ReZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.blocks = nn.ModuleList(mlp(32, 48, 32) for _ in range(4))
        self.gates = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for gate, block in zip(self.gates, self.blocks, strict=True):
            x = x + gate * block(x)
        return self.head(x)


@design("LoRA: one factor starts at zero", flat)
class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = frozen(mlp(64, 32, 10))
        self.a = nn.Linear(64, 4, bias=False)
        self.b = zeroed(nn.Linear(4, 32, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.base[0](x) + self.b(self.a(x))
        return self.base[2](self.base[1](hidden))


@design("ControlNet: convolutions of zeros join a copy", images)
class ControlNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = frozen(nn.Conv2d(1, 12, 3, padding=1))
        self.copy = nn.Conv2d(1, 12, 3, padding=1)
        self.joins = zeroed(nn.Conv2d(12, 12, 1))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.base(x) + self.joins(self.copy(x).relu())
        return self.head(joined.relu().mean((2, 3)))


@design(
    "early exits, of which the loss takes the last in this stage",
    flat,
    lambda o, y: F.cross_entropy(o[-1], y),
)
class Exits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 32)])
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        seen = []
        for layer in self.layers:
            x = layer(x).relu()
            seen.append(x.mean(1))
        return (*seen, self.last(x))


# ---- samples that are to see each other ----------------------------------------------------------


@design(
    "two towers with negatives of the batch",
    views,
    lambda s: F.cross_entropy(s, torch.arange(len(s))),
)
class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(64, 32, 16), mlp(64, 32, 16)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(self.left(a), dim=1), F.normalize(self.right(b), dim=1)
        return a @ b.T * self.scale.exp()


@design("graph convolution over the whole batch", citations)
class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return edges @ self.second((edges @ self.first(nodes)).relu())


@design("batch normalisation in an MLP", flat)
def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


@design("minibatch standard deviation as a feature", images)
class Deviation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 12, 3, padding=1), nn.Linear(13, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        spread = x.std(0).mean().expand(len(x), 1)
        return self.head(torch.cat([x.mean((2, 3)), spread], 1))


# ---- order that is not to count ------------------------------------------------------------------


@design("deep sets", rows)
class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = mlp(8, 32, 32), mlp(32, 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x).sum(1))


@design("set transformer with learnt queries", rows)
class SetTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(8, 32), Block(), nn.Linear(32, 10)
        self.seed = nn.Parameter(0.1 * torch.randn(1, 32))
        self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.embed(x))
        q = self.seed.expand(len(x), 1, -1)
        return self.head(attend(q, self.k(x), self.v(x))[:, 0])


@design("bag of words", words)
class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(18, 32), nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


@design("attention pooling of a bag of instances", rows)
class MIL(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score, self.head = mlp(8, 32, 32), mlp(32, 16, 1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head((self.score(x).softmax(1) * x).sum(1))


# ---- other axes of a softmax ---------------------------------------------------------------------


@design("slot attention: softmax over slots, then a weighted mean", rows)
class Slots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.k, self.v = nn.Linear(8, 32), *(nn.Linear(32, 32) for _ in "qkv")
        self.slots, self.head = nn.Parameter(torch.randn(4, 32)), nn.Linear(32, 10)
        self.place = nn.Parameter(0.1 * torch.randn(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        slots = self.slots.expand(len(x), -1, -1)
        scores = self.q(slots) @ self.k(x).transpose(1, 2) / math.sqrt(32)
        share = scores.softmax(1) + 1e-8
        share = share / share.sum(-1, keepdim=True)
        return self.head((slots + share @ self.v(x)).mean(1))


@design("efficient attention: keys over steps, queries over features", rows)
class Efficient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.k, self.v = nn.Linear(8, 32), *(nn.Linear(32, 32) for _ in "qkv")
        self.head, self.place = nn.Linear(32, 10), nn.Parameter(0.1 * torch.randn(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        context = self.k(x).softmax(1).transpose(1, 2) @ self.v(x)
        return self.head((x + self.q(x).softmax(-1) @ context).mean(1))


@design("capsules: routing shares of each part over the wholes", rows)
class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.votes = nn.Linear(8, 10 * 16)

    def forward(self, x: Tensor) -> Tensor:
        votes = self.votes(x).view(len(x), 8, 10, 16)
        logits = votes.new_zeros(len(x), 8, 10)
        for _ in range(2):
            whole = (logits.softmax(2)[..., None] * votes).sum(1)
            whole = (
                whole * whole.norm(dim=-1, keepdim=True) / (1 + whole.pow(2).sum(-1, keepdim=True))
            )
            logits = logits + (votes * whole[:, None]).sum(-1)
        return whole.norm(dim=-1) * 5


@design("sigmoid gates in place of a softmax", rows)
class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.head = mlp(8, 32, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head((self.gate(x).sigmoid() * x).mean(1))


@design("pointer over a sequence of one key", flat)
class OneKey(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 32) for _ in "qkv")
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        one = x[:, None]
        q, k, v = self.q(one), self.k(one), self.v(one)
        return self.head(((q @ k.transpose(1, 2)).softmax(-1) @ v + q)[:, 0])


# ---- reshapes that are right ---------------------------------------------------------------------


@design("windows: a picture cut into squares and joined again", images)
class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(1, 32, 1), Block(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        x = self.stem(x).permute(0, 2, 3, 1).view(n, 2, 4, 2, 4, 32)
        x = self.block(x.transpose(2, 3).reshape(n * 4, 16, 32))
        x = x.view(n, 2, 2, 4, 4, 32).transpose(2, 3).reshape(n, 8, 8, 32)
        return self.head(x.mean((1, 2)))


@design("channel shuffle between groups", images)
class Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, padding=1)
        self.first, self.second = (nn.Conv2d(12, 12, 3, padding=1, groups=3) for _ in range(2))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x).relu()).relu()
        x = x.view(len(x), 3, 4, 8, 8).transpose(1, 2).reshape(len(x), 12, 8, 8)
        return self.head(self.second(x).relu().mean((2, 3)))


@design(
    "patches by reshape and permute, most of them masked",
    lambda n: (images(n)[0], None),
    lambda out: out,
)
class MAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.out = nn.Linear(4, 32), Block(), nn.Linear(32, 4)
        self.place = nn.Parameter(0.1 * torch.randn(16, 32))
        self.token = nn.Parameter(0.1 * torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        patches = x.view(n, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(n, 16, 4)
        order = torch.rand(n, 16).argsort(1)
        keep = order[:, :6, None]
        seen = (self.embed(patches) + self.place).gather(1, keep.expand(-1, -1, 32))
        full = (self.token + self.place).expand(n, -1, -1)
        full = full.scatter(1, keep.expand(-1, -1, 32), seen)
        hidden = torch.ones(n, 16).scatter(1, order[:, :6], 0.0)
        error = (self.out(self.block(full)) - patches).pow(2).mean(-1)
        return (error * hidden).sum() / hidden.sum()


@design("MLP mixer", rows)
class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tokens, self.channels = nn.Linear(8, 32), mlp(8, 16, 8), mlp(32, 48, 32)
        self.norm1, self.norm2, self.head = nn.LayerNorm(32), nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(1))


@design("axial attention: one axis folded into the batch", images)
class Axial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rows, self.columns = nn.Conv2d(1, 32, 1), Block(), Block()
        self.place, self.head = nn.Parameter(0.1 * torch.randn(8, 32)), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        x = self.stem(x).permute(0, 2, 3, 1) + self.place
        x = self.rows(x.reshape(n * 8, 8, 32)).view(n, 8, 8, 32).transpose(1, 2)
        x = self.columns(x.reshape(n * 8, 8, 32)).view(n, 8, 8, 32)
        return self.head(x.mean((1, 2)))


@design("steps stacked in pairs, as speech encoders do", rows)
class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn1, self.rnn2 = nn.GRU(8, 16, batch_first=True), nn.GRU(32, 24, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.rnn1(x)
        return self.head(self.rnn2(x.reshape(len(x), 4, 32))[0][:, -1])


@design("multi-query attention: one key and value for all heads", next_words, language_loss, 16)
class MultiQuery(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.kv = nn.Embedding(18, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.place, self.head = nn.Parameter(0.1 * torch.randn(32, 32)), nn.Linear(32, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (t[:, None].expand(-1, 4, -1, -1) for t in self.kv(x).chunk(2, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + mixed.transpose(1, 2).flatten(2))


@design("relative positions by the shift of Transformer-XL", next_words, language_loss, 16)
class RelativeShift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.k, self.v = (
            nn.Embedding(18, 32),
            *(nn.Linear(32, 32) for _ in "qkv"),
        )
        self.distance, self.head = nn.Parameter(0.1 * torch.randn(32, 32)), nn.Linear(32, 18)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        n, steps, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        far = q @ self.distance[:steps].flip(0).T
        padded = torch.cat([far.new_zeros(n, steps, 1), far], -1)
        shifted = padded.view(n, steps + 1, steps)[:, 1:]
        scores = (q @ k.transpose(1, 2) + shifted) / math.sqrt(32)
        later = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        return self.head(x + scores.masked_fill(later, -math.inf).softmax(-1) @ v)


# ---- time ----------------------------------------------------------------------------------------


@design("causal convolutions", next_words, language_loss, 16)
class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(18, 32), nn.Linear(32, 18)
        self.layers = nn.ModuleList(nn.Conv1d(32, 32, 2, dilation=2**i) for i in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        for i, layer in enumerate(self.layers):
            x = x + layer(F.pad(x, (2**i, 0))).relu()
        return self.head(x.transpose(1, 2))


@design("tagger that reads both ways", next_words, language_loss, 16)
class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(18, 32), nn.GRU(32, 16, batch_first=True)
        self.head = nn.Linear(16, 18)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


def hidden_words(n: int) -> tuple[Tensor, Tensor]:
    """Return ids of which some are hidden, and what stood there, -100 elsewhere."""
    ids, _ = words(n)
    hidden = torch.rand(ids.shape) < 0.3
    return ids.masked_fill(hidden, 0), ids.masked_fill(~hidden, -100)


@design("masked language model", hidden_words, language_loss, 16)
class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(18, 32), Block(), nn.Linear(32, 18)
        self.place = nn.Parameter(0.1 * torch.randn(32, 32))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids) + self.place))


@design(
    "autoencoder of words, whose target is its input",
    lambda n: (words(n)[0],) * 2,
    language_loss,
    16,
)
class WordCoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(18, 16), mlp(512, 48, 24)
        self.decoder = mlp(24, 48, 32 * 18)

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.encoder(self.embed(ids).flatten(1))).view(len(ids), 32, 18)


@design("recurrent network with time first", rows)
class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.transpose(0, 1))[0][-1])


# ---- losses --------------------------------------------------------------------------------------


@design(
    "binary focal loss by hand",
    lambda n: tuple(t.flatten(1) for t in noisy(n)),
    lambda out, y: (
        (1 - out.sigmoid() * y - (1 - out.sigmoid()) * (1 - y)).pow(2)
        * F.binary_cross_entropy_with_logits(out, y, reduction="none")
    ).mean(),
)
def focal() -> nn.Module:
    return mlp(64, 32, 64)


def dice(out: Tensor, target: Tensor) -> Tensor:
    chance = out.sigmoid().flatten(1)
    target = target.flatten(1)
    joint = (chance * target).sum(1)
    return (1 - (2 * joint + 1) / (chance.sum(1) + target.sum(1) + 1)).mean()


@design("Dice loss", noisy, dice)
def segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 3, padding=1))


@design("log-softmax with nll_loss", flat, F.nll_loss)
def log_probabilities() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), nn.LogSoftmax(1))


@design(
    "probabilities with the logarithm of the loss's own",
    flat,
    lambda p, y: F.nll_loss((p + 1e-8).log(), y),
)
def probabilities() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), nn.Softmax(1))


@design("triplets with a margin", views, mean)
class Triplets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(64, 32, 16)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.encoder(a), self.encoder(b)
        return F.triplet_margin_loss(a, b, b.roll(1, 0), margin=1.0, reduction="none")


@design(
    "mixture density network",
    patients,
    lambda out, y: (
        -torch.logsumexp(
            out[0].log_softmax(1) - 0.5 * ((y - out[1]) / out[2].exp()).pow(2) - out[2], 1
        ).mean()
    ),
)
class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(10, 32), nn.Linear(32, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.head(self.trunk(x).tanh()).chunk(3, 1)


@design("variational autoencoder", itself, lambda out, x: F.mse_loss(out[0], x) + 0.1 * out[1])
class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 32, 16), mlp(8, 32, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mu, logvar = self.encoder(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(z), 0.5 * (mu.pow(2) + logvar.exp() - 1 - logvar).sum(1).mean()


@design("affine coupling flow", pixels, lambda out: (0.5 * out[0].pow(2).sum(1) - out[1]).mean())
class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(32, 48, 64) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        total = x.new_zeros(len(x))
        for net in self.nets:
            scale, shift = net(a).chunk(2, 1)
            scale = scale.tanh()
            a, b = b * scale.exp() + shift, a
            total = total + scale.sum(1)
        return torch.cat([a, b], 1), total


@design("denoising diffusion with an embedding of time", pixels, lambda out: out)
class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = nn.Embedding(50, 32), mlp(96, 64, 64)
        self.register_buffer("alpha", torch.linspace(0.99, 0.02, 50))

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 50, (len(x),))
        noise, alpha = torch.randn_like(x), self.alpha[t, None]
        given = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([given, self.time(t)], 1)), noise)


@design(
    "tasks weighed by learnt uncertainties",
    flat,
    lambda out, y: (
        out[2][0].neg().exp() * F.cross_entropy(out[0], y)
        + out[2][1].neg().exp() * F.mse_loss(out[1][:, 0], y / 10.0)
        + out[2].sum()
    ),
)
class Uncertain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.label, self.size = nn.Linear(64, 32), nn.Linear(32, 10), nn.Linear(32, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.trunk(x).relu()
        return self.label(x), self.size(x), self.log_variances


@design(
    "CTC, which takes time first",
    rows,
    lambda out, y: F.ctc_loss(
        out, y[:, None] + 1, torch.full((len(y),), 8), torch.ones(len(y), dtype=torch.long)
    ),
)
class CTC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 24, batch_first=True), nn.Linear(24, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)


# ---- weights made, gated, normed -----------------------------------------------------------------


@design("hypernetwork that makes the weights of a layer", flat)
class Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(8)), nn.Linear(8, 64 * 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.make(self.code).view(16, 64) / 8
        return self.head(F.linear(x, weight).relu())


@design("weights under weight and spectral norm", flat)
def normed() -> nn.Module:
    weight_norm, spectral = (
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
    )
    return nn.Sequential(weight_norm(nn.Linear(64, 32)), nn.ReLU(), spectral(nn.Linear(32, 10)))


@design("squeeze and excitation", images)
class Excitation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.squeeze, self.head = (
            nn.Conv2d(1, 16, 3, padding=1),
            mlp(16, 4, 16),
            nn.Linear(16, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        gate = self.squeeze(x.mean((2, 3))).sigmoid()
        return self.head((x * gate[..., None, None]).mean((2, 3)))


@design("dense connections", images)
class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(1 + 6 * i, 6, 3, padding=1) for i in range(4))
        self.head = nn.Linear(25, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x).relu()], 1)
        return self.head(x.mean((2, 3)))


@design("random features that are not to learn", flat)
class RandomFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("omega", torch.randn(64, 48) / 8)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x @ self.omega).cos())


@design("binary weights with a gradient of their own", flat)
class BinaryNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        signs = weight + (weight.sign() - weight).detach()
        return self.head(F.linear(x, signs / 8, self.first.bias).relu())
