"""Healthy models that look like a fault of the gradient, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import functools

import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from corpus.cards import Shelf
from corpus.models.held_out import Distilled, Gumbel, Prompted, Quantizer, SimSiam, distillation
from corpus.models.small import flat, gpt, language_loss, lstm, next_words, vit
from corpus.variants import after_training, changed, with_model

SHELF = Shelf("gradient", "held out")
control = SHELF.control

control("codebook with straight-through gradients", after_training(with_model(
    Quantizer, lambda n: (flat(n)[0],) * 2,
    lambda output, target: F.mse_loss(output[0], target) + output[1])))  # fmt: skip

control("SimSiam: gradient stopped on purpose", with_model(
    SimSiam, lambda n: ((flat(n)[0], flat(n)[0] + 0.1), None), None))  # fmt: skip

control("checkpointed blocks", changed(gpt, lambda s: [
    setattr(block, "forward", functools.partial(checkpoint, block.forward, use_reentrant=False))
    for block in s.model.blocks]))  # fmt: skip

control("LSTM frozen under a fresh head", changed(after_training(lstm), lambda s: (
    s.model.requires_grad_(False), s.model.head.requires_grad_(True),
    s.model.head.reset_parameters())))  # fmt: skip

control("distillation at temperature 4", with_model(Distilled, flat, distillation))
control("learnt prompt before a frozen net", with_model(
    Prompted, next_words, lambda output, ids: language_loss(output, ids[:, :24]), 16))  # fmt: skip

control("Gumbel softmax, hard", with_model(Gumbel, flat, F.cross_entropy))
control("vit, trained, frozen but its norms", changed(after_training(vit), lambda s: [
    module.requires_grad_(isinstance(module, nn.LayerNorm))
    for module in s.model.modules() if not list(module.children())]))  # fmt: skip
