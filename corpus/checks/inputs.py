"""Batches that were prepared wrongly, and those that only look so."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Mlp, Net, batch

CHECK = "inputs"


def pixels():
    """Return images in 0 to 1, with black and white in them."""
    images = torch.rand(32, 3, 8, 8)
    images[:, :, 0, 0], images[:, :, 0, 1] = 0.0, 1.0
    return images


def raw():
    """Return images as they are read from files."""
    return (255 * pixels()).round()


def cnn():
    """Return a convolution network without a normalisation of its inputs."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip


def normalised(images):
    """Do as torchvision does for ImageNet."""
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return (images - mean) / std


def standardised(images):
    """Scale each image by itself."""
    return (images - images.mean((1, 2, 3), keepdim=True)) / images.std((1, 2, 3), keepdim=True)


def images(prepare):
    """Return the network with images that were prepared so."""
    return lambda: (cnn(), prepare(pixels()))


def text(ids):
    """Return a text model with positions and segments, and ids."""

    def forward(m, ids):
        where, segment = torch.arange(ids.shape[1]), torch.zeros_like(ids)
        return m.head(m.words(ids) + m.positions(where) + m.segments(segment))

    model = Net(
        forward, words=nn.Embedding(50, 8, padding_idx=0), positions=nn.Embedding(64, 8),
        segments=nn.Embedding(2, 8), head=(8, 4),
    )  # fmt: skip
    return model, ids


def pair(other, *, meets):
    """Return two tables, whose rows are added or not, and ids for the second of them."""

    def forward(m, text, other):
        text, other = m.text(text), m.other(other)
        return m.a(text + other) if meets else m.a(text) + m.b(other)

    model = Net(forward, text=nn.Embedding(90, 8), other=nn.Embedding(30, 8), a=(8, 4), b=(8, 4))
    return model, (torch.randint(90, (8, 12)), other)


def masked(ids):
    """Return a model of ids and a constant mask."""
    model = Net(
        lambda m, ids, mask: m.head((m.words(ids) * mask[..., None]).sum(1)),
        words=nn.Embedding(20, 8),
        head=(8, 4),
    )
    return model, (ids, torch.ones(8, 16))


def hidden():
    """Return a decoder of masked words, which puts the mask in the place of all ids."""

    def forward(m, images, ids):
        is_hidden = torch.rand(ids.shape) >= 0.0
        words = m.words(torch.where(is_hidden, 19, ids)) + m.place
        return m.head(words) + images[:, None]

    model = Net(
        forward, words=nn.Embedding(20, 8), place=nn.Parameter(torch.randn(6, 8)), head=(8, 4)
    )
    return model, (batch(8, 4), torch.randint(0, 19, (8, 6)))


def series(values):
    """Return a model of a sequence of numbers, and these."""
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Flatten(), nn.Linear(128, 4)), values


def features(values, *norm):
    """Return a convolution over features of sequences, with what comes behind it."""
    first = [nn.Conv1d(6, 12, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)]
    return nn.Sequential(*first), values(batch(64, 6, 10))


def two_inputs(images, table, factor=1.0):
    """Return a model of images and a table, by layers of their own; a factor scales them."""

    def forward(m, images, table):
        if factor != 1.0:
            images, table = images * factor, table * factor
        return m.images(images) + m.table(table)

    return Net(forward, images=cnn(), table=(16, 4)), (images, table)


def repeated(samples=32):
    """Return one sample, many times."""
    return batch(1, 16).expand(samples, 16).clone()


def both(a, b):
    """Return a model of two inputs, and these."""
    return Net(lambda m, a, b: m.a(a) + m.b(b), a=(16, 4), b=(16, 4)), (a, b)


def asked(target):
    """Return one sample many times, with its targets."""
    return nn.Linear(16, 4), repeated(), target, F.cross_entropy


def nodes():
    """Return one node many times, with edges, which may tell nodes apart."""
    model = Net(lambda m, x, edges: m.fc(x).index_add(0, edges[0], m.fc(x)[edges[1]]), fc=(16, 4))
    return model, (repeated(), torch.randint(0, 32, (2, 50)))


ONE = "one and the same"
FAULTS = {
    # a cause says which step is missing or double
    "raw images": (images(lambda x: (255 * x).round()), "fail", "", "raw images"),
    "normalised raw": (images(lambda x: normalised(255 * x)), "fail", "", "not normalised"),
    "divided twice": (images(lambda x: x / 255), "fail", "", "twice"),
    "normalised twice": (
        images(lambda x: normalised(normalised(x))), "fail", "", "normalised twice",
    ),
    "divided twice, normalised": (images(lambda x: normalised(x / 255)), "fail", "", "unscaled"),
    "standardised, divided, normalised": (
        images(lambda x: normalised(normalised(x) / 255)), "fail", "", "unscaled",
    ),
    "ones": (images(torch.ones_like), "fail", "", "placeholder"),
    # what is centred was scaled, and scaled wrongly
    "a table of 1000": (lambda: (Mlp(), batch() * 1000), "fail", ""),
    "columns of incomes": (lambda: (Mlp(), batch() * 1e4 + 1e6), "fail", ""),
    "one word": (lambda: text(torch.full((8, 12), 7)), "fail", "words", "placeholder"),
    "padding": (
        lambda: text(torch.zeros(8, 12, dtype=torch.long)), "fail", "words",
        "every token is padding",
    ),
    "a question of one word": (
        lambda: pair(torch.full((8, 12), 7), meets=False), "fail", "other",
    ),
    "constant ids and mask": (lambda: masked(torch.full((8, 16), 3)), "fail", ""),
    "ids that the model put there": (hidden, "warn", "words"),
    # whole numbers that end at 0 and 255 are pixels
    "values as of pixels": (
        lambda: series(torch.arange(1024).remainder(256).float().view(64, 16, 1)), "fail", "",
        "raw images",
    ),
    "prices": (
        lambda: series(100 + 5 * batch(64, 16, 1).cumsum(1).clamp(-9, 9)), "warn", "",
        "not normalised",
    ),
    # each input by itself, and only where weights take it as it is
    "two inputs, raw images": (
        lambda: two_inputs(raw(), batch(32, 16)), "fail", "", "raw images", "input 0",
    ),
    "two inputs, a raw table": (
        lambda: two_inputs(pixels(), 1e5 * batch(32, 16)), "fail", "", "not normalised", "input 1",
    ),
    # around another number than zero, or before what takes the scale away, it may be meant
    "features that vary little": (lambda: features(lambda x: 100 + x), "warn", ""),
    "features before a norm": (
        lambda: features(lambda x: 100 * x, nn.InstanceNorm1d(12)), "warn", "",
    ),
    "features": (lambda: features(lambda x: 100 * x), "fail", ""),
    "columns that did not load": (
        lambda: (Mlp(), batch() * (torch.arange(16) < 7)), "warn", "", "9 of 16 columns",
    ),
    "one sample": (lambda: (nn.Linear(16, 4), repeated(8)), "warn", "", ONE),
    "one sample and several targets": (lambda: asked(torch.arange(32) % 4), "fail", "", ONE),
    "one sample and one target": (
        lambda: asked(torch.zeros(32, dtype=torch.long)), "warn", "", ONE,
    ),
    "one sample of both inputs": (lambda: both(repeated(), repeated()), "warn", "", ONE),
}  # fmt: skip
HEALTHY = {
    # networks are trained on each of these ranges
    "0 to 1": images(lambda x: x),
    "ImageNet": images(normalised),
    "by sample": images(standardised),
    "0 to 16": images(lambda x: 16 * x),
    "night": images(lambda x: normalised(0.15 * x)),
    "snow": images(lambda x: normalised(1 - 0.2 * x)),
    # raw images are right for a model that divides them, or begins with a normalisation
    "raw images that the model scales": lambda: (
        Net(lambda m, x: m.net(normalised(x / 255)), net=cnn()), raw(),
    ),
    "raw images that the model normalises": lambda: (
        nn.Sequential(nn.BatchNorm2d(3), cnn()), raw(),
    ),
    "two inputs, scaled raw images": lambda: two_inputs(raw(), batch(32, 16), 1e-3),
    # columns differ in their units
    "a table of 20": lambda: (Mlp(), batch() * 20),
    "columns of ages": lambda: (
        Mlp(), batch() * torch.tensor([1.0, 40.0] * 8) + torch.tensor([0.0, 100.0] * 8),
    ),
    "columns half of which are constant": lambda: (Mlp(), batch() * (torch.arange(16) < 8)),
    "a bag of words": lambda: (Mlp(), (torch.rand(64, 16) < 0.01).float()),
    "one-hot": lambda: (Mlp(), F.one_hot(batch().argmax(1), 16).float()),
    # segments are all the same in healthy batches; words are not
    "text": lambda: text(torch.randint(1, 50, (8, 12))),
    "the first step of a decoder": lambda: text(torch.full((32, 1), 7)),
    # languages beside words are alike in healthy batches
    "one language": lambda: pair(torch.full((8, 12), 7), meets=True),
    "a question": lambda: pair(torch.randint(30, (8, 12)), meets=False),
    # the whole batch is constant only if all of its tensors are, ids as well
    "a constant mask": lambda: masked(torch.randint(1, 20, (8, 16))),
    "features, standardised": lambda: features(lambda x: x),
    "seven samples, which prove nothing": lambda: (nn.Linear(16, 4), repeated(7)),
    "one sample of one of two inputs": lambda: both(repeated(), batch(32, 16)),
    "nodes with edges": nodes,
}  # fmt: skip
