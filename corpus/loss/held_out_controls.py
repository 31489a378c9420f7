"""Healthy models that look like a fault of the loss, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from corpus.cards import Shelf
from corpus.models.held_out import Flow, focal, natural_targets
from corpus.models.small import MLP, flat, patients, plain
from corpus.variants import after_training, with_model

SHELF = Shelf("loss", "held out")
control = SHELF.control

control(
    "normalising flow, trained",
    after_training(with_model(Flow, lambda n: (patients(n)[0], None), None)),
)

control("Poisson likelihood", with_model(
    lambda: MLP(10, 32, 1), patients,
    lambda output, target: F.poisson_nll_loss(output, (target + 3).round())))  # fmt: skip

control("soft targets", with_model(
    MLP, flat, lambda output, labels: F.cross_entropy(
        output, 0.9 * F.one_hot(labels, 10).float() + 0.01)))  # fmt: skip

control("several labels at once", with_model(
    lambda: MLP(64, 64, 40), flat, lambda output, labels: F.binary_cross_entropy_with_logits(
        output, (torch.arange(40) % 10 == labels[:, None]).float())))  # fmt: skip

control("policy gradient: negative loss", with_model(
    lambda: MLP(64, 64, 4), flat,
    lambda output, labels: (output.log_softmax(1)[:, 0] * (labels - 2.0)).mean()))  # fmt: skip

control("targets in the hundreds", after_training(
    with_model(lambda: MLP(10, 32, 1), natural_targets, F.l1_loss), 300, 1e-2))  # fmt: skip

control("metric learning with triplets", with_model(
    lambda: plain(64, 64, 16), flat, lambda output, labels: F.triplet_margin_loss(
        output, output.roll(1, 0), output.roll(2, 0))))  # fmt: skip

control("focal loss", after_training(with_model(MLP, flat, focal)))
control("class weights of 100 to 1", after_training(with_model(
    MLP, flat, functools.partial(F.cross_entropy, weight=torch.logspace(-1, 1, 10)))))  # fmt: skip
