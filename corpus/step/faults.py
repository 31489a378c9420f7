"""Faults of the step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.models.fields import (
    adapters,
    crf,
    deepfm,
    dueling,
    prompted,
    tabnet,
    temporal_difference,
    two_towers,
)
from corpus.models.perception import colours, convnext, segmenter, unmoved
from corpus.models.small import autoencoder, cnn, gpt, mlp, resnet
from corpus.subject import Subject
from corpus.words import CUT_OR_ONE_HOT, MODEL, REGISTERED

SHELF = Shelf("step")
fault = SHELF.fault


@fault(
    "layers in a plain list",
    autoencoder,
    ("", "encoder"),
    ("list", "regist", "modulelist", "named_parameters"),
    "unregistered_parameters",
    why="What is not registered is not among `parameters()`: no optimizer has it.",
)
def _(s: Subject) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(64, 32), nn.Linear(32, 8)]

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](F.relu(self.layers[0](x)))

    s.model.encoder = Encoder()


@fault(
    "weight as a plain tensor",
    mlp,
    ("",),
    ("regist", "nn.parameter", "named_parameters", "plain tensor"),
    "unregistered_parameters",
    why="What is not a parameter is not among `parameters()`: no optimizer trains it.",
)
def _(s: Subject) -> None:
    s.model.scale = torch.ones(64, requires_grad=True)
    s.model.between = lambda x: x * s.model.scale


@fault(
    "parameter multiplied where it is made",
    gpt,
    ("", "blocks.0", "blocks.0.mlp"),
    ("regist", "nn.parameter", "named_parameters"),
    "unregistered_parameters",
    why="The product is no leaf and not registered: no optimizer trains it.",
)
def _(s: Subject) -> None:
    mlp = s.model.blocks[0].mlp
    mlp.scale = nn.Parameter(torch.ones(32)) * 0.5
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * mlp.scale


@fault(
    "batch norm left in training mode",
    resnet,
    ("blocks.0.bn1",),
    ("train", "eval"),
    why="In evaluation a sample's result depends on the others in its batch.",
)
def _(s: Subject) -> None:
    s.model.eval().blocks[0].bn1.train()


@fault(
    "dropout left in training mode",
    cnn,
    ("dropout",),
    ("train", "eval", "dropout"),
    why="In evaluation the same input gives another result each time.",
)
def _(s: Subject) -> None:
    s.model.eval().dropout.train()


@fault(
    "transitions as a plain tensor",
    crf,
    ("",),
    REGISTERED,
    "unregistered_parameters",
    why="What is not a parameter is not among `parameters()`: no optimizer trains it.",
)
def _(s: Subject) -> None:
    del s.model.transitions
    s.model.transitions = torch.zeros(5, 5, requires_grad=True)


@fault(
    "prompt wrapped anew in every forward",
    prompted,
    ("",),
    (*CUT_OR_ONE_HOT, "copied", "gradient"),
    why="Each forward makes a new parameter, which no optimizer has and which gets the gradient.",
)
def _(s: Subject) -> None:
    s.model.take = lambda prompt: nn.Parameter(prompt.data)


@fault(
    "adapters kept in a dictionary",
    adapters,
    ("", "blocks*"),
    REGISTERED,
    "unregistered_parameters",
    why="What is not registered is not among `parameters()`: no optimizer has it.",
)
def _(s: Subject) -> None:
    class Kept(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block
            self.parts = {"down": nn.Linear(32, 8), "up": nn.Linear(8, 32)}

        def forward(self, x: Tensor) -> Tensor:
            x = self.block(x)
            return x + self.parts["up"](F.gelu(self.parts["down"](x)))

    for index, adapter in enumerate(s.model.blocks):
        s.model.blocks[index] = Kept(adapter.block)


@fault(
    "tables of the fields in a list",
    deepfm,
    ("",),
    REGISTERED,
    "unregistered_parameters",
    why="What is not registered is not among `parameters()`: no optimizer has it.",
)
def _(s: Subject) -> None:
    tables = [nn.Embedding(20, 8) for _ in range(6)]
    del s.model.factors
    s.model.tables, s.model.factors = tables, None
    s.model.look = lambda _, ids: torch.stack(
        [table(ids[:, i] - 20 * i) for i, table in enumerate(tables)], 1
    )


@fault(
    "a dead first layer in one tower, after a step far too large",
    two_towers,
    "item*",
    ("dead", "zero", "bias", "large"),
    why="A step far too large took the units below zero, where they give and pass nothing.",
)
def _(s: Subject) -> None:
    s.model.item[1][0].bias.data -= 25.0


@fault(
    "momentum of zero: running statistics stay as they were made",
    tabnet,
    ("bn",),
    ("running", "updated", "batch", "far"),
    "normalization",
    why="The statistics are never updated: evaluation normalises with zero and one.",
)
def _(s: Subject) -> None:
    s.inputs = s.inputs * 40 + 300
    s.model.eval()
    for norm in s.model.norms:
        norm.num_batches_tracked.fill_(80)
    s.model.bn.num_batches_tracked.fill_(80)


@fault(
    "trained with a learning rate of 5",
    dueling,
    ("trunk*", "relu", "value", "advantage", *MODEL),
    ("dead", "large", "zero", "negative", "bias", "learning rate"),
    why="Steps far too large leave units dead and weights huge.",
)
def _(s: Subject) -> None:
    optimizer = torch.optim.Adam(s.model.parameters(), lr=5.0)
    for _ in range(20):
        optimizer.zero_grad()
        temporal_difference(s.model(s.inputs), s.target).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@fault(
    "layer scales that are plain tensors",
    convnext,
    ("blocks.*", ""),
    ("regist", "parameter"),
    why="What is not a parameter is not among `parameters()`: no optimizer trains it.",
)
def _(s: Subject) -> None:
    for block in s.model.blocks:
        del block.scale
        block.scale = torch.full((24,), 0.1, requires_grad=True)


@fault(
    "norms with a momentum of 0, after training, in evaluation",
    unmoved,
    ("bn", "blocks.*"),
    ("running", "momentum", "statistics", "update"),
    why="The statistics are never updated: evaluation normalises with zero and one.",
)
def _(s: Subject) -> None:
    for module in s.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    s.model.train()
    optimizer = torch.optim.Adam(s.model.parameters(), lr=3e-3)
    for _ in range(20):
        images, labels = colours(32)
        optimizer.zero_grad()
        F.cross_entropy(s.model(images), labels).backward()
        optimizer.step()
    optimizer.zero_grad()
    s.model.eval()


@fault(
    "lateral convolutions in a plain list",
    segmenter,
    ("", "lateral*"),
    ("regist", "list"),
    why="What is not registered is not among `parameters()`: no optimizer has it.",
)
def _(s: Subject) -> None:
    convolutions = list(s.model.lateral)
    del s.model.lateral
    s.model.lateral = convolutions
