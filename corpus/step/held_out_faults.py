"""Faults of the step, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from corpus.cards import Shelf
from corpus.models.small import cnn, ink_loss, label_loss, mlp, multitask
from corpus.subject import Subject, trained

SHELF = Shelf("step", "held out")
fault = SHELF.fault


@fault(
    "layers in a plain dictionary",
    multitask,
    ("", "trunk*"),
    ("dict", "regist", "moduledict", "named_parameters"),
    "unregistered_parameters",
    why="What is not registered is not among `parameters()`: no optimizer has it.",
)
def _(s: Subject) -> None:
    heads = {"label": nn.Linear(32, 10), "ink": nn.Linear(32, 1)}
    del s.model.label, s.model.ink
    s.model.heads = heads
    s.model.forward = lambda x: tuple(head(s.model.trunk(x)) for head in s.model.heads.values())
    s.loss = lambda output, target: label_loss(output, target) + ink_loss(output, target)


@fault(
    "momentum of zero: statistics never updated",
    cnn,
    ("bn2",),
    ("running", "far", "never", "batch"),
    "normalization",
    why="The statistics are never updated: evaluation normalises with zero and one.",
)
def _(s: Subject) -> None:
    s.model = trained(cnn).model.eval()
    nn.init.constant_(s.model.conv2.bias, 40.0)  # which the norm would take away, had it seen it
    s.model.bn2.reset_running_stats()


@fault(
    "functional dropout on in eval",
    mlp,
    ("", "dropout", "relu"),
    ("train", "eval", "dropout"),
    why="In evaluation the same input gives another result each time.",
)
def _(s: Subject) -> None:
    s.model.eval()
    s.model.between = lambda x: F.dropout(x, 0.5)
