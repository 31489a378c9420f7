"""Faults of normalisation, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import math

from torch import nn

from corpus.cards import Shelf
from corpus.models.small import gpt, mlp, resnet
from corpus.subject import Subject

SHELF = Shelf("normalisation", "held out")
fault = SHELF.fault


@fault(
    "infinity in a running variance",
    resnet,
    ("bn", ""),
    ("inf", "running"),
    why="What is divided by infinity is zero: in evaluation every sample is the same.",
)
def _(s: Subject) -> None:
    s.model.eval().bn.running_var[3] = math.inf


@fault(
    "scale of the last LayerNorm is zero",
    gpt,
    ("norm", "head", ""),
    ("zero", "scale", "weight"),
    why="Times zero nothing of the features is left, and nothing before the norm learns.",
)
def _(s: Subject) -> None:
    nn.init.zeros_(s.model.norm.weight)


@fault(
    "GroupNorm with a group for each feature",
    mlp,
    ("norm", "fc2", "", "groupnorm"),
    ("constant", "group", "same", "equal", "one", "single"),
    why="One value less its mean is zero: the output is the shift, whatever the input.",
)
def _(s: Subject) -> None:
    s.model.norm = nn.GroupNorm(64, 64)
    s.model.between = lambda x: s.model.norm(x)
