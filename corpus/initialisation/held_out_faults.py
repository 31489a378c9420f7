"""Faults of initialisation, held out.

Read them only after the limits are fixed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.cards import Shelf
from corpus.models.small import (
    autoencoder,
    bert,
    cnn,
    deep,
    gpt,
    gru,
    moe,
    plain,
    regression,
    sequential,
    unet,
)
from corpus.subject import Subject
from corpus.words import ANY, MODEL

SHELF = Shelf("initialisation", "held out")
fault = SHELF.fault


@fault(
    "head and the layer before it both zero",
    regression,
    ("fc2", "head", "relu_1"),
    ("zero", "init"),
    why="Behind zeros nothing depends on the input, and two zeros pass no gradient to each other.",
)
def _(s: Subject) -> None:
    for layer in (s.model.fc2, s.model.head):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


@fault(
    "convolutions drawn with std 1",
    unet,
    ("middle*", "join*", "down*", "up*", "out", *MODEL),
    ("init", "scale", "large", "std", "weight"),
    why="Each layer multiplies the deviation by the root of its fan-in.",
)
def _(s: Subject) -> None:
    for module in s.model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight)
        if isinstance(module, nn.Sequential):
            module[1] = nn.Identity()


@fault(
    "units of an MLP block identical",
    gpt,
    ("blocks.0.mlp*",),
    ("constant", "identical", "symmetr", "equal"),
    why="Equal units get equal gradients, so that the layer has the capacity of one unit.",
)
def _(s: Subject) -> None:
    s.model.blocks[0].mlp[0].weight.data[:] = s.model.blocks[0].mlp[0].weight.data[0].clone()
    nn.init.zeros_(s.model.blocks[0].mlp[0].bias)
    nn.init.constant_(s.model.blocks[0].mlp[2].weight, 0.02)


@fault(
    "one query weight 100 times too large",
    bert,
    ("*layer.0.attention*",),
    ("saturat", "one-hot", "scale", "large", "weight", "init"),
    why="The softmax is one-hot from the start and passes no gradient to queries and keys.",
)
def _(s: Subject) -> None:
    attention = s.model.bert.encoder.layer[0].attention.self
    for layer in (attention.query, attention.key):
        layer.weight.data *= 100


@fault(
    "weight norm with a gain of zero",
    sequential,
    ("2*", "3"),
    ("zero", "gain", "init", "scale"),
    why="Times zero the layer gives its bias alone, whatever the input.",
)
def _(s: Subject) -> None:
    nn.utils.parametrizations.weight_norm(s.model[2])
    nn.init.zeros_(s.model[2].parametrizations.weight.original0)
    nn.init.zeros_(s.model[2].bias)


@fault(
    "bottleneck of ReLU dead",
    autoencoder,
    ("encoder.2", "", "relu"),
    ("bias", "dead", "negative"),
    why="Below zero a ReLU gives and passes nothing: no sample gets through the bottleneck.",
)
def _(s: Subject) -> None:
    nn.init.constant_(s.model.encoder[2].bias, -30.0)
    s.model.between = F.relu


@fault(
    "Hardswish dead by a shift",
    cnn,
    ("bn1", "relu1"),
    ("dead", "negative", "bias", "shift", "saturat"),
    why="Below -3 the function gives and passes nothing, so that no step can bring its units back.",
)
def _(s: Subject) -> None:
    s.model.relu1 = nn.Hardswish()
    nn.init.constant_(s.model.bn1.bias, -12.0)


@fault(
    "tanh output layer driven to its ends",
    autoencoder,
    ("decoder.2", "tanh", *MODEL),
    ("saturat", "large", "scale", "weight"),
    why="At its ends tanh is flat and passes no gradient.",
)
def _(s: Subject) -> None:
    s.model.decoder[2].weight.data *= 2000
    s.model.finish = torch.tanh


@fault(
    "gate shut for good",
    moe,
    ("", "sigmoid", "stem"),
    ("saturat", "zero", "gate", "dead", "constant", "vanish"),
    why="A gate far below zero is shut and has no slope to open it.",
)
def _(s: Subject) -> None:
    s.model.between = lambda x: x * torch.sigmoid(x.detach() * 0 - 120.0)


@fault(
    "thirty plain layers with PyTorch's own start",
    deep,
    ANY,
    ("vanish", "shrink", "same", "equal", "small", "init", "decay"),
    why="The default start loses variance at every layer: nothing arrives at the thirtieth.",
)
def _(s: Subject) -> None:
    s.model = plain(64, *[64] * 30, 10)


@fault(
    "tanh recurrence with weights of 3",
    gru,
    ("gru",),
    ("saturat", "large", "init", "explod", "scale"),
    why="The state lies where tanh is flat, and gradients vanish from step to step.",
)
def _(s: Subject) -> None:
    s.model.gru = nn.RNN(8, 32, batch_first=True)
    nn.init.normal_(s.model.gru.weight_hh_l0, std=3.0)
    nn.init.normal_(s.model.gru.weight_ih_l0, std=3.0)


@fault(
    "activations grow tenfold a layer",
    regression,
    ("fc2", "head", "relu*", "fc1", *MODEL),
    ("grow", "large", "scale", "explod", "init"),
    why="Activations, and gradients with them, grow tenfold a layer.",
)
def _(s: Subject) -> None:
    for layer in (s.model.fc1, s.model.fc2, s.model.head):
        layer.weight.data *= 30
