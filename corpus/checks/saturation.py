"""Bounded activations and softmax that are held where they are flat."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Net, batch, holding, scaled

CHECK = "saturation"


def bounded(function, factor=1.0, bias=None):
    """Return a bounded function between two linear layers, the first of which is scaled."""
    first = holding(nn.Linear(16, 32), weight=scaled(factor))
    if bias is not None:
        holding(first, bias=bias)
    return Net(lambda m, x: m.head(function(m.fc(x))), fc=first, head=(32, 4))


def attention(scale, *, fused, mask=-math.inf, tokens=16):
    """Return causal self-attention over tokens of width 64, then a linear layer."""

    def forward(m, x):
        q, k, v = m.q(x), m.k(x), m.v(x)
        if fused:
            return m.out(F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True))
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores = q @ k.transpose(-1, -2) * scale
        return m.out(torch.softmax(scores.masked_fill(later, mask), -1) @ v)

    sharp = [nn.init.orthogonal_(nn.Linear(64, 64).weight, 2.0) for _ in range(2)]
    q, k = (holding(nn.Linear(64, 64), weight=lambda w, s=s: w.copy_(s)) for s in sharp)
    return Net(forward, q=q, k=k, v=(64, 64), out=(64, 8)), 1.5 * batch(8, tokens, 64)


def switch(choices, scores=lambda x: 1e4 * x):
    """Return a choice by a softmax, and what it is for."""
    return Net(
        lambda m, x: m.out(torch.softmax(scores(m.gate(x)), 1)), gate=(16, choices),
        out=(choices, 4),
    )  # fmt: skip


def actor_critic():
    """Return a policy beside a value, each of them sure of itself."""

    def forward(m, x):
        h = F.relu(m.trunk(x))
        return torch.softmax(m.policy(h), -1), torch.sigmoid(1e4 * m.value(h))

    policy = holding(nn.Linear(16, 4), weight=scaled(1e4))
    return Net(forward, trunk=(16, 16), policy=policy, value=(16, 1))


BOUNDED = {f: getattr(F, f) for f in ("sigmoid", "tanh", "hardtanh", "hardsigmoid", "relu6")}
MASKS = {"inf": -math.inf, "1e4": -1e4, "the least number": torch.finfo(torch.float32).min}
FUSED, WRITTEN = "scaled_dot_product_attention", "softmax"
FAULTS = {
    # weights a thousand times too large are named as the cause
    **{
        name: (
            lambda f=f, b=5000.0 if name == "relu6" else None: bounded(f, 1e3, b), "fail", name,
            "'fc'",
        )
        for name, f in BOUNDED.items()
    },
    "large inputs": (
        lambda: (bounded(torch.tanh), 1e4 * batch()), "fail", "tanh", "normalise",
    ),
    "four samples": (lambda: (bounded(torch.tanh, 1e3), batch(4, 16)), "unsure", "tanh"),
    # without 1/sqrt(d) each output is one value; a mask changes nothing
    "fused attention": (lambda: attention(8.0, fused=True), "fail", FUSED, "sqrt(d)"),
    **{
        f"attention, masked by {name}": (
            lambda mask=mask: attention(8.0, fused=False, mask=mask), "fail", WRITTEN, "sqrt(d)",
        )
        for name, mask in MASKS.items()
    },
    "a choice among eight": (lambda: switch(8), "fail", "softmax"),
}  # fmt: skip
HEALTHY = {
    **{name: lambda f=f: bounded(f) for name, f in BOUNDED.items()},
    "fused attention": lambda: attention(64**-0.5, fused=True),
    **{
        f"attention, masked by {name}": lambda mask=mask: attention(0.125, fused=False, mask=mask)
        for name, mask in MASKS.items()
    },
    # over one token attention is one-hot whatever it computes, and a switch by design
    "attention over one token": lambda: attention(8.0, fused=True, tokens=1),
    "a choice between two": lambda: switch(2),
    # a router that has learnt to be sure, on scores that can still change
    "sharp attention with small scores": lambda: switch(
        4, lambda x: 6.0 * F.one_hot(x.argmax(1), 4)
    ),
    # what no trainable layer follows is the model's answer: a head beside it changes nothing
    "an output that is sure of itself": actor_critic,
}
