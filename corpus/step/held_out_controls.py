"""Healthy models that look like a fault of the step, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

from corpus.cards import Shelf
from corpus.models.small import sequential
from corpus.subject import Subject
from corpus.variants import after_training, changed

SHELF = Shelf("step", "held out")
control = SHELF.control


def _prune(s: Subject) -> None:
    for layer in s.model[::2]:
        layer.weight.data[layer.weight.abs() < layer.weight.abs().quantile(0.8)] = 0


control("four fifths of the weights pruned", changed(after_training(sequential, 200), _prune))
