"""Faults of normalisation."""

from __future__ import annotations

import math

import torch
from torch import nn

from corpus.cards import Shelf
from corpus.models.fields import RMSNorm, llama, masked, sentences
from corpus.models.perception import bottleneck
from corpus.models.rare import diffusion
from corpus.models.small import cnn, gru, resnet, unet, vit
from corpus.subject import Subject
from corpus.words import NONFINITE, NONFINITE_OR_ROOT

SHELF = Shelf("normalisation")
fault = SHELF.fault


@fault(
    "LayerNorm without eps on padding",
    vit,
    ("norm",),
    (*NONFINITE, "eps", "variance"),
    ("finite", "normalization"),
    why="Rows of padding have no variance, and without epsilon that is 0 / 0.",
)
def _(s: Subject) -> None:
    s.model.norm.eps = 0.0
    blocks = s.model.blocks.forward
    s.model.blocks.forward = lambda x: blocks(x) * (torch.arange(17) < 12)[:, None]
    s.model.pool = lambda x: x.mean(1)


@fault(
    "running variance of zero",
    cnn,
    ("bn1",),
    ("running", "variance", "zero"),
    "normalization",
    why="What is divided by the root of epsilon alone is multiplied by 300.",
)
def _(s: Subject) -> None:
    s.model.eval().bn1.running_var.zero_()


@fault(
    "running variance negative",
    resnet,
    ("blocks.1.bn1",),
    ("running", "variance", "negative", "nan"),
    why="The root of a negative variance is NaN.",
)
def _(s: Subject) -> None:
    s.model.eval().blocks[1].bn1.running_var.fill_(-1.0)


@fault(
    "running mean is NaN",
    unet,
    ("down1.1",),
    ("running", "nan"),
    why="What is less NaN is NaN, in evaluation alone.",
)
def _(s: Subject) -> None:
    s.model.eval().down1[1].running_mean.fill_(math.nan)


@fault(
    "running statistics far from the batch",
    cnn,
    ("bn2",),
    ("running", "far", "batch"),
    "normalization",
    why="In evaluation the layer normalises with the numbers of other data.",
)
def _(s: Subject) -> None:
    s.model.eval().bn2.running_mean.fill_(50.0)


@fault(
    "scale of a norm is zero",
    cnn,
    ("bn2", "relu2"),
    ("zero", "scale", "weight"),
    why="Each channel is its shift, whatever the input; in front of a ReLU it gets no gradient.",
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.bn2.weight)


@fault(
    "LayerNorm over a single feature",
    gru,
    ("score", "score.*"),
    ("one", "single", "constant", "size 1", "feature"),
    why="One value less its mean is zero: the output is the shift, whatever the input.",
)
def _(s: Subject) -> None:
    s.model.score = nn.Sequential(nn.Linear(32, 1), nn.LayerNorm(1))


@fault(
    "epsilon of a group norm is 100",
    diffusion,
    ("norm",),
    ("eps",),
    why="Beside such an epsilon the variance counts for nothing: the norm does not normalise.",
)
def _(s: Subject) -> None:
    s.model.norm.eps = 100.0


@fault(
    "norm weights of zero, from a code that adds one",
    llama,
    "*norm*",
    ("zero", "scale"),
    why="Times zero nothing of the features is left, and nothing before the norm learns.",
)
def _(s: Subject) -> None:
    for module in s.model.modules():
        if isinstance(module, RMSNorm):
            nn.init.zeros_(module.weight)


@fault(
    "epsilon of a norm as large as what it divides",
    masked,
    "norm",
    ("eps",),
    why="Beside such an epsilon the variance counts for nothing: the norm hardly normalises.",
)
def _(s: Subject) -> None:
    for embedding in (s.model.embedding, s.model.position):
        nn.init.normal_(embedding.weight, std=0.02)
    s.model.norm.eps = 1.0


@fault(
    "norm without epsilon on padding of zeros",
    sentences,
    ("norm", "norm*"),
    (*NONFINITE_OR_ROOT, "eps"),
    why="Padding has a length of zero, and without epsilon that is 0 / 0.",
)
def _(s: Subject) -> None:
    s.model.norm.eps = 0.0


@fault(
    "a group of one channel on one pixel",
    bottleneck,
    ("deep_norm", "silu*", "deep"),
    ("group", "constant", "zero", "single", "one"),
    why="One value less its mean is zero: the output is the shift, whatever the input.",
)
def _(s: Subject) -> None:
    s.model.deep_norm = nn.GroupNorm(32, 32)
