"""Weights that no initialiser should leave, and starts that authors chose."""

from __future__ import annotations

import torch
from torch import nn

from corpus.checks.parts import Net, batch, holding, normal, scaled

CHECK = "initial_weights"


def plain(**values):
    """Return a plain network whose gradients survive whatever is done to one layer."""
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )
    return holding(model, **values)


def zero(*sizes, **options):
    """Return a layer of zeros."""
    layer = nn.Linear(*sizes, **options)
    return holding(layer, weight=0.0, **({} if layer.bias is None else {"bias": 0.0}))


def gates(inner=None):
    """Return a residual branch, an adapter, a gate and a head that all start at zero."""

    def forward(m, x):
        x = m.stem(x)
        x = x + m.outer(torch.relu(m.inner(x)))
        x = x + m.up(m.down(x))
        return m.head(x * (1 + m.gate(x)))

    return Net(
        forward, stem=(16, 16), inner=inner or nn.Linear(16, 32), outer=zero(32, 16),
        down=nn.Linear(16, 4, bias=False), up=zero(4, 16, bias=False), gate=zero(16, 16),
        head=zero(16, 4),
    )  # fmt: skip


def weighed(*, by_itself):
    """Return a branch of zeros that weighs itself, as squeeze-and-excitation does, or does not."""

    def forward(m, x):
        x = m.stem(x)
        branch = m.last(x)
        weights = torch.sigmoid(m.squeeze(branch))
        return m.head(x + (weights * branch if by_itself else weights))

    return Net(
        forward, stem=(16, 16), last=holding(nn.Linear(16, 16), weight=0.0), head=(16, 16),
        squeeze=(16, 16),
    )  # fmt: skip


def first_state(forward):
    """Return a recurrence, and a layer of zeros that makes its first state or its input."""
    return Net(
        forward, make=holding(nn.Linear(16, 16), weight=0.0), cell=nn.GRUCell(16, 16), head=(16, 4)
    )


def before_a_norm(std):
    """Return a network whose second layer, before a normalisation, is drawn anew."""
    return nn.Sequential(
        nn.Linear(16, 64), holding(nn.Linear(64, 64), weight=normal(std)), nn.LayerNorm(64),
        nn.Linear(64, 4),
    )  # fmt: skip


def recurrent(low):
    """Return a model that reads the last state, its weights drawn from `low` to one."""
    draw = {f"weight_{kind}_l0": lambda w: w.uniform_(low, 1.0) for kind in ("ih", "hh")}
    lstm = holding(nn.LSTM(8, 16, batch_first=True), **draw)
    return Net(lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=lstm, head=(16, 4)), batch(64, 8, 8)


def attention(factor):
    """Return a transformer's layer, whose projections are scaled, and sequences."""
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True, dropout=0.0)
    holding(model.self_attn, in_proj_weight=scaled(factor))
    return model, batch(16, 8, 16)


def grown(first):
    """Return weights that may have grown in training, before a new norm and a bias of zero."""
    layers = (
        holding(nn.Linear(16, 64, bias=False), weight=normal(1.8)), nn.SiLU(), nn.LayerNorm(64),
        holding(nn.Linear(64, 10), bias=0.0),
    )  # fmt: skip
    return nn.Sequential(first, *layers)


def trained_scale():
    """Return a normalisation whose scale was trained."""
    return Net(
        lambda m, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * m.weight,
        weight=nn.Parameter(1.0 + 0.1 * torch.randn(16)),
    )


def kernels(groups):
    """Return equal kernels, which share their inputs or are depthwise."""
    conv = holding(nn.Conv2d(4, 4, 3, padding=1, groups=groups), weight=1 / 9)
    return nn.Sequential(nn.Unflatten(1, (4, 2, 2)), conv, nn.Flatten(), nn.Linear(16, 10))


def of_zeros():
    """Return a layer that is given a state of zeros: its scale tells what its inputs do not."""
    return Net(
        lambda m, x: m.head(torch.tanh(m.stem(x) + m.state(torch.zeros(len(x), 64)))),
        stem=(16, 64), state=holding(nn.Linear(64, 64), weight=normal(2.0)), head=(64, 10),
    )  # fmt: skip


def noisy(noise):
    """Return a layer that learns how far noise moves its weights, from one constant for all."""
    drawn = Net(
        lambda m, x: nn.functional.linear(x, m.mean + m.spread * m.noise),
        mean=nn.Parameter(torch.randn(64, 16) / 4), spread=nn.Parameter(torch.full((64, 16), 0.1)),
        noise=noise,
    )  # fmt: skip
    return Net(lambda m, x: m.head(torch.relu(m.drawn(x))), drawn=drawn, head=(64, 10))


FAULTS = {
    # the layer after it takes a constant; the cause says which one
    "zeros in a plain path": (
        lambda: plain(**{"2.weight": 0.0}), "fail", "2", "'4'", "weight",
    ),
    "the first layer of a residual branch": (
        lambda: gates(holding(nn.Linear(16, 32), weight=0.0)), "fail", "inner",
    ),
    # through the next weights alone no gradient comes
    "a branch of zeros": (lambda: weighed(by_itself=False), "fail", "last"),
    "an input of zeros": (lambda: first_state(lambda m, x: m.head(m.cell(m.make(x)))), "fail",
                          "make"),
    # they make all units of the layer one
    "constants": (lambda: plain(**{"0.weight": 0.1}), "fail", "0", "a constant initialiser"),
    "constants times a number": (lambda: noisy(0.5), "fail", "drawn", "its spread are equal"),
    "equal kernels": (lambda: kernels(1), "fail", "1"),
    # the targets of its units part them, as where a forecast starts as the mean of the past
    "constants at the end": (lambda: plain(**{"4.weight": 0.1}), "warn", "4"),
    # torch's default has a scale of 0.58: twelve times that is 6.9
    "12 times as large": (lambda: plain(**{"2.weight": scaled(12.0)}), "fail", "2"),
    "too large before a normalisation": (lambda: before_a_norm(40 / 8), "fail", "1"),
    "a head too large": (lambda: plain(**{"4.weight": normal(3.0)}), "fail", "4"),
    # uniform_(0, 1) is no wider than (-1, 1), but sums up what its inputs share
    "recurrent weights of one sign": (lambda: recurrent(0.0), "fail", "lstm", "one-sided",
                                      "weight_hh_l0"),
    # queries, keys and values in one matrix are judged as three
    "projections of zeros": (lambda: attention(0.0), "fail", "self_attn", "weight are zero"),
    "large projections": (lambda: attention(100.0), "fail", "self_attn", "too large"),
    "untrained before a new norm": (lambda: grown(nn.LayerNorm(16)), "fail", "1"),
    "weights of a state of zeros": (of_zeros, "fail", "state"),
}  # fmt: skip
HEALTHY = {
    # the output of these is added, multiplied, or the model's own
    "gates, heads, adapters and residual branches": gates,
    # the gradient comes through the product
    "a branch that is multiplied": lambda: weighed(by_itself=True),
    # the recurrence has its input beside it
    "a first state": lambda: first_state(lambda m, x: m.head(m.cell(x, m.make(x)))),
    # a mean over neighbours is written so
    "a frozen filter": lambda: nn.Sequential(
        holding(nn.Linear(16, 16, bias=False), weight=1 / 16).requires_grad_(False),
        nn.Linear(16, 4),
    ),
    "equal depthwise kernels": lambda: kernels(4),
    # its noise differs by unit (Fortunato et al., 2018)
    "a scale of noise": lambda: noisy(torch.randn(64, 16)),
    "torch's default": plain,
    "5 times as large": lambda: plain(**{"2.weight": scaled(5.0)}),
    "all layers small": lambda: plain(**{f"{n}.weight": normal(1e-4) for n in (0, 2, 4)}),
    # a normalisation takes the scale away: 15 at a fan-in of 64 is more than a head may have
    "large before a normalisation": lambda: before_a_norm(15 / 8),
    # N(0, 1) at a fan-in of 64 is a scale of 8: over the limit, within that of a head
    "a large head": lambda: plain(**{"4.weight": normal(1.0)}),
    "recurrent weights": lambda: recurrent(-1.0),
    "projections": lambda: attention(1.0),
    "a new head on a trained part": lambda: grown(trained_scale()),
}
