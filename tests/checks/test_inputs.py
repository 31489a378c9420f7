"""The `inputs` check: batches that were prepared wrongly."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Mlp
from tests.checks.rows import Net, hold, says

FAIL, WARN = {"": "fail"}, {"": "warn"}


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


# networks are trained on each of these ranges; a cause says which step is missing or double
IMAGES = {
    "0 to 1": (lambda x: x,),
    "-1 to 1": (lambda x: 2 * x - 1,),
    "ImageNet": (normalised,),
    "rounded": (lambda x: normalised(x).bfloat16().float(),),
    "by sample": (standardised,),
    "noise": (torch.randn_like,),
    "0 to 16": (lambda x: 16 * x,),
    "night": (lambda x: normalised(0.15 * x),),
    "snow": (lambda x: normalised(1 - 0.2 * x),),
    "raw": (lambda x: (255 * x).round(), "raw images"),
    "normalised raw": (lambda x: normalised(255 * x), "not normalised"),
    "divided twice": (lambda x: x / 255, "twice"),
    "normalised twice": (lambda x: normalised(normalised(x)), "normalised twice"),
    "divided twice, normalised": (lambda x: normalised(x / 255), "unscaled"),
    "standardised, divided, normalised": (
        lambda x: normalised(normalised(x) / 255), "unscaled",
    ),
    "black": (lambda x: x * 0, "placeholder"),
    "ones": (torch.ones_like, "placeholder"),
}  # fmt: skip


@pytest.mark.parametrize("row", IMAGES.values(), ids=IMAGES)
def test_images(row):
    """The batch is named, not the model."""
    prepare, *words = row
    report = hold("inputs", lambda _: (cnn(), prepare(pixels())), FAIL if words else {})
    assert all(v.role == "inputs" and words[0] in v.cause for v in says(report, "inputs"))


def text_model():
    """Return a text model with positions and segments."""

    def forward(m, ids):
        where, segment = torch.arange(ids.shape[1]), torch.zeros_like(ids)
        return m.head(m.words(ids) + m.positions(where) + m.segments(segment))

    return Net(
        forward, words=nn.Embedding(50, 8, padding_idx=0), positions=nn.Embedding(64, 8),
        segments=nn.Embedding(2, 8), head=(8, 4),
    )  # fmt: skip


def placed(*, is_mask):
    """Return a model of more positions than words, and ids or, in their place, a mask."""

    def forward(m, ids, mask):
        x = m.words(ids) + m.places(torch.arange(ids.shape[1]).expand_as(ids))
        return m.head((x * mask[..., None]).sum(1))

    model = Net(forward, words=nn.Embedding(20, 8), places=nn.Embedding(512, 8), head=(8, 4))
    ids, mask = torch.randint(1, 20, (8, 16)), torch.ones(8, 16, dtype=torch.long)
    return model, (mask, ids) if is_mask else (ids, mask)


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
        forward, words=nn.Embedding(20, 8), place=nn.Parameter(torch.randn(16, 8)), head=(8, 4)
    )
    return model, (torch.randn(8, 4), torch.randint(1, 19, (8, 16)))


def series(values):
    """Return a model of series of one feature."""
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Flatten(), nn.Linear(128, 4)), values


def two_inputs(images, table, factor=None):
    """Return a model of images and a table, by layers of their own; a factor scales them."""

    def forward(m, images, table):
        if factor is not None:
            images, table = images * factor, table * factor
        return m.images(images) + m.table(table)

    return Net(forward, images=cnn(), table=(16, 4)), (images, table)


CASES = {
    # raw images are right for a model that divides them, or begins with a normalisation
    "raw images that the model scales": (
        lambda _: (Net(lambda m, x: m.net(normalised(x / 255)), net=cnn()), raw()), {},
    ),
    "raw images that the model normalises": (
        lambda _: (nn.Sequential(nn.BatchNorm2d(3), cnn()), raw()), {},
    ),
    # columns differ in their units; what is centred was scaled, and scaled wrongly
    "a table of 20": (lambda x: (Mlp(), x * 20), {}),
    "a table of 1000": (lambda x: (Mlp(), x * 1000), FAIL),
    "columns of ages": (
        lambda x: (Mlp(), x * torch.tensor([1.0, 40.0] * 8) + torch.tensor([0.0, 100.0] * 8)), {},
    ),
    "columns of incomes": (lambda x: (Mlp(), x * 1e4 + 1e6), FAIL),
    "one-hot": (lambda x: (Mlp(), F.one_hot(x.argmax(1), 16).float()), {}),
    "sparse": (lambda x: (Mlp(), (x > 2.0).float()), {}),
    # segments are all the same in healthy batches; words are not
    "text": (lambda _: (text_model(), torch.randint(1, 50, (8, 12))), {}),
    "one word": (
        lambda _: (text_model(), torch.full((8, 12), 7)), {"words": "fail"}, "placeholder",
    ),
    "padding": (
        lambda _: (text_model(), torch.zeros(8, 12, dtype=torch.long)), {"words": "fail"},
        "every token is padding",
    ),
    "the first step of a decoder": (lambda _: (text_model(), torch.full((32, 1), 7)), {}),
    # positions count up, so that their table is not taken for that of the words
    "more positions than words": (lambda _: placed(is_mask=False), {}),
    "more positions than one word": (lambda _: placed(is_mask=True), {"words": "fail"}),
    # languages beside words are alike in healthy batches; the words of a question are not
    "one language": (lambda _: pair(torch.full((8, 12), 7), meets=True), {}),
    "a question of one word": (
        lambda _: pair(torch.full((8, 12), 7), meets=False), {"other": "fail"},
    ),
    "a question": (lambda _: pair(torch.randint(30, (8, 12)), meets=False), {}),
    # the whole batch is constant only if all of its tensors are, ids as well
    "a constant mask": (lambda _: masked(torch.randint(1, 20, (8, 16))), {}),
    "constant ids and mask": (
        lambda _: masked(torch.full((8, 16), 3)), FAIL,
    ),
    "ids that the model put there": (lambda _: hidden(), {"words": "warn"}),
    # whole numbers that end at 0 and 255 are pixels
    "values as of pixels": (
        lambda _: series(torch.arange(1024).remainder(256).float().view(64, 16, 1)), FAIL,
        "raw images",
    ),
    # each input by itself, and only where weights take it as it is
    "two inputs": (lambda x: two_inputs(pixels(), x[:32]), {}),
    "two inputs, raw images": (
        lambda x: two_inputs(raw(), x[:32]), FAIL, "raw images", "input 0",
    ),
    "two inputs, a raw table": (
        lambda x: two_inputs(pixels(), 1e5 * x[:32]), FAIL, "not normalised", "input 1",
    ),
    "two inputs, scaled": (lambda x: two_inputs(pixels(), x[:32], 1e-3), {}),
    "two inputs, scaled raw images": (lambda x: two_inputs(raw(), x[:32], 1e-3), {}),
    "two inputs, a scaled raw table": (lambda x: two_inputs(pixels(), 1e5 * x[:32], 1e-3), {}),
}  # fmt: skip


@pytest.mark.parametrize("row", CASES.values(), ids=CASES)
def test_what_is_said_of(row):
    """A batch is the model's, ids are of their table."""
    hold("inputs", *row)


@pytest.mark.parametrize(
    "make",
    [
        lambda: 100 + 5 * torch.randn(64, 16, 1).cumsum(1).clamp(-9, 9),
        lambda: torch.rand(64, 16, 1) * 255.0,
        lambda: torch.randint(0, 200, (64, 16, 1)).float(),
    ],
    ids=["prices", "fractions", "counts"],
)
def test_raw_images_are_said_of_images_only(make):
    """Prices are only warned of."""
    (warning,) = says(hold("inputs", lambda _: series(make()), WARN), "inputs")
    assert "images" not in warning.cause


@pytest.mark.parametrize(
    ("make", "norm", "layers"),
    [
        (lambda x: 100 + x, None, WARN),
        (lambda x: 100 * x, None, FAIL),
        (lambda x: 100 * x, nn.BatchNorm1d, WARN),
        (lambda x: 100 * x, nn.InstanceNorm1d, WARN),
        (lambda x: 1e5 + x, None, FAIL),
        (lambda x: x, None, {}),
    ],
    ids=["vary little", "centred", "then BatchNorm", "then a norm", "huge", "standardised"],
)
def test_features_that_are_large_by_design_only_warn(make, norm, layers):
    """Around another number than zero, or before what takes the scale away; a limit counts."""

    def build(_):
        first = [nn.Conv1d(6, 12, 3), *([norm(12)] if norm else [])]
        model = nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))
        return model, make(torch.randn(64, 6, 10))

    hold("inputs", build, layers)
    hold("inputs", build, FAIL, max_input_rms=0.5)


def test_limit_is_the_users():
    """A limit under what is given is broken."""
    hold("inputs", lambda _: Mlp(), FAIL, max_input_rms=0.5)


def repeated(samples=32):
    """Return one sample, many times."""
    return torch.randn(1, 16).expand(samples, 16).clone()


def both(a, b):
    """Return a model of two inputs, and these."""
    model = Net(lambda m, a, b: m.a(a) + m.b(b), a=(16, 4), b=(16, 4))
    return model, (a, b)


def asked(target):
    """Return one sample many times, with its targets."""
    if target.is_floating_point():
        return nn.Linear(16, 1), repeated(), target, F.mse_loss
    return nn.Linear(16, 4), repeated(), target, F.cross_entropy


REPEATED = {
    "no target": (lambda _: (nn.Linear(16, 4), repeated()), WARN),
    "one target": (lambda _: asked(torch.zeros(32, dtype=torch.long)), WARN),
    "several targets": (lambda _: asked(torch.arange(32) % 4), FAIL),
    "several numbers": (lambda _: asked(torch.randn(32, 1)), FAIL),
    "seven samples, which prove nothing": (lambda _: (nn.Linear(16, 4), repeated(7)), {}),
    "eight samples": (lambda _: (nn.Linear(16, 4), repeated(8)), WARN),
    "one of two inputs": (lambda _: both(repeated(), torch.randn(32, 16)), {}),
    "both inputs": (lambda _: both(repeated(), repeated()), WARN),
    # edges do not go by the sample, and may tell samples apart
    "nodes with edges": (
        lambda _: (
            Net(lambda m, x, edges: m.fc(x).index_add(0, edges[0], m.fc(x)[edges[1]]), fc=(16, 4)),
            (repeated(), torch.randint(0, 32, (2, 50))),
        ),
        {},
    ),
    "one sentence": (
        lambda _: (
            nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(192, 4)),
            torch.randint(0, 50, (1, 12)).expand(32, 12).clone(),
        ),
        WARN,
    ),
}


@pytest.mark.parametrize("row", REPEATED.values(), ids=REPEATED)
def test_one_sample_many_times(row):
    """It is warned of, and a fault where different targets are asked of it."""
    hold("inputs", *row, "one and the same")
