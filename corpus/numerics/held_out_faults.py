"""Faults of numerics, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from corpus.cards import Shelf
from corpus.models.small import contrastive, gpt, mlp, recommender, seq2seq, vae, vit
from corpus.subject import Subject
from corpus.words import NONFINITE

SHELF = Shelf("numerics", "held out")
fault = SHELF.fault


@fault(
    "distance of a point to itself, its root's gradient",
    contrastive,
    ("encoder*", ""),
    NONFINITE,
    "finite",
    why="The root's derivative at zero is infinite.",
)
def _(s: Subject) -> None:
    s.inputs = (s.inputs[0], s.inputs[0])
    s.model.forward = lambda a, b: (
        -((s.model.encoder(a)[:, None] - s.model.encoder(b)) ** 2).sum(-1).sqrt()
    )


@fault(
    "acos of a cosine of 1",
    contrastive,
    ("encoder*", ""),
    NONFINITE,
    "finite",
    why="The derivative of acos at 1 is infinite.",
)
def _(s: Subject) -> None:
    s.inputs = (s.inputs[0], s.inputs[0])
    s.model.temperature = 1.0
    forward = s.model.forward
    s.model.forward = lambda a, b: -torch.acos(forward(a, b).clamp(-1, 1))


@fault(
    "embedding of zeros normalised without eps",
    recommender,
    ("", "user", "mlp*"),
    NONFINITE,
    "finite",
    why="A length of zero has no direction: 0 / 0 is NaN.",
)
def _(s: Subject) -> None:
    s.model.user.weight.data[:] = 0.0
    s.model.between = lambda u: u / u.norm(dim=1, keepdim=True)


@fault(
    "rows of attention masked out wholly",
    seq2seq,
    ("cross*",),
    (*NONFINITE, "mask"),
    why="A softmax over nothing but -inf is 0 / 0: NaN.",
)
def _(s: Subject) -> None:
    kept = torch.ones(16, 1, 1, 16, dtype=torch.bool)
    kept[5] = False
    s.model.cross.mask = lambda scores: scores.masked_fill(~kept, -math.inf)


@fault(
    "float16 attention overflows in its scores",
    gpt,
    ("blocks.0.attention*", "blocks.0*"),
    (*NONFINITE, "float16", "range"),
    why="A score above 65,504 is infinite in float16.",
)
def _(s: Subject) -> None:
    s.model.half()
    for layer in (s.model.blocks[0].attention.q, s.model.blocks[0].attention.k):
        layer.weight.data *= 800


@fault(
    "weights below float16's normal numbers",
    mlp,
    ("fc2", "relu_1"),
    ("underflow", "subnormal", "float16", "small", "range", "init"),
    why="Below 6e-5 float16 loses digits, and below 6e-8 it has nothing but zero.",
)
def _(s: Subject) -> None:
    s.model.fc2.weight.data *= 1e-5
    nn.init.zeros_(s.model.fc2.bias)
    s.model.half()
    s.inputs = s.inputs.half()


@fault(
    "a checkpoint with infinity in a bias",
    vit,
    ("blocks.1.mlp.0", "blocks.1.mlp*"),
    ("inf", "parameter", "bias", "checkpoint"),
    "finite",
    why="Infinity in a parameter makes infinity or NaN of all that is computed from it.",
)
def _(s: Subject) -> None:
    s.model.blocks[1].mlp[0].bias.data[0] = math.inf


@fault(
    "log-variance of 200 at the start",
    vae,
    ("log_variance", "", "decoder*"),
    (*NONFINITE, "large", "bias", "init"),
    why="The exponential of 200 is beyond float32's range once it is squared.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.log_variance.bias, 200.0)
