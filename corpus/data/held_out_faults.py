"""Faults of data, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import math

import torch

from corpus.cards import Shelf
from corpus.models.small import bert, cnn, gpt, graph, gru, mlp, vit
from corpus.subject import Subject
from corpus.words import MODEL, RANGE

SHELF = Shelf("data", "held out")
fault = SHELF.fault


@fault(
    "16-bit sound as integers",
    gru,
    (*MODEL, "gru"),
    RANGE,
    "inputs",
    why="Raw values saturate what a net drawn for inputs near one computes of them.",
)
def _(s: Subject) -> None:
    s.inputs = (s.inputs * 8000).round()


@fault(
    "raw bytes into a vision transformer",
    vit,
    (*MODEL, "patches"),
    RANGE,
    "inputs",
    why="Raw values drown the positions and saturate what is computed of them.",
)
def _(s: Subject) -> None:
    s.inputs = ((s.inputs * 6 + 4.9).clamp(0, 16) * 15.9).round()


@fault(
    "normalised twice with ImageNet's numbers",
    cnn,
    (*MODEL, "conv1"),
    (*RANGE, "twice"),
    "inputs",
    why="Standardised with the numbers of raw images, what remains is nearly constant.",
)
def _(s: Subject) -> None:
    unit = (s.inputs * 6 + 4.9).clamp(0, 16) / 16
    s.inputs = ((unit - 0.485) / 0.229 - 0.485) / 0.229


@fault(
    "the loader gives ones",
    mlp,
    (*MODEL, "fc1"),
    ("constant", "same", "equal"),
    why="All samples are the same, and the net can learn nothing but a constant.",
)
def _(s: Subject) -> None:
    s.inputs = torch.ones_like(s.inputs)


@fault(
    "every token is unknown",
    bert,
    (*MODEL, "bert.embeddings*", "bert"),
    ("constant", "same", "padding", "token"),
    why="All samples are the same, and the net can learn nothing but a constant.",
)
def _(s: Subject) -> None:
    s.inputs = {**s.inputs, "input_ids": torch.full_like(s.inputs["input_ids"], 3)}


@fault(
    "an infinity in the features",
    graph,
    (*MODEL, "layers.0"),
    ("inf", "input"),
    why="One infinity makes infinity or NaN of all that is computed from it.",
)
def _(s: Subject) -> None:
    s.inputs[0][2, 5] = math.inf


@fault(
    "positions as large as they are added to the embedding",
    gpt,
    ("", "blocks.0*", "norm", "embedding", "position"),
    ("scale", "position", "large", "embedding", "constant", "same"),
    why="Positions that count up to the length drown the embedding they are added to.",
)
def _(s: Subject) -> None:
    s.model.position.weight.data = 10 * torch.arange(32.0)[:, None] * torch.arange(32.0)
