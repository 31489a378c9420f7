"""Samples that become one, and outputs that are equal on purpose."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies, Mlp, Net, batch, holding, scaled

CHECK = "collapse"


def around(function):
    """Return a model with such a layer in the middle."""
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), Applies(function), nn.Linear(32, 32), nn.Linear(32, 4)
    )


def constant(x):
    """Return one value for all samples."""
    return x * 0 + 0.5


def mean(x):
    """Return the mean over the batch for all samples."""
    return x.mean(0, keepdim=True).expand_as(x).contiguous()


def deep(depth, dtype=torch.float32):
    """Return a deep plain network."""
    layers = [m for _ in range(depth) for m in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 4)).to(dtype), torch.rand(64, 64, dtype=dtype)


def pooled(join):
    """Return a model whose scale of zero is followed by `join`."""
    model = Net(
        lambda m, x: m.head(join(m, x, m.norm(m.fc(x)))),
        fc=(8, 8), norm=holding(nn.LayerNorm(8), weight=0.0), head=(8, 4),
        latents=nn.Parameter(torch.randn(5, 8)),
    )  # fmt: skip
    return model, batch(64, 5, 8)


def modulated(start):
    """Return features times a condition that starts at a scale."""
    return Net(
        lambda m, x: m.head(torch.tanh(m.features(x)) * m.condition(x)),
        condition=holding(nn.Linear(16, 32), weight=scaled(start), bias=0.0),
        features=(16, 32),
        head=(32, 4),
    )


def policy(function):
    """Return a policy and what a function makes of what it predicts."""
    return Net(lambda m, x: function(m.policy(x)), policy=(16, 1))


def ratio(old):
    """Return the ratio of a policy and the old one, which `old` makes of what it is given."""

    def forward(m, x):
        new = torch.relu(m.policy(x)).squeeze(-1)
        with torch.no_grad():
            before = old(m, x, new)
        quotient = (new - before).exp()
        return {"loss": (quotient * x[:, 0]).mean(), "ratio": quotient}

    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    return Net(forward, policy=model)


def beside_a_copy():
    """Return what a policy prefers more than its frozen copy does: nothing, in the first step."""
    policy, copy = nn.Linear(16, 1), nn.Linear(16, 1)
    copy.load_state_dict(policy.state_dict())
    copy.requires_grad_(False)
    return Net(lambda m, x: m.policy(x) - m.copy(x), policy=policy, copy=copy)


def in_a_container():
    """Return a mean over the batch in the forward of a container."""
    inner = Net(lambda m, x: m.b(mean(m.a(x))), a=(16, 8), b=(8, 8))
    return nn.Sequential(nn.Linear(16, 16), inner, nn.Linear(8, 4))


SAME, ZERO = "its output is the same for all 64 samples", "start or ended at zero"
FAULTS = {
    "the first sample": (
        lambda: around(lambda x: x[:1].expand_as(x).contiguous()), "fail", "2", SAME,
    ),
    "the mean over the batch": (lambda: around(mean), "fail", "2", SAME),
    "a constant": (lambda: around(constant), "fail", "2", SAME),
    "few samples": (lambda: (around(constant), batch(4, 16)), "unsure", "2"),
    "the forward of a container": (in_a_container, "fail", "1", "between its submodules"),
    # what starts at zero may do so at the end, or where the samples go past it
    "zero scale": (lambda: pooled(lambda m, x, y: F.silu(y).mean(1)), "fail", "norm", ZERO),
    "zero scale and latents": (
        lambda: pooled(lambda m, x, y: F.silu(y + m.latents).mean(1)), "warn", "norm", ZERO,
    ),
    "a condition of zero": (lambda: modulated(0.0), "fail", ""),
    # only what passes no other way than the one without gradient is equal on purpose
    "a value from itself, with its gradient": (lambda: policy(lambda p: p - p), "fail", ""),
    "a value from itself, with another way": (
        lambda: policy(lambda p: (p - p.detach()) + 0.0 * p), "fail", "",
    ),
    # forty layers bring samples so close that bfloat16 tells them apart no more
    "rounding": (lambda: deep(40, torch.bfloat16), "unsure", None, "by no more than"),
}  # fmt: skip
HEALTHY = {
    "equal samples in the batch": lambda: (Mlp(), batch()[:1].expand(64, 16)),
    "zero scale and a residual": lambda: pooled(lambda m, x, y: F.silu(x + y).mean(1)),
    "a condition": lambda: modulated(1.0),
    "20 layers": lambda: deep(20),
    "5 layers in bfloat16": lambda: deep(5, torch.bfloat16),
    # until the first step, or with a gradient that is what is wanted
    "a head of zeros": lambda: holding(Mlp(), **{"head.weight": 0.0, "head.bias": 0.0}),
    "a value beside itself": lambda: ratio(lambda m, x, new: new.detach()),
    "a second forward": lambda: ratio(lambda m, x, new: torch.relu(m.policy(x)).squeeze(-1)),
    "a policy beside its copy": beside_a_copy,
}
