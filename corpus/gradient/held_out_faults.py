"""Faults of the gradient, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corpus.cards import Shelf
from corpus.models.small import (
    cnn,
    contrastive,
    gpt,
    ink_loss,
    label_loss,
    mlp,
    multitask,
    plain,
    recommender,
)
from corpus.subject import Subject
from corpus.words import CUT

SHELF = Shelf("gradient", "held out")
fault = SHELF.fault


@fault(
    "feature extractor under no_grad although it trains",
    cnn,
    ("", "conv1", "bn1", "relu1"),
    CUT,
    "missing_gradients",
    why="The extractor gets no gradient and stays as it was drawn.",
)
def _(s: Subject) -> None:
    convolution = s.model.conv1.forward
    s.model.conv1.forward = torch.no_grad()(convolution)
    s.model.between = Tensor.detach


@fault(
    "attention on detached keys, queries and values",
    gpt,
    ("blocks.1*",),
    CUT,
    "missing_gradients",
    why="Attention gets no gradient through what it reads: three projections never learn.",
)
def _(s: Subject) -> None:
    attention = s.model.blocks[1].attention
    for layer in (attention.q, attention.k, attention.v):
        layer.forward = torch.no_grad()(layer.forward)


@fault(
    "one branch of two under no_grad with weights of its own",
    contrastive,
    ("second*", ""),
    CUT,
    "missing_gradients",
    why="The branch has weights of its own, which get no gradient.",
)
def _(s: Subject) -> None:
    s.model.second = plain(64, 64, 16)
    s.model.other = lambda encoder, x: s.model.second(x).detach()


@fault(
    "sign in mid-net",
    mlp,
    ("", "fc1", "relu", "tanh"),
    (*CUT, "zero", "sign", "constant"),
    "missing_gradients",
    why="A sign has a derivative of zero: everything before it never learns.",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: torch.sign(torch.tanh(x) - 0.5)


@fault(
    "features sorted by id, cast to int",
    recommender,
    ("", "user"),
    CUT,
    "missing_gradients",
    why="An integer has no derivative: the features before the cast never learn.",
)
def _(s: Subject) -> None:
    s.model.between = lambda u: u.mul(100).long().float()


@fault(
    "gradient reversal with a factor of zero",
    multitask,
    ("trunk*", ""),
    ("zero", "backward", *CUT),
    why="Times zero the reversed gradient is none: the trunk learns nothing of this task.",
)
def _(s: Subject) -> None:
    def reverse(x: Tensor) -> Tensor:
        x = x * 1.0
        x.register_hook(lambda gradient: -0.0 * gradient)
        return x

    s.model.to_label = s.model.to_ink = reverse
    s.loss = lambda output, target: label_loss(output, target) + ink_loss(output, target)
