"""Gradients that vanish, explode, move nothing or are singular, and gates that only start so."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies, Mlp, Net, batch, holding, normal, scaled

CHECK = "grad_norm"


def deep(depth, gain=1.0, activation=nn.Tanh):
    """Return a tower whose layers multiply the gradient by about `gain`."""
    layers = [m for _ in range(depth) for m in (nn.Linear(16, 16), activation())]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, gain)
    return nn.Sequential(*layers)


def with_head(*layers):
    """Return layers and a small head."""
    return nn.Sequential(*layers, nn.Linear(16, 4))


def off(factor):
    """Return a deep net whose fourth layer is off by a factor, behind a bias that is not."""
    layers = deep(6, 2**0.5, nn.ReLU)
    holding(layers[6], weight=scaled(factor), bias=normal(1.0))
    return layers


def branches(first, second):
    """Return two branches of one input, which run one after the other, and a head for both."""
    return Net(
        lambda m, x: m.head(torch.cat([m.first(x), m.second(x)], 1)), first=first, second=second,
        head=(32, 4),
    )  # fmt: skip


def starved():
    """Return a branch that is too deep for its activation."""
    return deep(14, activation=nn.Sigmoid)


def scale(start=1e-8, *, residual=True, act=None):
    """Return a branch scaled by small parameters of the block's own."""

    def forward(m, x):
        h = m.gamma * m.branch(x)
        return x + h if residual else h

    branch = nn.Sequential(nn.Linear(16, 16), act or nn.Identity(), nn.Linear(16, 16))
    return Net(forward, branch=branch, gamma=nn.Parameter(torch.full((16,), start)))


def gated(**options):
    """Return a scaled branch in mid-network."""
    return nn.Sequential(nn.Linear(16, 16), scale(**options), *deep(3))


def by_class_token(*, is_fused):
    """Attend by positions that a small network makes, and read a token that starts small."""

    def forward(m, x):
        x = torch.cat([m.token.expand(len(x), -1, -1), m.stem(x)], 1)
        q, k, v = m.qkv(x).chunk(3, -1)
        bias = m.bias(torch.relu(m.place(m.places)))[None, ..., 0] * 1e-3
        if is_fused:
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(x), -1, -1))
        else:
            made = F.dropout((q @ k.transpose(1, 2) / 4 + bias).softmax(-1), 0.0) @ v
        return m.head(F.layer_norm((x + m.gamma * m.proj(made))[:, 0], (16,)))

    model = Net(
        forward, stem=(16, 16), token=nn.Parameter(1e-6 * torch.randn(1, 1, 16)), qkv=(16, 48),
        place=(2, 8), proj=(16, 16), bias=holding(nn.Linear(8, 1), weight=normal(0.02)),
        head=(16, 4), gamma=nn.Parameter(torch.full((16,), 1e-5)), places=torch.randn(9, 9, 2),
    )  # fmt: skip
    return model, batch(16, 8, 16)


def chain(count, activation, init=None, width=32, around=None):
    """Return linear layers with an activation after each, under a loss of three classes."""

    def forward(m, x):
        for layer in m.layers:
            made = activation(layer(x))
            x = around(x, made) if around and x.shape == made.shape else made
        return m.head(x)

    sizes = [16] + [width] * count
    layers = nn.ModuleList(nn.Linear(sizes[i], sizes[i + 1]) for i in range(count))
    for layer in layers if init else ():
        init(layer.weight)
        nn.init.zeros_(layer.bias)
    model = Net(forward, layers=layers, head=(width, 3))
    return model, batch(), torch.randint(3, (64,)), F.cross_entropy


def moved():
    """Return a chain of sigmoids that training has moved: what it made of them is its own."""
    model, *rest = chain(6, torch.sigmoid)
    holding(model, **{"head.bias": lambda b: b.add_(1.0)})
    return model, *rest


def exploding():
    """Return weights of a standard deviation of 2, which magnify forward and backward alike."""
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), *layers, nn.Linear(64, 4))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=2.0)
    return model, batch(), torch.randint(0, 4, (64,)), F.cross_entropy


def token():
    """Return a token of zeros before a norm: its gradient is huge, and nothing is wrong."""
    model = Net(
        lambda m, x: m.head(m.fc(m.norm(1e-8 * x + m.token))), norm=nn.LayerNorm(16),
        token=nn.Parameter(torch.zeros(1, 16)), fc=(16, 16), head=(16, 2),
    )  # fmt: skip
    return model, batch(), None, lambda out: out.square().sum()


def network(loss, *more, dtype=torch.float32, target=None):
    """Return a small network, what comes after it, and a number from 0 to 1 for each sample."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1), *more).to(dtype)
    target = torch.rand(64, 1) if target is None else target
    return model, batch().to(dtype), target.to(dtype), loss


def learnt():
    """Return a model that fits, under a small loss."""
    model, x = nn.Linear(16, 1), batch()
    target = model(x).detach() + 1e-6 * torch.randn(64, 1)
    return model, x, target, lambda o, t: 1e-6 * F.mse_loss(o, t)


def in_units():
    """Return a model whose output is in a unit of which there are millions: it comes in large."""
    target = 5e6 + 1e6 * torch.randn(64, 1)
    return network(F.mse_loss, Applies(lambda x: 5e6 + 1e6 * x), target=target)


def rooted(epsilon):
    """Return a root of what is next to zero between two layers."""

    def forward(m, x):
        h = m.first(x)
        return m.last(h + (h - h.detach() + epsilon).sqrt())

    return Net(forward, first=(16, 32), last=(32, 1)), batch(), torch.rand(64, 1), F.mse_loss


def almost_zero_root(output, target):
    """Take a root of something next to zero."""
    return F.mse_loss(output, target) + (output - output.detach() + 1e-24).sqrt().sum()


TINY = "no optimizer moves"
FAULTS = {
    "30 sigmoids": (
        lambda: with_head(*(m for _ in range(30) for m in (nn.Linear(16, 16), nn.Sigmoid()))),
        "fail", "0",
    ),
    "one layer shrinks": (lambda: with_head(*off(1e-10)), "fail", "6", "shrinks", "its weights"),
    "one layer grows": (lambda: with_head(*off(1e10)), "fail", "6", "grows", "its weights", ...),
    "every layer shrinks": (
        lambda: with_head(*deep(5, 1e-4, nn.ReLU)), "fail", "0", "times a layer over 5 layers",
        "are too small",
    ),
    # past it nothing goes
    "a block's scale": (lambda: gated(residual=False), "fail", "1"),
    "the first of two branches": (lambda: branches(starved(), deep(5)), "fail", "first.0"),
    # a gate excuses no other branch
    "a gate in the other": (
        lambda: branches(starved(), nn.Sequential(scale(1e-6), nn.Linear(16, 16))),
        "fail", "first.0",
    ),
    "large weights": (exploding, "fail", None, ...),
    "targets in another unit": (
        lambda: (Mlp(), batch(), 1e6 * torch.randn(64, 10), F.mse_loss), "fail", None,
        "standardise the targets",
    ),
    # at torch's initialisation, which is no fault by itself: the factor a layer is told, once
    "six sigmoids": (
        lambda: chain(6, torch.sigmoid), "fail", "layers.0", "times a layer over",
        "sigmoids (a slope of 0.25 at most)",
    ),
    "six sigmoids, better weights": (
        lambda: chain(6, torch.sigmoid, nn.init.xavier_uniform_), "fail", "layers.0",
    ),
    "a small loss": (
        lambda: network(lambda o, t: 1e-13 * F.mse_loss(o, t)), "fail", "", TINY, "the loss itself",
    ),
    "a small term": (
        lambda: network(lambda o, t: 1 + 1e-13 * F.mse_loss(o, t)), "fail", "", TINY,
    ),
    "a loss that is saturated": (
        lambda: network(lambda o, t: F.mse_loss(torch.sigmoid(o - 60), t)), "fail", "", TINY,
    ),
    # the layer is named behind which the gradient is usual
    "a layer that sends nothing back": (
        lambda: network(F.mse_loss, Applies(lambda x: x - 60), nn.Sigmoid()), "fail", "4",
        "inputs in [-6",
    ),
    # a fit that has converged in float64 looks the same
    "double precision": (
        lambda: network(lambda o, t: 1 + 1e-13 * F.mse_loss(o, t), dtype=torch.float64), "warn", "",
    ),
    "a root in the loss": (lambda: network(almost_zero_root), "fail", None, "`sqrt` at", ...),
    "a root between layers": (lambda: rooted(1e-24), "fail", "first", "`sqrt` at", ...),
}  # fmt: skip
HEALTHY = {
    "a gate of the block": gated,
    "gates behind gates": lambda: with_head(
        nn.Linear(16, 16), scale(act=nn.ReLU()), scale(act=nn.ReLU())
    ),
    "two branches": lambda: branches(deep(5), deep(5)),
    # nearly even weights send little back to what makes positions, the less behind a scale
    "positions that act by scores alone": lambda: by_class_token(is_fused=False),
    "positions in fused attention": lambda: by_class_token(is_fused=True),
    "a token of zeros before a norm": token,
    # neither a loss near zero nor a large one says anything about the model
    "a loss times 1e-6": lambda: (Mlp(), batch(), None, lambda o: 1e-6 * o.square().mean()),
    "a loss times 1e3": lambda: (Mlp(), batch(), None, lambda o: 1e3 * o.square().mean()),
    "targets": lambda: (Mlp(), batch(), torch.randn(64, 10), F.mse_loss),
    "units of a loss": in_units,
    # few layers, slopes near one, residuals and normalisations
    "four sigmoids": lambda: chain(4, torch.sigmoid),
    "20 tanh": lambda: chain(20, torch.tanh, nn.init.xavier_uniform_),
    "five wide sigmoids": lambda: chain(5, torch.sigmoid, nn.init.xavier_uniform_, 256),
    "sigmoids of a residual": lambda: chain(6, torch.sigmoid, around=torch.add),
    "gates": lambda: chain(14, torch.sigmoid, around=lambda x, made: made * x),
    "sigmoids, normalised": lambda: chain(12, lambda x: torch.sigmoid(F.layer_norm(x, (32,)))),
    "sigmoids, trained": moved,
    "gradients that move": lambda: network(lambda o, t: 1 + 1e-6 * F.mse_loss(o, t)),
    "what is learnt": learnt,
    "a root with an epsilon": lambda: rooted(1e-6),
}
