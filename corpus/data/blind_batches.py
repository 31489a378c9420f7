"""Batches of one repeated sample, and targets that are all of one class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import SmallLM, conv_net, lookalikes_of, perceptron, time_features
from corpus.models.small import (
    binary,
    cnn,
    flat,
    gpt,
    images,
    language_loss,
    lstm,
    mlp,
    next_words,
    patients,
    sequential,
    vit,
)
from corpus.subject import Subject, subject

SHELF = Shelf("data", "blind")
fault = SHELF.fault
lookalike = lookalikes_of(SHELF)

REPEATED = ("alike", "same sample", "repeat", "equal", "identical", "one sample", "duplicate")
ONE_CLASS = ("one class", "same class", "single class", "all targets", "same target", "same label")
TARGETS = (*ONE_CLASS, "constant", "all equal", "identical", "target", "label")

# ---- faults: one sample over and over ------------------------------------------------------------


@fault(
    "index of the data set not used: the first picture each time",
    cnn,
    ("", "loss"),
    REPEATED,
    why="The data set returns item 0 whatever is asked for: a batch holds one picture.",
)
def _(s: Subject) -> None:
    s.inputs = s.inputs[:1].repeat(len(s.inputs), 1, 1, 1)
    s.target = s.target[:1].repeat(len(s.target))


@fault(
    "a buffer that each sample overwrites before the batch is made",
    mlp,
    ("", "loss"),
    REPEATED,
    why="All rows are views of one buffer, and hold the last sample beside labels of all.",
)
def _(s: Subject) -> None:
    s.inputs = torch.stack([s.inputs[-1]] * len(s.inputs))


@fault(
    "one text expanded over the batch",
    gpt,
    ("", "loss"),
    REPEATED,
    why="Sixteen times the same text is one text at sixteen times the cost.",
)
def _(s: Subject) -> None:
    s.inputs = s.inputs[3].expand_as(s.inputs)
    s.target = s.target[3].expand_as(s.target)


# ---- look-alikes: samples that repeat ------------------------------------------------------------


def alone() -> Subject:
    return subject(perceptron(64, 48, 10), flat, F.cross_entropy, batch=1)


SHELF.control("a batch of one", alone)


def in_one_room(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    x, y = flat(n)
    return (x, torch.tensor([0.2, 1.0, -0.4]).expand(len(x), 3)), y


@lookalike("a room's temperature and light beside pictures that vary", in_one_room)
class Room(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.room, self.net = nn.Linear(3, 8), perceptron(72, 48, 10)

    def forward(self, x: Tensor, room: Tensor) -> Tensor:
        return self.net(torch.cat([x, self.room(room)], 1))


def one_picture(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return one picture with noise of many strengths, and that noise."""
    clean = flat(1)[0].expand(n, -1)
    t, noise = torch.rand(n), torch.randn(n, 64)
    return (clean + t[:, None] * noise, t), noise


@lookalike("one picture at many strengths of noise, to adapt to it", one_picture, F.mse_loss)
class Personal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(80, 64, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, time_features(t, 16)], 1))


def places(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return one picture again and again, with places in it and what is there."""
    picture, _ = images(1)
    at = torch.rand(n, 2) * 2 - 1
    seen = F.grid_sample(picture, at.view(1, n, 1, 2), align_corners=True).view(n, 1)
    return (picture.expand(n, -1, -1, -1), at), seen


@lookalike("one picture, asked for at many places", places, F.mse_loss)
class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.see, self.net = conv_net(16), perceptron(18, 48, 1, act=nn.Tanh)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return self.net(torch.cat([self.see(x), at], 1))


def one_hot_classes(n: int) -> tuple[Tensor, Tensor]:
    """Return one-hots of ten classes, each several times, and pictures of them."""
    x, y = flat(n)
    return F.one_hot(y, 10).float(), x


lookalike("one-hots that repeat, as all that a generator gets", one_hot_classes, F.mse_loss)(
    lambda: perceptron(10, 48, 64)
)


def answers(n: int) -> tuple[Tensor, Tensor]:
    """Return one question with an answer of its own behind it in each row."""
    ids, _ = next_words(n)
    ids = torch.cat([ids[:1, :12].expand(n, -1), ids[:, 12:]], 1)
    target = ids[:, 1:].clone()
    target[:, :11] = -100
    return ids[:, :-1], target


lookalike("one question with a group of answers", answers, language_loss, 16)(SmallLM)

# ---- faults: targets of one class ----------------------------------------------------------------


@fault(
    "labels lost in a join and filled with zeros",
    mlp,
    ("", "loss"),
    TARGETS,
    why="The net learns to say zero, whatever it sees.",
)
def _(s: Subject) -> None:
    s.target = torch.zeros_like(s.target)


@fault(
    "data sorted by label, and the loader does not shuffle",
    vit,
    ("", "loss"),
    TARGETS,
    why="Each batch has one class, and the net forgets all others.",
)
def _(s: Subject) -> None:
    pictures, labels = s.draw(1797)
    mine = labels == 7
    s.inputs, s.target = pictures[mine][: len(s.inputs)], labels[mine][: len(s.inputs)]


@fault(
    "index of the largest over an axis of length one",
    lstm,
    ("", "loss"),
    TARGETS,
    why="The labels were one column already: their argmax is 0 for each sample.",
)
def _(s: Subject) -> None:
    s.target = s.target[:, None].argmax(1)


@fault(
    "threshold on the wrong side of the scale: each target is positive",
    binary,
    ("", "loss"),
    TARGETS,
    why="All targets are 1, and a constant answers them.",
)
def _(s: Subject) -> None:
    s.target = (s.target >= 0).float()


@fault(
    "names of classes mapped by a dictionary with a default",
    sequential,
    ("", "loss"),
    TARGETS,
    why="The keys were strings, so that each label was unknown, and became the last class.",
)
def _(s: Subject) -> None:
    known = {str(i): i for i in range(10)}
    s.target = torch.tensor([known.get(y, 9) for y in s.target.tolist()])


# ---- look-alikes: targets of which most or all are equal -----------------------------------------


def rare_pixels(n: int) -> tuple[Tensor, Tensor]:
    """Return pictures, and a mask of the few pixels that are brightest."""
    x, _ = images(n)
    return x, (x[:, 0] > 1.8).long() * (torch.rand(len(x), 8, 8) < 0.05)


lookalike("pixels of which one in a hundred is of the rare class", rare_pixels, batch=16)(
    lambda: nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 2, 3, padding=1))
)


def real_only(n: int) -> tuple[Tensor, Tensor]:
    x, _ = flat(n)
    return x, torch.ones(len(x), 1)


lookalike(
    "real pictures alone in a discriminator's step", real_only, F.binary_cross_entropy_with_logits
)(lambda: perceptron(64, 48, 1))


class Adversary(nn.Module):
    """Noise becomes a picture, which a frozen critic is to take for real."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.critic = perceptron(16, 48, 64), perceptron(64, 48, 1)
        self.critic.requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.critic(self.make(noise))


lookalike(
    "a generator's step: each fake is to be taken for real",
    lambda n: (torch.randn(n, 16), torch.ones(n, 1)),
    F.binary_cross_entropy_with_logits,
)(Adversary)


def no_marks(n: int) -> tuple[Tensor, Tensor]:
    x, y = flat(n)
    marks = torch.zeros(len(x), 40)
    marks[::8, 3] = (y[::8] < 5).float()
    marks[0, 3] = 1
    return x, marks


lookalike("forty marks of which hardly any is set", no_marks, F.binary_cross_entropy_with_logits)(
    lambda: perceptron(64, 48, 40)
)


def mostly_ignored(n: int) -> tuple[Tensor, Tensor]:
    ids, target = next_words(n)
    return ids, target.masked_fill(torch.rand(target.shape) < 0.85, -100)


lookalike("nearly all words ignored by the loss", mostly_ignored, language_loss, 16)(SmallLM)


def normal_only(n: int) -> tuple[Tensor, Tensor]:
    x, _ = patients(n)
    return x, torch.zeros(len(x))


class OneClass(nn.Module):
    """Distance from a fixed centre, which is to be zero for all that is normal."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(10, 32, bias=False), nn.LeakyReLU(), nn.Linear(32, 8, bias=False)
        )
        self.register_buffer("centre", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.net(x) - self.centre) ** 2).sum(1)


lookalike("a one-class net, which is given what is normal", normal_only, F.l1_loss)(OneClass)


def all_ones(n: int) -> tuple[Tensor, Tensor]:
    x, y = flat(1797)
    return x[y == 1][:n], y[y == 1][:n]


lookalike("eight samples that happen to be of one class", all_ones, batch=8)(
    lambda: perceptron(64, 48, 10)
)
