"""Faults of normalisation, written before the checks that judge them."""

from __future__ import annotations

from torch import nn

from corpus.cards import Shelf
from corpus.models.written_out import patient_model
from corpus.subject import Subject

SHELF = Shelf("normalisation", "blind")
fault = SHELF.fault

# ---- graphs, sets, tables and recommendations ----------------------------------------------------


@fault(
    "norm over a single feature",
    patient_model,
    ("tasks.benign*",),
    ("norm", "constant", "single", "one feature", "size 1"),
    why="One value less its mean is zero: the output is the shift, whatever the input.",
)
def _(s: Subject) -> None:
    s.model.tasks["benign"] = nn.Sequential(nn.Linear(32, 1), nn.LayerNorm(1))
