"""Backwards written by hand, and parameters whose effect autograd does not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from corpus.cards import Shelf
from corpus.models.parts import (
    conv_net,
    frozen,
    lookalikes_of,
    normal,
    perceptron,
    tokens,
    unlabelled_flat,
)
from corpus.models.small import (
    flat,
    images,
    itself,
    language_loss,
    matching,
    next_words,
    patients,
    tumours,
    views,
    words,
)
from corpus.models.written_out import wire
from corpus.subject import Subject, subject

SHELF = Shelf("gradient", "blind")
fault, lookalike = SHELF.fault, lookalikes_of(SHELF)

SAID = ("backward", "slope", "finite", "numeric")
UNSEEN = (
    "no gradient",
    "not reach",
    "detach",
    "cut",
    "autograd",
    "slope",
    "without gradient",
    "leaf",
)
binary = F.binary_cross_entropy_with_logits

Function = torch.autograd.Function


class Own(nn.Module):
    """A layer that calls a function with a backward of its own."""

    def __init__(self, function: type[Function], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for i, start in enumerate(parameters):
            self.register_parameter(f"p{i}", nn.Parameter(start))

    def forward(self, *x: Tensor) -> Tensor:
        return self.function.apply(*x, *self.parameters())


def with_backward(function: type[Function], backward: Callable[..., Any]) -> type[Function]:
    """Return the function with another backward."""
    return type(function.__name__, (function,), {"backward": staticmethod(backward)})


# ---- activations ---------------------------------------------------------------------------------


class Swish(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * (s + x * s * (1 - s))


class SwishNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(64, 48), Own(Swish), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


def swish() -> Subject:
    return subject(SwishNet(), flat, F.cross_entropy, 32)


SHELF.control("swish that saves its input, right", swish)


@fault(
    "swish without the term of the product rule",
    swish,
    ("act",),
    (*SAID, "swish"),
    why="The sigmoid, too, depends on the input, and the backward leaves that out.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.sigmoid()

    s.model.act.function = with_backward(Swish, backward)


@fault(
    "swish with a sign wrong in its second term",
    swish,
    ("act",),
    (*SAID, "swish"),
    why="A minus for a plus: the gradient of half of the inputs points down the wrong way.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s_ = x.sigmoid()
        return g * (s_ - x * s_ * (1 - s_))

    s.model.act.function = with_backward(Swish, backward)


class Leak(Function):
    """A leaky ReLU whose slope is given, and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return torch.where(x > 0, x, slope * x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, g, ctx.slope * g), None


class LeakNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 12, 3, 2, 1), nn.Linear(12 * 16, 10)
        self.function = Leak

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.function.apply(self.conv(x), 0.2).flatten(1))


def leaky() -> Subject:
    return subject(LeakNet(), images, F.cross_entropy, 16)


SHELF.control("leaky unit with a number among its arguments, right", leaky)


@fault(
    "leaky unit whose backward takes the other side",
    leaky,
    ("", "conv", "fc"),
    (*SAID, "leak"),
    why="Active units get the small slope, and inactive ones all of the gradient.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return torch.where(x <= 0, g, ctx.slope * g), None

    s.model.function = with_backward(Leak, backward)


class Erf(Function):
    """The exact GELU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        bell = torch.exp(-x.square() / 2) / (2 * torch.pi) ** 0.5
        return g * (0.5 * (1 + torch.erf(x / 2**0.5)) + x * bell)


class GeluNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gelu, self.down = nn.Linear(30, 64), Own(Erf), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gelu(self.up(x)))


def gelu() -> Subject:
    return subject(GeluNet(), tumours, binary, 32)


SHELF.control("exact GELU, right", gelu)


@fault(
    "GELU whose backward leaves the root of two pi at two",
    gelu,
    ("gelu",),
    (*SAID, "gelu", "erf"),
    why="The bell curve is a fifth too high, and with it the gradient.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        bell = torch.exp(-x.square() / 2) / 2
        return g * (0.5 * (1 + torch.erf(x / 2**0.5)) + x * bell)

    s.model.gelu.function = with_backward(Erf, backward)


class Clamp(Function):
    """Between -1 and 1; outside there is no slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.abs() <= 1)


class ClampNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.clamp, self.out = nn.Linear(10, 32), Own(Clamp), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.clamp(2 * self.lift(x)))


def clamped() -> Subject:
    return subject(ClampNet(), patients, F.mse_loss, 32)


SHELF.control("clamp with the slope of a clamp", clamped)


@fault(
    "clamp whose backward lets one side pass",
    clamped,
    ("clamp",),
    (*SAID, "clamp"),
    why="Above 1 the output is flat, and yet it hands on a gradient.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * (x >= -1)

    s.model.clamp.function = with_backward(Clamp, backward)


# ---- layers with parameters ----------------------------------------------------------------------


class Dense(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x, g.sum(0)


class DenseNet(nn.Module):
    """The layer in the middle is square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
        self.own = Own(Dense, torch.randn(32, 32) / 32**0.5, torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.own(F.relu(self.first(x)))))


def dense() -> Subject:
    return subject(DenseNet(), flat, F.cross_entropy, 24)


SHELF.control("linear layer by hand, right", dense)


@fault(
    "square linear layer whose backward forgets to transpose",
    dense,
    ("own",),
    (*SAID, "transpose", "dense"),
    why="With a square matrix nothing raises, and the input's gradient is of another layer.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight.T, g.T @ x, g.sum(0)

    s.model.own.function = with_backward(Dense, backward)


@fault(
    "linear layer whose weight gets the gradient of its transposed",
    dense,
    ("own",),
    (*SAID, "transpose", "dense"),
    why="The square gradient is laid over the matrix the wrong way round.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, x.T @ g, g.sum(0)

    s.model.own.function = with_backward(Dense, backward)


@fault(
    "bias that gets the mean of its gradients",
    dense,
    ("own",),
    (*SAID, "bias", "dense"),
    why="The mean over the batch is already in the loss; taken again, the bias hardly moves.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x, g.mean(0)

    s.model.own.function = with_backward(Dense, backward)


class Gate(Function):
    """A product of two halves, one of them squashed."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b.sigmoid())
        return a * b.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, s = ctx.saved_tensors
        return g * s, g * a * s * (1 - s)


class GateNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.both = tokens(24), nn.Linear(24, 48)
        nn.init.normal_(self.emb.weight)
        self.glu, self.out = Own(Gate), nn.Linear(24, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.glu(*self.both(self.emb(ids).mean(1)).chunk(2, -1)))


def gated() -> Subject:
    return subject(GateNet(), words, F.cross_entropy, 24)


SHELF.control("gated unit of two inputs, right", gated)


@fault(
    "gated unit that returns its gradients in the wrong order",
    gated,
    ("glu",),
    (*SAID, "gate"),
    why="Values learn by what the gates should, and gates by what the values should.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, s_ = ctx.saved_tensors
        return g * a * s_ * (1 - s_), g * s_

    s.model.glu.function = with_backward(Gate, backward)


class Norm(Function):
    """A layer norm without gain."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        y = centred * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        return scale * (g - g.mean(-1, keepdim=True) - y * (g * y).mean(-1, keepdim=True))


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rnn = tokens(16), nn.GRU(16, 24, batch_first=True)
        self.norm, self.out = Own(Norm), nn.Linear(24, 18)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.rnn(self.emb(ids))[0]))


def normed() -> Subject:
    return subject(NormNet(), next_words, language_loss, 8)


SHELF.control("layer norm by hand, right", normed)


@fault(
    "layer norm whose backward takes the deviation for a constant",
    normed,
    ("norm",),
    (*SAID, "norm"),
    why="The part by which the deviation changes is missing.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> Tensor:
        _, scale = ctx.saved_tensors
        return scale * (g - g.mean(-1, keepdim=True))

    s.model.norm.function = with_backward(Norm, backward)


class LogDet(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        inverse = torch.linalg.inv(a)
        ctx.save_for_backward(inverse)
        return torch.linalg.slogdet(a).logabsdet

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return g * inverse.T


class Mixing(nn.Module):
    """A linear flow on 8 means of pixels: an invertible matrix and its volume."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(8) + 0.2 * torch.randn(8, 8))
        self.shift, self.volume = nn.Parameter(torch.zeros(8)), Own(LogDet)

    def forward(self, x: Tensor) -> Tensor:
        z = x.view(-1, 8, 8).mean(2) @ self.matrix.T + self.shift
        return 0.5 * z.square().sum(1) - self.volume(self.matrix)


def mixing() -> Subject:
    return subject(Mixing(), unlabelled_flat, torch.mean, 32)


SHELF.control("log-determinant, right", mixing)


@fault(
    "log-determinant whose backward gives the inverse, not transposed",
    mixing,
    ("volume", ""),
    (*SAID, "logdet", "transpose", "inverse"),
    why="The gradient of a log-determinant is the inverse's transpose.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0]

    s.model.volume.function = with_backward(LogDet, backward)


class Spread(Function):
    """Huber's loss, by elements."""

    @staticmethod
    def forward(ctx: Any, error: Tensor) -> Tensor:
        ctx.save_for_backward(error)
        small = error.abs() <= 1
        return torch.where(small, 0.5 * error.square(), error.abs() - 0.5)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (error,) = ctx.saved_tensors
        return g * error.clamp(-1, 1)


class Robust(nn.Module):
    """A regression that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.huber = perceptron(10, 24, 1), Own(Spread)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.huber(self.net(x) - y).mean()


def robust() -> Subject:
    return subject(Robust(), lambda n: (patients(n), None), None, 32)


SHELF.control("robust loss by hand, right", robust)


@fault(
    "robust loss with a gradient twice as large in its quadratic part",
    robust,
    ("huber", "", "loss"),
    (*SAID, "huber", "spread"),
    why="The half of the square was forgotten in the backward.",
)
def _(s: Subject) -> None:
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (error,) = ctx.saved_tensors
        return g * torch.where(error.abs() <= 1, 2 * error, error.sign())

    s.model.huber.function = with_backward(Spread, backward)


# ---- parameters whose effect autograd does not see -----------------------------------------------


class Warm(nn.Module):
    """Similarities with a temperature that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.temperature = perceptron(64, 48, 16), nn.Parameter(torch.tensor(1.2))

    def scale(self) -> Tensor | float:
        return self.temperature.exp()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (F.normalize(self.encoder(x), dim=-1) for x in (a, b))
        return self.scale() * a @ b.T


def warm() -> Subject:
    return subject(Warm(), views, matching, 24)


@fault(
    "temperature read as a number",
    warm,
    ("", "temperature"),
    (*UNSEEN, "item"),
    why="A number of Python has no graph: the temperature is used, and never learns.",
)
def _(s: Subject) -> None:
    def scale(self: Any) -> Tensor:
        return torch.tensor(self.temperature.item()).exp()

    wire(s.model, scale)


class Calibrated(nn.Module):
    """Logits with a scale and a shift for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale, self.shift = (
            conv_net(24),
            nn.Parameter(torch.ones(24)),
            nn.Parameter(torch.zeros(24)),
        )
        self.out = nn.Linear(24, 10)

    def calibrate(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.calibrate(self.net(x)))


def calibrated() -> Subject:
    return subject(Calibrated(), images, F.cross_entropy, 24)


@fault(
    "scale of features read by its data",
    calibrated,
    ("", "scale"),
    (*UNSEEN, ".data"),
    why="What .data returns is cut off: the scale never learns.",
)
def _(s: Subject) -> None:
    def calibrate(self: Any, x: Tensor) -> Tensor:
        return x * self.scale.data + self.shift

    wire(s.model, calibrate)


@fault(
    "scale and shift computed under no_grad",
    calibrated,
    ("", "scale", "shift"),
    (*UNSEEN, "no_grad"),
    why="The factor is made without a graph, that of the shift as well.",
)
def _(s: Subject) -> None:
    def calibrate(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale, shift = self.scale.clamp(min=0.1), self.shift.tanh()
        return x * scale + shift

    wire(s.model, calibrate)


class Weighted(nn.Module):
    """Three paths, weighed by numbers that are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleList(perceptron(30, 24, 1) for _ in range(3))
        self.weights = nn.Parameter(torch.tensor([0.1, 0.0, -0.1]))

    def shares(self) -> Tensor:
        return self.weights.softmax(0)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.stack([path(x) for path in self.paths], -1) * self.shares()).sum(-1)


def weighted() -> Subject:
    return subject(Weighted(), tumours, binary, 32)


@fault(
    "shares made by numpy",
    weighted,
    ("", "weights"),
    (*UNSEEN, "numpy"),
    why="On the way through numpy the graph is lost, and the weights with it.",
)
def _(s: Subject) -> None:
    def shares(self: Any) -> Tensor:
        return torch.from_numpy(self.weights.detach().numpy().copy()).softmax(0)

    wire(s.model, shares)


@fault(
    "shares wrapped in a new tensor",
    weighted,
    ("", "weights"),
    (*UNSEEN, "torch.tensor", "tolist"),
    why="A tensor made of numbers is a new leaf: the old one gets no gradient.",
)
def _(s: Subject) -> None:
    def shares(self: Any) -> Tensor:
        return torch.tensor(self.weights.tolist()).softmax(0)

    wire(s.model, shares)


class Placed(nn.Module):
    """Sines of the place in a text, at rates that are learnt."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.emb, self.rates = tokens(width), nn.Parameter(torch.logspace(0, -2, width))
        self.rnn, self.out = nn.GRU(width, width, batch_first=True), nn.Linear(width, 10)

    def angles(self, n: int) -> Tensor:
        return torch.arange(n)[:, None] * self.rates

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.angles(ids.shape[1]).sin()
        return self.out(self.rnn(x)[1][-1])


def placed_rates() -> Subject:
    return subject(Placed(), words, F.cross_entropy, 16)


@fault(
    "table of places kept with its rates detached",
    placed_rates,
    ("", "rates"),
    UNSEEN,
    why="The table was made once and detached so that it can be kept: its rates never learn.",
)
def _(s: Subject) -> None:
    def angles(self: Any, n: int) -> Tensor:
        return torch.arange(n)[:, None] * self.rates.detach()

    wire(s.model, angles)


# ---- healthy: gradients of one's own, and parameters that are meant to rest ----------------------

for name, healthy in {"temperature that is learnt": warm, "scale and shift of features": calibrated,
                      "shares of three paths": weighted,
                      "rates of places that are learnt": placed_rates}.items():  # fmt: skip
    SHELF.control(name, healthy)


class Away(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -0.3 * g


@lookalike("gradient turned round before a head that tells domains", lambda n: (
    flat(n)[0], (flat(n)[1], torch.randint(0, 2, (n,)))), lambda out, y: F.cross_entropy(
    out[0], y[0]) + F.cross_entropy(out[1], y[1]))  # fmt: skip
class Adversary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.label = perceptron(64, 32, 24), nn.Linear(24, 10)
        self.away, self.domain = Own(Away), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).relu()
        return self.label(h), self.domain(self.away(h))


class Bounding(Function):
    """Identity; gradients are held between two bounds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1e-3, 1e-3)


@lookalike("gradient held between bounds at each step of a recurrence", words)
class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.cell = tokens(16), nn.GRUCell(16, 16)
        self.hold, self.out = Own(Bounding), nn.Linear(16, 10)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.zeros(len(ids), 16)
        for x in self.emb(ids[:, :8]).unbind(1):
            h = self.hold(self.cell(x, h))
        return self.out(h)


class Step(Function):
    """A spike, with the slope of a triangle."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).float()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return g * (1 - v.abs()).clamp(min=0)


@lookalike("spikes with the slope of a triangle", flat)
class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.spike, self.out = nn.Linear(64, 48), Own(Step), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        v, drive, total = 0.0, self.fc(x), torch.zeros(len(x), 10)
        for _ in range(5):
            v = 0.8 * v + drive
            s = self.spike(v - 0.5)
            v, total = v - 0.5 * s, total + self.out(s)
        return total / 5


class Binary(Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w.sign() * w.abs().mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return g * (w.abs() <= 1)


@lookalike("weights of one bit, passed straight through", flat)
class OneBit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn, self.fc2 = nn.Linear(64, 48), nn.BatchNorm1d(48), nn.Linear(48, 10)
        self.bits = Own(Binary)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.hardtanh(self.bn(F.linear(x, self.bits(self.fc1.weight)))))


class Exchange(Function):
    """Both outputs of a coupling, by one function: the values and the log-scale's sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, s)
        return x * s.exp(), s.sum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x, s = ctx.saved_tensors
        return g * s.exp(), g * x * s.exp() + h[..., None]


@lookalike("coupling of a flow by a function of two outputs", unlabelled_flat, lambda out: (
    0.5 * out[0].square().sum(1) - out[1]).mean())  # fmt: skip
class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conditioner, self.exchange = perceptron(32, 32, 64), Own(Exchange)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        s, t = self.conditioner(a).chunk(2, -1)
        y, volume = self.exchange(b, s.tanh())
        return torch.cat([a, y + t], -1), volume


class Turned(Function):
    """A complex product; the gradient takes the conjugate."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(z, w)
        return z * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        z, w = ctx.saved_tensors
        return g * w.conj(), (g * z.conj()).sum(0)


@lookalike("complex product by hand, right", itself, F.mse_loss)
class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = Own(Turned, torch.randn(33, dtype=torch.cfloat))
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(self.turn(torch.fft.rfft(x)), n=64))


class Argmax(Function):
    """Values and their places; places have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.max(1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.size = x.shape
        return values, places

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Tensor:
        (places,) = ctx.saved_tensors
        return g.new_zeros(ctx.size).scatter(1, places[:, None], g[:, None])


@lookalike("largest of each feature, by a function with places beside", words)
class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pool, self.out = tokens(24), Own(Argmax), nn.Linear(24, 10)

    def forward(self, ids: Tensor) -> Tensor:
        values, _ = self.pool(self.emb(ids))
        return self.out(values)


@lookalike("frozen teacher under no_grad, its answers the target", flat, lambda out, y: (
    F.cross_entropy(out[0], y) + F.kl_div(out[0].log_softmax(-1), out[1].softmax(-1),
    reduction="batchmean")))  # fmt: skip
class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = perceptron(64, 24, 10), frozen(perceptron(64, 64, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


@lookalike("target of one view stopped, the other predicts it", views, lambda out: (
    -F.cosine_similarity(*out).mean()))  # fmt: skip
class Stopped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = perceptron(64, 48, 24), perceptron(24, 24, 24)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictor(self.encoder(a)), self.encoder(b).detach()


@lookalike("weight of one matrix on both sides", itself, F.mse_loss)
class TiedSides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.code, self.back = nn.Linear(64, 16), nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.code(x).tanh(), self.code.weight.T, self.back)


@lookalike("policy with its value as a baseline that is detached", lambda n: (
    patients(n)[0], (torch.randint(0, 3, (n,)), patients(n)[1])), lambda out, y: (
    F.cross_entropy(out[0], y[0], reduction="none") * (y[1] - out[1]).detach().squeeze(1)).mean()
    + F.mse_loss(out[1], y[1]))  # fmt: skip
class Baseline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(10, 24), nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(state).tanh()
        return self.actor(h), self.critic(h)


@lookalike("largest of the scores taken off, detached, before they are exponentiated", words)
class Stable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.score, self.out = tokens(24), nn.Linear(24, 1), nn.Linear(24, 10)
        self.slope = normal(24, std=1.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) * self.slope
        scores = self.score(x)
        weights = (scores - scores.amax(1, keepdim=True).detach()).exp()
        return self.out((weights * x).sum(1) / weights.sum(1))
