"""Faults of the step, written before the checks that judge them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from corpus.cards import Shelf
from corpus.models.written_out import mobilenet, sparse_classifier, wire
from corpus.subject import Subject
from corpus.words import NEVER

SHELF = Shelf("step", "blind")
fault = SHELF.fault

# ---- convolutional nets --------------------------------------------------------------------------


@fault(
    "branch only in evaluation",
    mobilenet,
    ("features.2", "features.2.se*"),
    NEVER,
    why="What is left out in training never learns, and is at work in evaluation alone.",
)
def _(s: Subject) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.expand(x)
        if not self.training:
            y = self.se(y)
        return x + self.bn(self.project(y))

    wire(s.model.features[2], forward)


# ---- nets of several parts -----------------------------------------------------------------------


@fault(
    "output layer kept in a list",
    sparse_classifier,
    ("",),
    ("regist", "python list", "plain list", "not a parameter", "not among", "optimizer"),
    why="What is not registered is not among `parameters()`: no optimizer has it.",
)
def _(s: Subject) -> None:
    outlet = s.model.outlet
    del s.model.outlet
    s.model.outlets = [outlet]

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x, balance_a = self.sparse_a(self.inlet(x))
        x, balance_b = self.sparse_b(x)
        return self.outlets[-1](x), balance_a + balance_b

    wire(s.model, forward)
