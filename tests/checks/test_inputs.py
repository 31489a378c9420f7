"""The `inputs` check: batches that were prepared wrongly."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.fixture
def pixels():
    """Images in 0 to 1, with black and white in them."""
    images = torch.rand(32, 3, 8, 8)
    images[:, :, 0, 0], images[:, :, 0, 1] = 0.0, 1.0
    return images


@pytest.fixture
def cnn():
    """A convolution network without a normalisation of its inputs."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip


def found(report):
    """The layers that the check names; the model itself is ``""``."""
    return [v.layer for v in report.violations if v.check == "inputs"]


def normalised(pixels):
    """As torchvision does for ImageNet."""
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return (pixels - mean) / std


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: x,
        lambda x: 2 * x - 1,
        normalised,
        lambda x: normalised(x).bfloat16().float(),
        lambda x: (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True),
        lambda x: torch.randn_like(x),
        lambda x: 16 * x,
        lambda x: normalised(0.15 * x),
        lambda x: normalised(1 - 0.2 * x),
    ],
    ids=[
        "0 to 1",
        "-1 to 1",
        "ImageNet",
        "rounded",
        "by sample",
        "noise",
        "0 to 16",
        "night",
        "snow",
    ],
)
def test_usual_ranges_are_healthy(prepare, cnn, pixels, inspect):
    """Networks are trained on each of them."""
    assert found(inspect(cnn, prepare(pixels))) == []


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda x: (255 * x).round(), "raw images"),
        (lambda x: normalised(255 * x), "not normalised"),
        (lambda x: x / 255, "twice"),
        (lambda x: normalised(normalised(x)), "normalised twice"),
        (lambda x: normalised(x / 255), "unscaled"),
        (lambda x: normalised(normalised(x) / 255), "unscaled"),
        (lambda x: x * 0, "placeholder"),
        (lambda x: torch.ones_like(x), "placeholder"),
    ],
    ids=[
        "raw",
        "normalised raw",
        "divided twice",
        "normalised twice",
        "divided twice, normalised",
        "standardised, divided, normalised",
        "black",
        "ones",
    ],
)
def test_images_prepared_wrongly(prepare, words, cnn, pixels, inspect):
    """The batch is named, not the model, and the cause says which step is missing or double."""
    report = inspect(cnn, prepare(pixels))
    assert found(report) == [""]
    violation = next(v for v in report.violations if v.check == "inputs")
    assert violation.role == "inputs"
    assert words in violation.cause


def test_model_that_scales_its_inputs_may_be_given_anything(cnn, pixels, inspect):
    """Raw images are right for a model that divides them, or begins with a normalisation."""

    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = cnn

        def forward(self, x):
            return self.net(normalised(x / 255))

    assert found(inspect(Scales(), (255 * pixels).round())) == []
    assert found(inspect(nn.Sequential(nn.BatchNorm2d(3), cnn), (255 * pixels).round())) == []


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda x: x * 20, []),
        (lambda x: x * 1000, [""]),
        (lambda x: x * torch.tensor([1.0, 40.0] * 8) + torch.tensor([0.0, 100.0] * 8), []),
        (lambda x: x * 1e4 + 1e6, [""]),
        (lambda x: F.one_hot(x.argmax(1), 16).float(), []),
        (lambda x: (x > 2.0).float(), []),
    ],
    ids=["20", "1000", "columns of ages", "columns of incomes", "one-hot", "sparse"],
)
def test_tables(make, names, mlp, batch, inspect):
    """Columns differ in their units; what is centred was scaled, and scaled wrongly."""
    assert found(inspect(mlp, make(batch))) == names


class Tokens(nn.Module):
    """A text model with positions and segments."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(50, 8, padding_idx=0), nn.Embedding(64, 8)
        self.segments, self.head = nn.Embedding(2, 8), nn.Linear(8, 4)

    def forward(self, ids):
        where, segment = torch.arange(ids.shape[1]), torch.zeros_like(ids)
        return self.head(self.words(ids) + self.positions(where) + self.segments(segment))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.randint(1, 50, (8, 12)), ""),
        (torch.full((8, 12), 7), "placeholder"),
        (torch.zeros(8, 12, dtype=torch.long), "padding"),
        (torch.full((32, 1), 7), ""),
    ],
    ids=["text", "one word", "padding", "first step of a decoder"],
)
def test_ids(ids, words, inspect):
    """Segments are all the same in healthy batches; words are not."""
    report = inspect(Tokens(), ids)
    assert found(report) == (["words"] if words else [])
    if words:
        assert words in next(v for v in report.violations if v.check == "inputs").cause


def test_missing_values_left_as_a_number_are_named(mlp, batch, inspect):
    """-999 beside values around one stands for something missing; -42 need not."""
    for value, names in ((-999.0, [""]), (-42.0, [])):
        given = batch.clone()
        given[::7, 1] = value
        assert found(inspect(mlp, given)) == names


def test_ids_all_alike_beside_more_positions_than_words(inspect):
    """Positions count up, so that their table is not taken for that of the words."""

    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(20, 8), nn.Embedding(512, 8)
            self.head = nn.Linear(8, 4)

        def forward(self, ids, mask):
            x = self.words(ids) + self.places(torch.arange(ids.shape[1]).expand_as(ids))
            return self.head((x * mask[..., None]).sum(1))

    ids, mask = torch.randint(1, 20, (8, 16)), torch.ones(8, 16, dtype=torch.long)
    assert found(inspect(Placed(), (ids, mask))) == []
    assert found(inspect(Placed(), (mask, ids))) == ["words"]


@pytest.mark.parametrize(
    ("make", "is_image"),
    [
        (lambda: 100 + 5 * torch.randn(64, 16, 1).cumsum(1).clamp(-9, 9), False),
        (lambda: torch.rand(64, 16, 1) * 255.0, False),
        (lambda: torch.randint(0, 200, (64, 16, 1)).float(), False),
        (lambda: torch.arange(1024).remainder(256).float().view(64, 16, 1), True),
    ],
    ids=["prices", "fractions", "counts", "pixels"],
)
def test_raw_images_are_said_of_images_only(make, is_image, inspect):
    """Whole numbers that end at 0 and 255 are pixels; prices are only warned of."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Flatten(), nn.Linear(128, 4))
    report = inspect(model, make())
    told = report.violations if is_image else report.warnings
    (violation,) = [v for v in told if v.check == "inputs"]
    assert ("images" in violation.cause) is is_image
    assert found(report) == [""] * is_image


@pytest.mark.parametrize(
    ("make", "norm", "severity"),
    [
        (lambda x: 100 + x, None, "warn"),
        (lambda x: 100 * x, None, "fail"),
        (lambda x: 100 * x, nn.BatchNorm1d(12), "warn"),
        (lambda x: 100 * x, nn.InstanceNorm1d(12), "warn"),
        (lambda x: 1e5 + x, None, "fail"),
        (lambda x: x, None, None),
    ],
    ids=["vary little", "centred", "then BatchNorm", "then a norm", "huge", "standardised"],
)
def test_features_that_are_large_by_design_only_warn(make, norm, severity, inspect):
    """Around another number than zero, or before what takes the scale away."""
    first = nn.Conv1d(6, 12, 3)
    layers = [first, norm] if norm else [first]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    batch = make(torch.randn(64, 6, 10))
    model(batch)
    report = inspect(model, batch)
    told = [v.severity for v in (*report.violations, *report.warnings) if v.check == "inputs"]
    assert told == ([severity] if severity else [])
    assert found(report) == [""] * (severity == "fail")
    limited = inspect(model, batch, settings={"max_input_rms": 0.5})
    assert found(limited) == [""]


def test_limit_is_the_users(mlp, batch, inspect):
    """A limit under what is given is broken."""
    assert found(inspect(mlp, batch, settings={"max_input_rms": 0.5})) == [""]


class TwoInputs(nn.Module):
    """Images and a table, by layers of their own."""

    def __init__(self, images, factor):
        super().__init__()
        self.images, self.table, self.factor = images, nn.Linear(16, 4), factor

    def forward(self, images, table):
        if self.factor is not None:
            images, table = images * self.factor, table * self.factor
        return self.images(images) + self.table(table)


@pytest.mark.parametrize("factor", [None, 1e-3])
@pytest.mark.parametrize(
    ("raw", "words"),
    [(None, ""), (0, "raw images"), (1, "not normalised")],
    ids=["neither", "images", "table"],
)
def test_every_input_is_judged(raw, words, factor, cnn, pixels, batch, inspect):
    """By itself, and only where weights take it as it is."""
    images = (255 * pixels).round() if raw == 0 else pixels
    table = 1e5 * batch[:32] if raw == 1 else batch[:32]
    report = inspect(TwoInputs(cnn, factor), (images, table))
    assert found(report) == ([""] if words and factor is None else [])
    for violation in report.violations if found(report) else []:
        if violation.check == "inputs":
            assert words in violation.cause
            assert f"input {raw}" in violation.message


def test_ids_all_alike_in_a_table_that_meets_no_larger_one(inspect):
    """Languages beside words are alike in healthy batches; the words of a question are not."""

    class Pair(nn.Module):
        def __init__(self, meet):
            super().__init__()
            self.text, self.other, self.meet = nn.Embedding(90, 8), nn.Embedding(30, 8), meet
            self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, text, other):
            text, other = self.text(text), self.other(other)
            return self.a(text + other) if self.meet else self.a(text) + self.b(other)

    text, alike = torch.randint(90, (8, 12)), torch.full((8, 12), 7)
    assert found(inspect(Pair(meet=True), (text, alike))) == []
    assert found(inspect(Pair(meet=False), (text, alike))) == ["other"]
    assert found(inspect(Pair(meet=False), (text, torch.randint(30, (8, 12))))) == []


class Both(nn.Module):
    """A model of two inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, a, b):
        return self.a(a) + self.b(b)


def repeated(samples=32):
    """One sample, many times."""
    return torch.randn(1, 16).expand(samples, 16).clone()


def told(report):
    """With which severity the check says that samples are equal."""
    said = (*report.violations, *report.warnings)
    return [v.severity for v in said if "one and the same" in v.message]


@pytest.mark.parametrize(
    ("target", "loss", "severity"),
    [
        (None, None, ["warn"]),
        (torch.zeros(32, dtype=torch.long), F.cross_entropy, ["warn"]),
        (torch.arange(32) % 4, F.cross_entropy, ["fail"]),
    ],
    ids=["no target", "one target", "several targets"],
)
def test_one_sample_many_times(target, loss, severity, inspect):
    """It is warned of, and a fault where different targets are asked of it."""
    assert told(inspect(nn.Linear(16, 4), repeated(), target, loss=loss)) == severity


def test_one_number_many_times(inspect):
    """A regression that is asked for several numbers of one sample has nothing to learn."""
    report = inspect(nn.Linear(16, 1), repeated(), torch.randn(32, 1), loss=F.mse_loss)
    assert told(report) == ["fail"]


def test_few_samples_may_be_equal(inspect):
    """Seven equal samples prove nothing."""
    assert told(inspect(nn.Linear(16, 4), repeated(7))) == []
    assert told(inspect(nn.Linear(16, 4), repeated(8))) == ["warn"]


def test_one_of_two_inputs_repeats(inspect):
    """What repeats beside an input that varies is given for all samples."""
    assert told(inspect(Both(), (repeated(), torch.randn(32, 16)))) == []
    assert told(inspect(Both(), (repeated(), repeated()))) == ["warn"]


def test_nodes_told_apart_by_their_edges(inspect):
    """A tensor that does not go by the sample may tell samples apart."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, x, edges):
            return self.fc(x).index_add(0, edges[0], self.fc(x)[edges[1]])

    assert told(inspect(Graph(), (repeated(), torch.randint(0, 32, (2, 50))))) == []


def test_one_sentence_many_times(inspect):
    """Ids are compared, too."""
    model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(192, 4))
    ids = torch.randint(0, 50, (1, 12)).expand(32, 12).clone()
    assert told(inspect(model, ids)) == ["warn"]


def test_a_constant_mask_beside_what_varies_is_no_constant_batch(inspect):
    """The whole batch is constant only if all of its tensors are, ids as well."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

        def forward(self, ids, mask):
            return self.head((self.words(ids) * mask[..., None]).sum(1))

    ids, mask = torch.randint(1, 20, (8, 16)), torch.ones(8, 16)
    assert found(inspect(Masked(), (ids, mask))) == []
    assert "" in found(inspect(Masked(), (torch.full_like(ids, 3), mask)))


def test_ids_that_the_model_put_in_the_place_of_those_given_are_warned_of(inspect):
    """A decoder of masked words asks for the mask's row alone in its first round."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.place = nn.Embedding(20, 8), nn.Parameter(torch.randn(16, 8))
            self.head = nn.Linear(8, 4)

        def forward(self, seen, ids):
            hidden = torch.rand(ids.shape) >= 0.0
            words = self.words(torch.where(hidden, 19, ids)) + self.place
            return self.head(words) + seen[:, None]

    ids = torch.randint(1, 19, (8, 16))
    report = inspect(Hidden(), (torch.randn(8, 4), ids))
    assert not report.violations
    assert [v.layer for v in report.warnings] == ["words"]
