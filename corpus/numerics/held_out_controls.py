"""Healthy models that look like a fault of numerics, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from corpus.cards import Shelf
from corpus.models.held_out import Glu
from corpus.models.small import flat
from corpus.variants import with_model

SHELF = Shelf("numerics", "held out")
control = SHELF.control

control("GLU, pre-norm, 8 blocks", with_model(
    lambda: nn.Sequential(nn.Linear(64, 32), *(Glu(32) for _ in range(8)), nn.Linear(32, 10)),
    flat, F.cross_entropy))  # fmt: skip
