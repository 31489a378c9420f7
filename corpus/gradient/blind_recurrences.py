"""Recurrences that pass no gradient back in time, and long chains of saturating activations."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from corpus.cards import Shelf
from corpus.models.parts import frozen, lookalikes_of, perceptron, tokens
from corpus.models.small import flat, gru, images, lstm, plain, rows, words
from corpus.models.written_out import wire
from corpus.subject import Subject, subject
from corpus.words import DETACHED

SHELF = Shelf("gradient", "blind")
fault = SHELF.fault
lookalike = lookalikes_of(SHELF)

STEP = ("recurren", "weight_hh", "state", "first step", "one step", "last step", "hidden")
FADED = ("vanish", "fade", "saturat", "small", "shrink")

# ---- faults: a recurrence without gradient -------------------------------------------------------


@fault(
    "output of the first step read instead of the last",
    lstm,
    ("", "lstm", "head"),
    (*STEP, "position", "time"),
    why="One word is read of each sequence, and the recurrent weights never learn.",
)
def _(s: Subject) -> None:
    s.model.pool = lambda states: states[:, 0]


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 24, num_layers=3, batch_first=True)
        self.head = nn.Linear(24, 10)
        self.pick = lambda last: last[-1]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pick(self.rnn(x)[1]))


def stacked() -> Subject:
    return subject(Stacked(), rows, F.cross_entropy)


@fault(
    "last state of the first layer taken for that of the last",
    stacked,
    ("", "rnn", "head"),
    (*STEP, "layer", "no gradient"),
    why="Two layers of the stack run in vain.",
)
def _(s: Subject) -> None:
    s.model.pick = lambda last: last[0]


@fault(
    "bias of 30 for all gates where the forget gate's was meant",
    lstm,
    ("lstm",),
    ("gate", "saturat", "bias", "large"),
    why="All gates stand open and the cell is at its bound: inputs and states have no effect.",
)
def _(s: Subject) -> None:
    with torch.no_grad():
        s.model.lstm.bias_ih_l0.fill_(30.0)


@fault(
    "pixels in thousands before a recurrent layer",
    gru,
    ("", "gru"),
    ("gate", "saturat", "scale", "range", "large"),
    why="Nearly all gates are at 0 or 1, and have no derivative.",
)
def _(s: Subject) -> None:
    s.inputs = s.inputs * 5000


class Cells(nn.Module):
    """A cell stepped by hand; `carry` is what a step gets of the state before."""

    def __init__(self, make: type[nn.Module] = nn.GRUCell) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Linear(8, 24), make(24, 32), nn.Linear(32, 10)
        self.carry = lambda state, start: state

    def forward(self, x: Tensor) -> Tensor:
        state = start = x.new_zeros(len(x), 32)
        for row in self.embed(x).unbind(1):
            state = self.cell(row, self.carry(state, start))
        return self.head(state)


def cells() -> Subject:
    return subject(Cells(), rows, F.cross_entropy)


@fault(
    "initial state passed to each step",
    cells,
    ("", "cell"),
    (*STEP, "gradient"),
    why="The result depends on the last row alone, and recurrent weights get no gradient.",
)
def _(s: Subject) -> None:
    s.model.carry = lambda state, start: start


# ---- look-alikes: recurrent weights that get none ------------------------------------------------


def one_row(n: int) -> tuple[Tensor, Tensor]:
    x, y = flat(n)
    return x[:, None], y


@lookalike("sequences of one step", one_row)
class OneStepLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@lookalike("both directions read at the last step", rows)
class LastOfBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 24, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@lookalike("packed sequences, half of which have one step", rows)
class PackedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.where(torch.arange(len(x)) % 2 == 0, 1, 8)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][0])


@lookalike("a reservoir that is never trained", rows)
class Reservoir(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reservoir = frozen(nn.RNN(8, 48, batch_first=True))
        with torch.no_grad():
            self.reservoir.weight_hh_l0.mul_(1.5)
        self.readout = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.reservoir(x)[0].mean(1))


@lookalike("a second recurrent layer behind a gate that starts at zero", rows)
class GatedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.GRU(n, 32, batch_first=True) for n in (8, 32))
        self.gate, self.head = nn.Parameter(torch.zeros(1)), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)[0]
        return self.head((x + self.gate * self.second(x)[0])[:, -1])


# ---- faults: a state detached at each step -------------------------------------------------------


@fault(
    "state detached in each round of the loop",
    cells,
    ("", "cell"),
    (*DETACHED, *STEP),
    why="No step learns what a later one needs of it.",
)
def _(s: Subject) -> None:
    s.model.carry = lambda state, start: state.detach()


class LongMemory(nn.Module):
    """An LSTM cell stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = tokens(16), nn.LSTMCell(16, 32), nn.Linear(32, 10)

    def forward(self, ids: Tensor) -> Tensor:
        h = c = torch.zeros(len(ids), 32)
        for word in self.words(ids).unbind(1):
            h, c = self.step(word, h, c)
        return self.head(h)

    def step(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.cell(word, (h, c))


def long_memory() -> Subject:
    return subject(LongMemory(), words, F.cross_entropy, 32)


@fault(
    "state and memory repackaged for each word",
    long_memory,
    ("", "cell"),
    (*DETACHED, *STEP),
    why="What is done between two batches was put between two words: nothing is learnt over time.",
)
def _(s: Subject) -> None:
    def step(self: Any, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.cell(word, tuple(v.data for v in (h, c)))

    wire(s.model, step)


class Elman(nn.Module):
    """Linear layers and a tanh, the state kept by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(8, 32), nn.Linear(32, 32, bias=False)
        self.out, self.state = nn.Linear(32, 10), None

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.zeros(len(x), 32)
        for row in x.unbind(1):
            self.remember(torch.tanh(self.into(row) + self.again(self.state)))
        out = self.out(self.last)
        self.state = self.last = None
        return out

    def remember(self, state: Tensor) -> None:
        self.state = self.last = state


def elman() -> Subject:
    return subject(Elman(), rows, F.cross_entropy)


@fault(
    "state kept by the module without its graph",
    elman,
    ("", "again"),
    (*DETACHED, *STEP),
    why="Each step takes the state for a constant: only the last one is learnt from.",
)
def _(s: Subject) -> None:
    def remember(self: Any, state: Tensor) -> None:
        self.last, self.state = state, state.detach()

    wire(s.model, remember)


# ---- look-alikes: states detached on purpose -----------------------------------------------------


@lookalike("backpropagation through time cut after each fourth row", rows)
class Truncated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 32)
        for i, row in enumerate(x.unbind(1)):
            state = self.cell(row, state.detach() if i % 4 == 0 else state)
        return self.head(state)


@lookalike("initial state detached from the chunk before", rows)
class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        with torch.no_grad():
            _, state = self.rnn(first)
        return self.head(self.rnn(second, state)[1][0])


@lookalike(
    "an estimate refined in rounds, each of which takes the last for given",
    flat,
    lambda rounds, y: sum(0.8 ** (3 - i) * F.mse_loss(r, y / 9.0) for i, r in enumerate(rounds)),
)
class Refined(nn.Module):
    """As optical flow is refined: a loss for each round, and no gradient between two."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.cell = nn.Linear(64, 32), nn.GRUCell(33, 32)
        self.delta = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        seen, estimate, rounds = F.relu(self.see(x)), x.new_zeros(len(x), 1), []
        state = torch.tanh(seen)
        for _ in range(4):
            state = self.cell(torch.cat([seen, estimate.detach()], 1), state)
            estimate = estimate.detach() + self.delta(state)
            rounds.append(estimate[:, 0])
        return rounds


@lookalike("a fixed point found without gradient, and one last step with it", flat)
class FixedPoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(64, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)
        with torch.no_grad():
            self.again.weight.mul_(0.5)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.again(z) + x)

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.into(x), torch.zeros(len(x), 32)
        for _ in range(15):
            z = self.step(z.detach(), x).detach()
        return self.head(self.step(z, x))


# ---- faults: gradients that fade along a chain ---------------------------------------------------


def ten_layers() -> Subject:
    """Ten layers of tanh, drawn as they should be."""
    net = plain(64, *[48] * 10, 10, activation=nn.Tanh)
    for layer in net[::2]:
        nn.init.xavier_normal_(layer.weight, 5 / 3)
        nn.init.zeros_(layer.bias)
    return subject(net, flat, F.cross_entropy)


EARLY = ("", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11")


@fault(
    "sigmoids between ten layers",
    ten_layers,
    EARLY,
    (*FADED, "sigmoid"),
    why="Each sigmoid takes three quarters of the gradient or more: the first layers stand still.",
)
def _(s: Subject) -> None:
    for i in range(1, len(s.model), 2):
        s.model[i] = nn.Sigmoid()


@fault(
    "weights of ten tanh layers drawn with std 0.02",
    ten_layers,
    EARLY,
    (*FADED, "init", "std"),
    why="Signal and gradient shrink sevenfold at each layer.",
)
def _(s: Subject) -> None:
    for layer in s.model[::2]:
        nn.init.normal_(layer.weight, std=0.02)


class Tower(nn.Module):
    """Eight convolutions in a row, without norms or shortcuts."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [1, *[width] * 8]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes)
        )
        for conv in self.convs:
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        self.head, self.activation = nn.Linear(width, 10), F.relu

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.activation(conv(x))
        return self.head(x.mean((2, 3)))


def tower() -> Subject:
    return subject(Tower(), images, F.cross_entropy, 32)


@fault(
    "sigmoids behind eight convolutions drawn for other activations",
    tower,
    ("", "convs", "convs.[0-5]"),
    (*FADED, "sigmoid"),
    why="Gradients fade, and with them all that differs between two pictures.",
)
def _(s: Subject) -> None:
    for conv in s.model.convs:
        nn.init.xavier_normal_(conv.weight, 0.5)
    s.model.activation = torch.sigmoid


# ---- look-alikes: sigmoids and tanhs that pass gradients -----------------------------------------

lookalike("two layers with sigmoids", flat)(lambda: perceptron(64, 48, 48, 10, act=nn.Sigmoid))


@lookalike("twelve layers of tanh, drawn orthogonal", flat)
def orthogonal_tanh() -> nn.Module:
    net = plain(64, *[64] * 12, 10, activation=nn.Tanh)
    for layer in net[::2]:
        nn.init.orthogonal_(layer.weight, 1.1)
    return net


@lookalike("ten highway layers whose gates are nearly closed", flat)
class Highway(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.change = nn.ModuleList(nn.Linear(width, width) for _ in range(10))
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(10))
        for gate in self.gates:
            nn.init.constant_(gate.bias, -3.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for change, gate in zip(self.change, self.gates, strict=True):
            open_ = torch.sigmoid(gate(x))
            x = open_ * torch.tanh(change(x)) + (1 - open_) * x
        return self.head(x)


@lookalike("eight gated convolutions with squeeze and excitation", images)
class GatedConvs(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, width, 3, padding=1), nn.Linear(width, 10)
        self.convs = nn.ModuleList(nn.Conv2d(width, 2 * width, 3, padding=1) for _ in range(8))
        self.excite = nn.ModuleList(perceptron(width, 4, width) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, excite in zip(self.convs, self.excite, strict=True):
            made = F.glu(conv(x), 1)
            x = x + made * torch.sigmoid(excite(made.mean((2, 3))))[:, :, None, None]
        return self.head(x.mean((2, 3)))


@lookalike("eight sigmoids with a batch norm before each", flat)
def normed_sigmoids() -> nn.Module:
    sizes = [64, *[48] * 8]
    parts: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        linear, norm = nn.Linear(a, b), nn.BatchNorm1d(b)
        nn.init.constant_(norm.weight, 3.0)
        parts += [linear, norm, nn.Sigmoid()]
    return nn.Sequential(*parts, nn.Linear(48, 10))
