"""Healthy models that look like a fault of the step."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from corpus.cards import Shelf
from corpus.models.small import flat, resnet
from corpus.subject import Subject
from corpus.variants import after_training, changed, with_model

SHELF = Shelf("step")
control = SHELF.control

control("dropout of one half", after_training(with_model(
    lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    flat, F.cross_entropy)))  # fmt: skip


def _freeze_norms(s: Subject) -> None:
    for module in s.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)


control("batch norms frozen in a net that trains", changed(after_training(resnet), _freeze_norms))
control("dropout of 0.9", with_model(lambda: nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.9), nn.Linear(256, 10)),
    flat, F.cross_entropy))  # fmt: skip
