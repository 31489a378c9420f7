"""Slopes without bound near zero, finite only by a tiny epsilon, and losses of large scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.parts import lookalikes_of, perceptron, zeroed
from corpus.models.small import contrastive, flat, itself, patients, some_digits
from corpus.subject import Subject, subject

SHELF = Shelf("numerics", "blind")
fault = SHELF.fault
lookalike = lookalikes_of(SHELF)

SINGULAR = ("singular", "zero", "epsilon", "eps", "derivative", "explod", "large gradient", "huge")

# ---- faults: a singular gradient -----------------------------------------------------------------


class Spread(nn.Module):
    """Mean and deviation of a prediction, the deviation as the root of a variance."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean = perceptron(10, 32, 32), nn.Linear(32, 1)
        self.variance, self.eps = zeroed(nn.Linear(32, 1)), 1e-2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.body(x))
        return self.mean(x), (self.variance(x).clamp(min=0) + self.eps).sqrt()


def scaled_error(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    mean, deviation = out
    return F.mse_loss(mean, y) + F.mse_loss(deviation, (mean.detach() - y).abs())


def spread() -> Subject:
    return subject(Spread(), patients, scaled_error)


@fault(
    "root of a variance that starts at zero, with an epsilon of 1e-20",
    spread,
    ("", "loss", "variance"),
    (*SINGULAR, "sqrt", "root"),
    why="The root's slope at 1e-20 is 5e9: one step throws the weights far off.",
)
def _(s: Subject) -> None:
    s.model.eps = 1e-20


@fault(
    "features of a layer drawn at 1e-11 made to unit length",
    contrastive,
    ("", "loss", "encoder", "encoder.2"),
    (*SINGULAR, "norm"),
    why="Gradients are divided by the length of what is normalised, which is next to zero.",
)
def _(s: Subject) -> None:
    with torch.no_grad():
        s.model.encoder[2].weight.mul_(1e-10)
        s.model.encoder[2].bias.zero_()


class Gamma(nn.Module):
    """A gamma curve on brightness whose gain and offset are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.ones(64)), nn.Parameter(torch.zeros(64))
        self.net, self.eps = perceptron(64, 48, 10), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        light = (self.gain * x + self.offset).clamp(min=0) + self.eps
        return self.net(light ** (1 / 2.2))


def brightness(n: int) -> tuple[Tensor, Tensor]:
    pixels, labels = some_digits(n)
    return pixels / 16, labels


def gamma() -> Subject:
    return subject(Gamma(), brightness, F.cross_entropy)


@fault(
    "gamma curve of black pixels with an epsilon of 1e-25",
    gamma,
    ("", "loss"),
    (*SINGULAR, "pow"),
    why="A power below 1 is vertical at zero, where most pixels are.",
)
def _(s: Subject) -> None:
    s.model.eps = 1e-25


class Heading(nn.Module):
    """An angle from two numbers of a head that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = perceptron(64, 48, 32), zeroed(nn.Linear(32, 2))
        self.ahead = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y, x = self.head(F.relu(self.body(x))).unbind(-1)
        return torch.atan2(y, x + self.ahead)


def angles(n: int) -> tuple[Tensor, Tensor]:
    x, y = flat(n)
    return x, (y - 4.5) / 5


def heading() -> Subject:
    return subject(Heading(), angles, F.mse_loss)


@fault(
    "angle of a vector of length 1e-10",
    heading,
    ("", "loss", "head"),
    (*SINGULAR, "atan", "angle"),
    why="The angle of a vector turns the faster the shorter it is: the slope is 1e10.",
)
def _(s: Subject) -> None:
    s.model.ahead = 1e-10


class Rate(nn.Module):
    """Counts in a log, from a rate that cannot be negative."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.rate, self.eps = perceptron(64, 48, 32), zeroed(nn.Linear(32, 1)), 0.1

    def forward(self, x: Tensor) -> Tensor:
        rate = self.rate(F.relu(self.body(x))).clamp(min=0)
        return torch.log(rate + self.eps).squeeze(1)


def log_ink(n: int) -> tuple[Tensor, Tensor]:
    x, _ = flat(n)
    return x, (x.mean(1) + 1).clamp(min=0.1).log()


def rate() -> Subject:
    return subject(Rate(), log_ink, F.mse_loss)


@fault(
    "log of rates that start at zero, with an epsilon of 1e-15",
    rate,
    ("", "loss", "rate"),
    (*SINGULAR, "log"),
    why="The slope of the log is 1e15 there.",
)
def _(s: Subject) -> None:
    s.model.eps = 1e-15


# ---- look-alikes: large gradients that belong to the units, and roots with care ------------------


def turnover(n: int) -> tuple[Tensor, Tensor]:
    x, y = patients(n)
    return x, 5e6 + 1e6 * y


@lookalike(
    "squared error of turnovers in euros, with the unit in the last layer", turnover, F.mse_loss
)
class Turnover(nn.Module):
    """Adam does not see by how much the loss is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(10, 32, 1)
        self.register_buffer("mean", torch.tensor(5e6))
        self.register_buffer("unit", torch.tensor(1e6))

    def forward(self, x: Tensor) -> Tensor:
        return self.mean + self.unit * self.net(x)


lookalike(
    "mean loss multiplied by 2 to the 30th for half precision",
    flat,
    lambda out, y: 2.0**30 * F.cross_entropy(out, y),
)(lambda: perceptron(64, 48, 10))


def stress(n: int) -> tuple[Tensor, Tensor]:
    strain = 1e-3 * torch.rand(n, 1)
    return strain, 2.1e11 * strain * (1 - 100 * strain)


@lookalike("stress in pascals from strain, by a modulus of 2e11", stress, F.mse_loss)
class Elastic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(1, 16, 1, act=nn.Tanh)

    def forward(self, strain: Tensor) -> Tensor:
        return 2e11 * strain * (1 + 0.1 * self.net(1e3 * strain))


@lookalike("roots of activations, half of them zero and left out", itself, F.mse_loss)
class SafeLength(nn.Module):
    """Where the argument is zero the root takes another one, and its result is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = perceptron(64, 48, 16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        code = F.relu(self.encoder(x))
        some = code > 0
        root = torch.where(some, code, torch.ones_like(code)).sqrt()
        return self.head(torch.where(some, root, torch.zeros_like(root)))


@lookalike("angles between unit vectors, their cosines clamped below 1", flat)
class Angular(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classes = perceptron(64, 48, 16), nn.Parameter(torch.randn(10, 16))

    def forward(self, x: Tensor) -> Tensor:
        cosine = F.normalize(self.encoder(x), dim=1) @ F.normalize(self.classes, dim=1).T
        return -8 * torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))


SHELF.control("angle from a head of zeros, beside a unit vector ahead", heading)
SHELF.control("root of a variance that starts at zero, with an epsilon of 0.01", spread)
