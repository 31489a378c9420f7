"""Faults of the loss, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.cards import Shelf
from corpus.models.small import (
    autoencoder,
    binary,
    ink_loss,
    label_loss,
    lstm,
    multitask,
    regression,
)
from corpus.subject import Subject
from corpus.words import CUT, MODEL, NONFINITE

SHELF = Shelf("loss", "held out")
fault = SHELF.fault


@fault(
    "loss on a copy made with torch.tensor",
    binary,
    (*MODEL, "head", "fc1"),
    (*CUT, "loss", "torch.tensor"),
    why="A copy made of a tensor carries no graph: nothing learns from the loss.",
)
def _(s: Subject) -> None:
    s.loss = lambda output, target: F.mse_loss(
        output.sigmoid().detach().clone().requires_grad_(), target
    )


@fault(
    "binary cross-entropy by hand on saturated sigmoids",
    binary,
    (*MODEL, "head", "sigmoid"),
    (*NONFINITE, "large"),
    ("finite", "loss", "saturation", "initial_weights"),
    why="The logarithm of a chance that rounds to zero is minus infinity.",
)
def _(s: Subject) -> None:
    s.model.head.weight.data *= 2000
    s.model.finish = torch.sigmoid
    s.loss = lambda p, y: -(y * p.log() + (1 - y) * (1 - p).log()).mean()


@fault(
    "sigmoid of every class before cross_entropy",
    lstm,
    (*MODEL, "head", "sigmoid"),
    ("sigmoid", "probabilit", "logit"),
    "loss",
    why="The loss takes logits: of chances between 0 and 1 it cannot approach zero.",
)
def _(s: Subject) -> None:
    s.model.finish = torch.sigmoid


@fault(
    "sigmoid module before binary_cross_entropy_with_logits",
    binary,
    (*MODEL, "head", "head.1"),
    ("sigmoid", "probabilit", "logit"),
    "loss",
    why="The loss takes the sigmoid itself: twice, all chances lie between 0.5 and 0.73.",
)
def _(s: Subject) -> None:
    s.model.head = nn.Sequential(s.model.head, nn.Sigmoid())


@fault(
    "output (N,) against target (N, 1)",
    regression,
    (*MODEL, "head"),
    ("broadcast", "shape", "(n,", "squeeze"),
    "loss",
    why="The difference broadcasts to (N, N): each prediction is held against every target.",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: x.squeeze(1)
    s.loss = F.smooth_l1_loss


@fault(
    "squared error by hand, (N, 1) less (N,)",
    binary,
    (*MODEL, "head"),
    ("broadcast", "shape", "(n,", "squeeze"),
    why="The difference broadcasts to (N, N): each prediction is held against every target.",
)
def _(s: Subject) -> None:
    s.target = s.target.squeeze(1)
    s.loss = lambda output, target: ((output.sigmoid() - target) ** 2).mean()


@fault(
    "negative squared error",
    autoencoder,
    (*MODEL, "decoder.2", "decoder"),
    ("negat", "sign"),
    "loss",
    why="Training makes the error larger, without end.",
)
def _(s: Subject) -> None:
    s.loss = lambda output, target: -F.mse_loss(output, target)


@fault(
    "probabilities clamped to a constant",
    binary,
    (*MODEL, "head", "sigmoid", "clamp*"),
    ("clamp", "zero", "constant"),
    why="A clamp that is always at work makes the prediction a constant, without a gradient.",
)
def _(s: Subject) -> None:
    s.model.finish = lambda x: torch.sigmoid(x - 30).clamp(1e-4, 1 - 1e-4)
    s.loss = F.binary_cross_entropy


@fault(
    "a task's loss a millionth of the other's",
    multitask,
    ("trunk*", "label", *MODEL),
    ("task", "imbalance", "dominat", "label"),
    "task_balance",
    why="The steps of the trunk follow one task alone.",
)
def _(s: Subject) -> None:
    s.loss = {"label": lambda o, t: 1e-6 * label_loss(o, t), "ink": ink_loss}
