"""Healthy models that look like a fault of initialisation, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from corpus.cards import Shelf
from corpus.models.held_out import Flow, Highway, ZeroConv
from corpus.models.small import deep, flat, gpt, images, patients
from corpus.models.usual import adapt
from corpus.subject import Subject
from corpus.variants import after_training, as_bfloat16, changed, with_model

SHELF = Shelf("initialisation", "held out")
control = SHELF.control

control("convolution of zeros beside a frozen trunk", with_model(
    ZeroConv, lambda n: (images(n)[0],) * 2, F.mse_loss, 32))  # fmt: skip

control(
    "normalising flow, last layer zero", with_model(Flow, lambda n: (patients(n)[0], None), None)
)

control("adapters in bfloat16", as_bfloat16(changed(after_training(gpt), adapt)))
control("highway with gates mostly closed", with_model(
    lambda: nn.Sequential(nn.Linear(64, 32), Highway(32), Highway(32), nn.Linear(32, 10)),
    flat, F.cross_entropy))  # fmt: skip


def _identity(s: Subject) -> None:
    for layer in s.model[2:-1:2]:
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)


control("hidden layers that start as the identity", changed(deep, _identity))
