"""Faults of wiring, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.small import ViT, autoencoder, binary, gru, lstm, regression, vit
from corpus.subject import Subject
from corpus.words import CUT, MODEL

SHELF = Shelf("wiring", "held out")
fault = SHELF.fault


@fault(
    "ReLU on a regression's output, all below zero",
    regression,
    (*MODEL, "head", "relu_2"),
    ("dead", "negative", "bias"),
    why="Below zero a ReLU gives and passes nothing: each prediction is zero and stays zero.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.head.bias, -4.0)
    s.model.finish = F.relu


@fault(
    "result of a layer discarded",
    lstm,
    ("", "lstm"),
    ("not used", "unused", "reach", "discard", "never", *CUT),
    why="The layer runs and nothing reads its result, so that it never learns.",
)
def _(s: Subject) -> None:
    s.model.head = nn.Linear(16, 10)
    s.model.forward = lambda ids: s.model.head(_discard(s.model.lstm, s.model.embedding(ids)))


def _discard(layer: nn.Module, x: Tensor) -> Tensor:
    layer(x)
    return x.mean(1)


@fault(
    "softmax over the batch in attention pooling",
    gru,
    ("softmax", "", "score"),
    ("batch", "dim"),
    why="Samples compete with each other for attention, in place of places in one sample.",
)
def _(s: Subject) -> None:
    s.model.dim = 0


@fault(
    "softmax of a single logit",
    binary,
    (*MODEL, "head", "softmax"),
    ("one", "dim", "constant", "size 1", "single"),
    why="A softmax over one value is always one: the prediction is a constant.",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: torch.softmax(x, dim=1)
    s.loss = F.binary_cross_entropy


@fault(
    "pooled over batch and time at once",
    lstm,
    ("", "head", "lstm"),
    ("batch", "same", "equal", "all samples", "every sample"),
    why="All samples get the same features, and the net can learn nothing but a constant.",
)
def _(s: Subject) -> None:
    s.model.pool = lambda x: x.mean((0, 1)).expand(len(x), -1)


@fault(
    "decoder reads nothing of the code",
    autoencoder,
    ("decoder*", "", "encoder*"),
    ("same", "equal", "zero", "all samples", "dead", "constant", "init"),
    why="Without the code all samples decode to the same, and the encoder never learns.",
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.decoder[0].weight)


@fault(
    "branches multiplied instead of added",
    vit,
    ("blocks*", "patches", ""),
    ("vanish", "shrink", "zero", "small", "decay", "scale", "residual", "explod", "grow"),
    why="Products in place of sums shrink or grow with every block, and no way leads past one.",
)
def _(s: Subject) -> None:
    s.model = ViT(depth=6)
    for block in s.model.blocks:
        block.join = torch.mul
