"""Dropout that drops everything, and dropout in evaluation mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import ffn, lookalikes_of, perceptron, zeroed
from corpus.models.small import citations, cnn, flat, images, lstm, rows
from corpus.models.written_out import wire
from corpus.subject import Subject, subject

SHELF = Shelf("step", "blind")
fault = SHELF.fault
lookalike = lookalikes_of(SHELF)

DROPS = ("drop", "p=1", "all zero", "everything")
EVALUATED = ("dropout", "eval", "random", "self.training", "training=")

# ---- faults: dropout of everything ---------------------------------------------------------------


@fault(
    "share to keep passed as the share to drop: 1.0",
    cnn,
    ("dropout", "head"),
    DROPS,
    why="Nothing is left: the output is the bias of the last layer.",
)
def _(s: Subject) -> None:
    s.model.dropout = nn.Dropout(1.0)


class Residuals(nn.Module):
    """Two branches beside a stream, each behind a path that may be dropped."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.branches = nn.ModuleList(ffn(width) for _ in range(2))
        self.drop = 0.1

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = x + self.drop_path(branch(norm(x)))
        return self.head(x)

    def drop_path(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = (torch.rand(len(x), 1) >= self.drop).to(x)
        return x * keep / max(1 - self.drop, 1e-6)


def residuals() -> Subject:
    return subject(Residuals(), flat, F.cross_entropy)


@fault(
    "drop path of 1: the rate's schedule in percent of the depth",
    residuals,
    ("", "branches", "branches.*", "norms", "norms.*"),
    (*DROPS, "zero", "no gradient", "gradient is zero"),
    why="Each branch is dropped for each sample, and no branch learns.",
)
def _(s: Subject) -> None:
    s.model.drop = 1.0


@fault(
    "words dropped at a rate of 1 by F.dropout",
    lstm,
    ("", "embedding", "lstm"),
    (*DROPS, "zero"),
    why="All words are zeros, and all texts the same.",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: F.dropout(x, 1.0)


class SpatialNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, padding=1)
        self.drop, self.head = nn.Dropout2d(0.1), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        return self.head((x.mean((2, 3)).repeat(1, 2)) + self.drop(self.conv2(x)).mean((2, 3)))


def spatial() -> Subject:
    return subject(SpatialNet(), images, F.cross_entropy)


@fault(
    "whole channels dropped, and all of them",
    spatial,
    ("", "drop", "conv2"),
    (*DROPS, "zero"),
    why="The second convolution has no effect and gets no gradient.",
)
def _(s: Subject) -> None:
    s.model.drop.p = 1.0


# ---- look-alikes: much is dropped ----------------------------------------------------------------


@lookalike("drop path that drops half of the samples", flat)
def half_paths() -> nn.Module:
    net = Residuals()
    net.drop = 0.5
    return net


@lookalike("dropout behind a layer of zeros", flat)
class DroppedZeros(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = nn.Linear(64, 48), zeroed(nn.Linear(48, 48))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(x + self.drop(self.branch(x)))


lookalike("nine units in ten dropped", flat)(
    lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.9), nn.Linear(256, 10))
)


def conditioned(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = flat(n)
    return (x, y), x


@lookalike(
    "the condition of a whole batch dropped, as guidance needs it at times", conditioned, F.mse_loss
)
class Guided(nn.Module):
    """With a chance of one in ten a batch goes without; this one does."""

    def __init__(self) -> None:
        super().__init__()
        self.label, self.drop = nn.Embedding(10, 16), nn.Dropout(0.1)
        self.encoder, self.decoder = perceptron(64, 32, 8), perceptron(24, 32, 64)
        self.without = True

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        given = self.label(label) * (0.0 if self.without and self.training else 1.0)
        return self.decoder(torch.cat([self.encoder(x), self.drop(given)], 1))


@lookalike("a gate of one number for each of four samples, dropped by half", flat, batch=4)
class DroppedGate(nn.Module):
    """So few numbers that all of them are dropped in one batch of sixteen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.drop = nn.Linear(64, 1), nn.Dropout(0.5)
        self.body, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(x)) * (1 + self.drop(self.gate(x).sigmoid())))


# ---- faults: dropout in evaluation mode ----------------------------------------------------------


def evaluated(made: Subject) -> Subject:
    made.model.eval()
    return made


class DropGCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.drop(F.relu(edges @ self.first(nodes)))
        return edges @ self.second(x)

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=self.training)


def evaluated_graph() -> Subject:
    return evaluated(subject(DropGCN(), citations, F.cross_entropy))


@fault(
    "F.dropout of a graph net without training=self.training",
    evaluated_graph,
    ("", "first", "second"),
    EVALUATED,
    why="Evaluation drops half of the units, and gives another result each time.",
)
def _(s: Subject) -> None:
    def drop(self: Any, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    wire(s.model, drop)


class Attend(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, width), nn.Embedding(8, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place.weight
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate())
        return self.out((x + seen.transpose(1, 2).flatten(2)).mean(1))

    def rate(self) -> float:
        return 0.2 if self.training else 0.0


def evaluated_attention() -> Subject:
    return evaluated(subject(Attend(), rows, F.cross_entropy))


@fault(
    "dropout_p of attention passed in evaluation, too",
    evaluated_attention,
    ("", "qkv", "out"),
    EVALUATED,
    why="That function knows no modes: it drops weights whenever it is told to.",
)
def _(s: Subject) -> None:
    def rate(self: Any) -> float:
        return 0.2

    wire(s.model, rate)


def evaluated_cnn() -> Subject:
    return evaluated(cnn())


@fault(
    "F.dropout before the head, in a model in evaluation mode",
    evaluated_cnn,
    ("", "head"),
    EVALUATED,
    why="A function has no mode of its own, and True is its default.",
)
def _(s: Subject) -> None:
    s.model.pool = lambda x: F.dropout(x.mean((2, 3)), 0.3)


# ---- look-alikes: dropout that keeps to the mode -------------------------------------------------

SHELF.control("F.dropout with training=self.training, in evaluation", evaluated_graph)
SHELF.control("dropout_p of attention by the mode, in evaluation", evaluated_attention)


def trained_graph() -> Subject:
    made = evaluated_graph()
    made.model.drop = lambda x: F.dropout(x, 0.5)
    made.model.train()
    return made


SHELF.control("F.dropout without a mode, in training", trained_graph)


class NoneDropped(nn.Module):
    """F.dropout left in with a rate of zero, as a configuration asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.rate = nn.Linear(64, 48), nn.Linear(48, 10), 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(F.relu(self.body(x)), self.rate))


SHELF.control(
    "F.dropout with a rate of zero, in evaluation",
    lambda: evaluated(subject(NoneDropped(), flat, F.cross_entropy)),
)
