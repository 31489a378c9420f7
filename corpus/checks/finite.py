"""NaN and infinity, and the layer that made the first of them."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies, Mlp, Net, batch, holding

CHECK = "finite"


def around(function):
    """Return a model with a faulty layer in the middle."""
    return nn.Sequential(nn.Linear(16, 8), Applies(function), nn.Linear(8, 8), nn.Linear(8, 4))


def counting(times, dtype=torch.uint8):
    """Return a model that counts by 60, in a type of few bits."""

    def forward(m, x):
        number = torch.zeros(len(x), dtype=dtype)
        for _ in range(times):
            number += 60 * (x[:, 0] < 100)
        return m.fc(x) / number[:, None]

    return Net(forward, fc=(16, 4))


def nan(tensor):
    """Put a value that is no number into a tensor."""
    tensor.view(-1)[2] = torch.nan


def normalised(**values):
    """Return a running statistic, and a buffer that is infinite on purpose."""
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).eval()
    model.register_buffer("mask", torch.full((4, 4), -torch.inf))
    return holding(model, **values)


def masked(hidden):
    """Return attention with a mask of -inf from this key on, kept in a layer of its own."""
    hides = torch.arange(16) >= hidden
    return Net(
        lambda m, x: torch.softmax(m.mask(m.score(x)), dim=-1) @ x.new_ones(16, 3),
        score=(16, 16), mask=Applies(lambda s: s.masked_fill(hides, -torch.inf)),
    )  # fmt: skip


def by_hand():
    """Return a softmax by hand over nothing but mask."""

    def forward(m, x):
        scores = m.q(x) @ m.k(x).T
        return m.weigh(scores + x.new_full((64, 64), -torch.inf))

    weigh = Applies(lambda s: s.exp() / s.exp().sum(-1, keepdim=True))
    return Net(forward, q=(16, 8), k=(16, 8), weigh=weigh)


def divided():
    """Return a block that divides by zero between two layers."""
    block = Net(
        lambda m, x: m.b(m.a(x) / 0.0),  # the division
        a=(8, 8), b=(8, 8),
    )  # fmt: skip
    return nn.Sequential(nn.Linear(16, 8), block, nn.Linear(8, 2))


def couplings():
    """Each hands a part of the stream on past its layer; the second overflows."""

    def couple(scale):
        def forward(m, x):
            a, b = x.chunk(2, dim=1)
            return torch.cat([b * torch.exp(scale * m.net(a)), a], dim=1)

        return Net(forward, net=(8, 8))

    return nn.Sequential(*(couple(scale) for scale in (1.0, 1e4, 1.0)))


def aside():
    """Give a layer what is no number, and drop its output."""

    def forward(m, x):
        h = m.fc(x)
        m.aside(torch.log(h))
        return m.head(h)

    return Net(forward, **dict.fromkeys(("fc", "aside", "head"), (16, 16)))


def branches(left, right):
    """Return two branches of one layer, each with arithmetic of its own behind it, and a head."""

    def forward(m, x):
        h = m.stem(x)
        return m.head(left(m.left(h)) + right(m.right(h)))

    return Net(forward, stem=(16, 8), **dict.fromkeys(("left", "right", "head"), (8, 8)))


def rooted(h):
    """Return something finite, with a derivative that is not."""
    return h.mul(0.0).pow(0.5)  # the root


def logged(h):
    """Mask the result, which does not help."""
    return torch.where(h > 0, torch.log(h * (h > 0)), 0.0)  # the log


def safe(h):
    """Do as both do, rightly."""
    return torch.sqrt(F.relu(h) + 1e-6)


def of_two():
    """Return a logarithm of a sum of two layers."""
    return Net(
        lambda m, x: m.head(logged(m.left(x) + m.right(x))), left=(16, 8), right=(16, 8),
        head=(8, 2),
    )  # fmt: skip


def scaled(start):
    """Return a parameter under a root."""
    return Net(
        lambda m, x: m.head(m.fc(x) * torch.sqrt(m.scale)),
        fc=(16, 8), head=(8, 2), scale=nn.Parameter(torch.full((8,), start)),
    )  # fmt: skip


def loop():
    """Return a cell that overflows in its third call."""
    return Net(
        lambda m, x: functools.reduce(lambda y, _: m.cell(y), range(5), x).detach(),
        cell=Applies(lambda x: x * 1e15), head=(16, 2),
    )  # fmt: skip


def in_half():
    """Return what overflows in float16."""
    model = nn.Sequential(nn.Linear(16, 8), Applies(lambda x: (x * 60000 * 10).detach()))
    return model.half(), batch().half()


def of_nan():
    """Return a batch with a value that is no number."""
    values = batch()
    values[3, 2] = torch.nan
    return Mlp(), values


FIFTH = (torch.arange(64) == 5)[:, None] & (torch.arange(8) > 2)
NOTHING = torch.zeros(64, dtype=torch.bool)
ALONE = ("FAULTS",)
FAULTS = {
    "a count of 300 in a byte": (lambda: counting(5), "fail", "", "passes the end of their type"),
    "log": (lambda: around(torch.log), "fail", "1", "log or root"),
    "division": (lambda: around(lambda x: x / (x * 0)), "fail", "1", "division by zero"),
    "overflow": (lambda: around(lambda x: torch.exp(x * 1e5)), "fail", "1", "overflow"),
    "the first value": (
        lambda: around(lambda x: torch.where(FIFTH, torch.inf, x)), "fail", "1",
        "the first at [5, 3] (sample 5)",
    ),
    "overflow of float16": (in_half, "fail", "1", "65504"),
    "a weight": (
        lambda: holding(Mlp(), **{"fc2.weight": nan}), "fail", "fc2", "parameter 'weight'",
    ),
    "a buffer": (
        lambda: normalised(**{"1.running_var": nan}), "fail", "1", "buffer 'running_var'",
    ),
    "the batch": (of_nan, "fail", "", "inputs", "look at the data"),
    "a row of nothing but mask": (lambda: masked(0), "fail", "softmax", "masked"),
    # the product before the mask has overflowed nothing
    "a row of mask by hand": (by_hand, "fail", "weigh", "division by zero"),
    "the forward of a container": (
        divided, "fail", "1", "`div` at ", "# the division", "between 1.a and 1.b",
    ),
    "a stream past layers": (couplings, "fail", "1", "`exp` at ", "between 1.net and 2.net"),
    # the model's own output is finite: the layer that is given them is named, and the line
    "values that never leave the model": (aside, "fail", "aside", "`log` at ", ...),
    "the third call of a loop": (loop, "fail", "cell", "of call 3 of 5"),
    "a loss of nothing": (lambda: (Mlp(), batch(), None, lambda o: o[NOTHING].mean()), "fail", ""),
    "a loss": (
        lambda: (Mlp(), batch(), None, lambda o: torch.log(-o.exp()).mean()), "fail", "",
        "`log` at ",
    ),
    "the gradient of a loss": (
        lambda: (
            nn.Sequential(nn.Linear(16, 8), nn.ReLU()), batch(), None, lambda o: o.sqrt().mean(),
        ),
        "fail", "1", "in its gradients", "`sqrt` at ", "between 1 and loss",
    ),
    "the gradient of a branch": (
        lambda: branches(rooted, safe), "fail", "left", "`pow` at ", "# the root",
        "between left and head", {"stem"},
    ),
    "the gradient of two operands": (of_two, "fail", "right", "`log` at ", "# the log", {"left"}),
    "the gradient of a parameter": (
        lambda: scaled(0.0), "fail", "", "`sqrt` at ", "between scale and head", ...,
    ),
}  # fmt: skip
HEALTHY = {
    "a count of 240 in a byte": lambda: counting(4),
    "a count of 300 in 16 bits": lambda: counting(5, torch.int16),
    "a perceptron": Mlp,
    "an infinite buffer, which may be a mask": normalised,
    "roots with an epsilon": lambda: branches(safe, safe),
    "a root of one": lambda: scaled(1.0),
    # -inf that softmax turns into zeros is what masks are made of
    "-inf of a mask": lambda: masked(8),
}
