"""Healthy models that look like a fault of data, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import torch.nn.functional as F

from corpus.cards import Shelf
from corpus.models.held_out import skewed
from corpus.models.small import CNN, MLP, images
from corpus.variants import after_training, with_model

SHELF = Shelf("data", "held out")
control = SHELF.control

control("skewed positive features", after_training(
    with_model(lambda: MLP(10, 32, 1), skewed, F.mse_loss)))  # fmt: skip

control("binary images", with_model(
    CNN, lambda n: (lambda x, y: ((x > 0).float(), y))(*images(n)), F.cross_entropy))  # fmt: skip
