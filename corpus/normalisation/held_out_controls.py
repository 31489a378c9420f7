"""Healthy models that look like a fault of normalisation, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

from torch import nn

from corpus.cards import Shelf
from corpus.models.small import sequential
from corpus.variants import after_training, changed

SHELF = Shelf("normalisation", "held out")
control = SHELF.control

control("weight norm", after_training(changed(sequential, lambda s: [
    nn.utils.parametrizations.weight_norm(layer) for layer in s.model[::2]])))  # fmt: skip

control("spectral norm", changed(sequential, lambda s: [
    nn.utils.parametrizations.spectral_norm(layer) for layer in s.model[::2]]))  # fmt: skip
