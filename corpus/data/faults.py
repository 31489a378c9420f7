"""Faults of data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from corpus.cards import Shelf
from corpus.models.fields import cox, dlrm, features, masked, quantiles
from corpus.models.perception import convnext, grey, segmenter, solution, wavenet
from corpus.models.small import binary, cnn, graph, lstm, regression, resnet, unet, words
from corpus.subject import Subject
from corpus.words import MODEL, NONFINITE, NONFINITE_OR_ROOT, RANGE, RAW, UNSCALED

SHELF = Shelf("data")
fault = SHELF.fault


@fault(
    "labels hold a NaN",
    regression,
    MODEL,
    (*NONFINITE, "target", "label"),
    ("finite", "loss", "inputs"),
    why="A NaN in the target makes NaN of the loss and of every gradient.",
)
def _(s: Subject) -> None:
    s.target[7] = math.nan


@fault(
    "raw images from 0 to 255",
    resnet,
    (*MODEL, "stem"),
    RANGE,
    "inputs",
    why="Raw values saturate what a net drawn for inputs near one computes of them.",
)
def _(s: Subject) -> None:
    pixels = (s.inputs * 6 + 4.9).clamp(0, 16)
    s.inputs = (pixels * 255 / 16).round()


@fault(
    "divided by 255 twice",
    cnn,
    (*MODEL, "conv1"),
    (*RANGE, "twice", "small"),
    "inputs",
    why="What remains differs by a 65,000th of its range, and the net hardly sees it.",
)
def _(s: Subject) -> None:
    s.inputs = (s.inputs * 6 + 4.9).clamp(0, 16) / 16 / 255


@fault(
    "images all black",
    unet,
    (*MODEL, "down1*"),
    ("constant", "zero", "same", "equal"),
    ("inputs", "collapse"),
    why="All samples are the same, and the net can learn nothing but a constant.",
)
def _(s: Subject) -> None:
    s.inputs = torch.zeros_like(s.inputs)


@fault(
    "every token is padding",
    lstm,
    (*MODEL, "embedding"),
    ("padding", "constant", "same", "zero"),
    ("inputs", "collapse"),
    why="All samples are the same, and the net can learn nothing but a constant.",
)
def _(s: Subject) -> None:
    s.inputs = torch.zeros_like(s.inputs)


@fault(
    "a feature is missing: NaN",
    binary,
    (*MODEL, "fc1"),
    ("nan", "input"),
    ("inputs", "finite"),
    why="A NaN in the batch makes NaN of the loss and of every gradient.",
)
def _(s: Subject) -> None:
    s.inputs[3, 4] = math.nan


@fault(
    "one column in another unit",
    regression,
    (*MODEL, "fc1", "tanh"),
    (*RANGE, "saturat", "large"),
    why="One column drowns the others and saturates the first activation.",
)
def _(s: Subject) -> None:
    s.inputs[:, 2] = 1e6 + 1e5 * s.inputs[:, 2]
    s.model.activation = torch.tanh


@fault(
    "graph without a single edge",
    graph,
    (*MODEL, "layers.0"),
    ("zero", "constant", "same", "equal"),
    why="Without edges, and without loops, no node gets a message: its features are zero.",
)
def _(s: Subject) -> None:
    nodes, edges = s.inputs
    s.inputs = nodes, torch.zeros_like(edges)


@fault(
    "ids and mask swapped, nothing padded",
    masked,
    (*MODEL, "embedding"),
    ("constant", "same", "equal", "one row"),
    why="A mask of ones is read as words: all samples are the same.",
)
def _(s: Subject) -> None:
    ids = words(32)[0]
    s.inputs = (torch.ones_like(ids), ids)
    s.target = ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)


@fault(
    "numbers all zero after a join that failed",
    dlrm,
    (*MODEL, "bottom*"),
    ("constant", "zero", "same", "equal"),
    why="All samples are the same in these columns, from which nothing can be learnt.",
)
def _(s: Subject) -> None:
    s.inputs = (torch.zeros_like(s.inputs[0]), s.inputs[1])


@fault(
    "missing values as -999",
    features,
    (*MODEL,),
    (*UNSCALED, "-999", "sentinel", "outlier"),
    "inputs",
    why="A number that stands for nothing drowns the column's own values.",
)
def _(s: Subject) -> None:
    s.inputs = s.inputs.clone()
    s.inputs[torch.rand(64) < 0.1, 3] = -999.0
    s.inputs[torch.rand(64) < 0.1, 7] = -999.0


@fault(
    "likelihood of Cox by exp, on columns in units",
    cox,
    (*MODEL, "fc1", "head"),
    (*NONFINITE_OR_ROOT, *UNSCALED),
    why="Exponentials of scores of columns in their own units overflow.",
)
def _(s: Subject) -> None:
    s.inputs = s.inputs * 400 + 3000

    def loss(risk: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        order = target[0].argsort(descending=True)
        risk, event = risk.squeeze(1)[order], target[1][order]
        return -((risk - risk.exp().cumsum(0).log()) * event).sum() / event.sum()

    s.loss = loss


@fault(
    "time as seconds since 1970",
    quantiles,
    (*MODEL, "lstm"),
    (*UNSCALED, "saturat", "flat"),
    why="A number of 1e9 saturates each gate, and its hours are lost in rounding.",
)
def _(s: Subject) -> None:
    s.inputs = s.inputs.clone()
    start = 1.7e9 + 86_400 * torch.randint(0, 300, (len(s.inputs), 1))
    s.inputs[..., 1] = start + 3600.0 * torch.arange(24)


@fault(
    "standardised images standardised again",
    convnext,
    ("", "stem"),
    RAW,
    why="Standardised with the numbers of raw images, what remains is nearly constant.",
)
def _(s: Subject) -> None:
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    ink, _ = grey(32)
    once = (ink - mean[:, None, None]) / std[:, None, None]
    s.inputs = (once / 255 - mean[:, None, None]) / std[:, None, None]


@fault(
    "raw colours from 0 to 255",
    segmenter,
    ("", "down*"),
    RAW,
    why="Raw values saturate what a net drawn for inputs near one computes of them.",
)
def _(s: Subject) -> None:
    s.inputs = (grey(16)[0].expand(-1, 3, -1, -1) * 255).round()


@fault(
    "places in kilometres where the net expects millimetres",
    solution,
    ("", "net*"),
    (*RAW, "same", "constant", "equal", "small"),
    why="All places are nearly the same number: the first bias drowns them.",
)
def _(s: Subject) -> None:
    s.inputs = s.inputs * 1e-6


@fault(
    "samples of sound from -32768 to 32767",
    wavenet,
    ("", "first", "gated.0", "tanh*"),
    (*RAW, "large", "satur"),
    why="Raw values saturate the gates of the first layer.",
)
def _(s: Subject) -> None:
    s.inputs = (s.inputs * 32767).round()
