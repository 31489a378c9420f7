"""The `loss` check: what a loss is wrongly given, and what only looks like it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from pytest_modelhealth.report import Verdict

pytestmark = pytest.mark.filterwarnings("ignore:Using a target size")


@pytest.fixture
def labels():
    """A class for each sample of the batch."""
    return torch.randint(0, 10, (64,))


def findings(report):
    """Return what the check found, as (layer, message and cause)."""
    return [(v.layer, f"{v.message}; {v.cause}") for v in report.violations if v.check == "loss"]


def one(report):
    """Return the only violation of the report, which must be the check's."""
    (violation,) = report.violations
    assert violation.check == "loss", violation
    return violation


ONLY = {"checks": ["loss"]}
"""Settings that leave out other checks, which see the same fault from another side."""


class Functional(nn.Module):
    """A model that ends in a function."""

    def __init__(self, model, function):
        super().__init__()
        self.model, self.function = model, function

    def forward(self, x):
        return self.function(self.model(x))


class Pooling(nn.Module):
    """Attention over the instances of a bag: the whole batch is one set."""

    def __init__(self):
        super().__init__()
        self.score, self.head = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, x):
        weights = torch.softmax(self.score(x), dim=0)
        return self.head((weights * x).sum(0, keepdim=True))


def contrast(h):
    """Return the logarithm of a softmax over a square of similarities."""
    h = F.normalize(h, dim=1)
    return torch.log_softmax(h @ h.t() / 0.1, dim=0)


def bits(*shape):
    """Return random zeros and ones."""
    return torch.randint(0, 2, shape).float()


def clamped_bce(output, target):
    """The same, of what was reshaped and clamped."""
    return bce(output.clamp(1e-6, 1 - 1e-6).reshape(-1), target.reshape(-1))


def between_0_and_1():
    """Return a fresh head whose logits happen to lie between 0 and 1."""
    model = nn.Linear(16, 1)
    nn.init.normal_(model.weight, std=0.01)
    nn.init.constant_(model.bias, 0.5)
    return model


def without_class_9(x):
    """Return log-probabilities of classes of which the last is masked out."""
    mask = torch.zeros(10)
    mask[9] = -math.inf
    return F.log_softmax(x + mask, dim=1)


CE, WIDENED = F.cross_entropy, ("(64, 1)", "(64,)")
SMOOTHED = nn.CrossEntropyLoss(label_smoothing=0.1)
ONE_TARGET = torch.zeros(64, dtype=torch.long)
FAULTS = {
    "softmax": (
        lambda m, x, y: (nn.Sequential(m, nn.Softmax(-1)), x, y, CE),
        ("1", "every row of its input sums to one", "softmax before cross_entropy"),
    ),
    "softmax and smoothing": (
        lambda m, x, y: (nn.Sequential(m, nn.Softmax(-1)), x, y, SMOOTHED),
        ("1", "is given probabilities", "softmax before cross_entropy"),
    ),
    "functional softmax": (
        lambda m, x, y: (Functional(m, lambda x: F.softmax(x, dim=1)), x, y, CE),
        ("softmax", "is given probabilities"),
    ),
    "softmax inside the loss, which is no layer": (
        lambda m, x, y: (m, x, y, lambda o, t: CE(torch.softmax(o, 1), t)),
        ("", "is given probabilities"),
    ),
    "rounded to bfloat16": (
        lambda m, x, y: (nn.Sequential(m, nn.Softmax(1)).bfloat16(), x.bfloat16(), y, CE),
        ("1", "is given probabilities"),
    ),
    "softmax over the batch": (
        lambda m, x, y: (nn.Sequential(m, nn.Softmax(0)), x, y, CE),
        ("1", "dimension 0, where the samples lie"),
    ),
    "log_softmax over the batch": (
        lambda m, x, y: (nn.Sequential(m, nn.LogSoftmax(0)), x, y, F.nll_loss),
        ("1", "dimension 0, where the samples lie"),
    ),
    "softmax over the batch inside a model": (
        lambda m, x, y: (
            nn.Sequential(nn.Linear(16, 8), nn.Softmax(0), nn.Linear(8, 2)),
            x,
            None,
            None,
        ),
        ("1", "dimension 0"),
    ),
    "sigmoid before cross_entropy": (
        lambda m, x, y: (nn.Sequential(m, nn.Sigmoid()), x, y, CE),
        ("1", "holds the logits between 0 and 1"),
    ),
    "logits into nll_loss": (
        lambda m, x, y: (m, x, y, F.nll_loss),
        ("head", "cross_entropy on logits"),
    ),
    "probabilities into nll_loss": (
        lambda m, x, y: (nn.Sequential(m, nn.Softmax(1)), x, y, F.nll_loss),
        ("1", "the logarithm is missing"),
    ),
    "target never read": (
        lambda m, x, y: (m, x, y, lambda o, t: o.pow(2).mean() + t.shape[0]),
        ("", "never reads its target"),
    ),
    "constant": (
        lambda m, x, y: (m, x, None, lambda o: (o * 0.0).sum() + 3.0),
        ("", "the loss is constant"),
    ),
    "underflow, which is no constant": (
        lambda m, x, y: (
            nn.Linear(16, 4).half(),
            x.half(),
            None,
            lambda o: o.float().mean() * 1e-9,
        ),
        ("", "underflows float16"),
    ),
    "single class": (
        lambda m, x, y: (nn.Linear(16, 1), x, ONE_TARGET, CE),
        ("", "single class"),
    ),
    "batch taken for classes": (
        lambda m, x, y: (nn.Sequential(nn.Linear(16, 1), nn.Flatten(0)), x, bits(64), CE),
        ("1", "samples of the batch for classes"),
    ),
}
for squash in (nn.Sigmoid(), nn.Hardsigmoid(), nn.Softmax(1)):
    for function in (bce, clamped_bce):
        FAULTS[f"{type(squash).__name__} into {function.__name__}"] = (
            lambda m, x, y, last=squash, loss=function: (
                nn.Sequential(m, last),
                x,
                bits(64, 10),
                loss,
            ),
            (None, "takes logits"),
        )
for function in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
    FAULTS[f"column against row in {function.__name__}"] = (
        lambda m, x, y, loss=function: (
            nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1)),
            x,
            torch.randn(64),
            loss,
        ),
        ("1", *WIDENED),
    )
BY_HAND = {
    "squared": lambda o, t: ((o - t) ** 2).mean(),
    "absolute": lambda o, t: (t - o).abs().mean(),
    "torch.sub": lambda o, t: torch.sub(o, t).square().mean(),
    "logarithms": lambda o, t: -(t * F.logsigmoid(o) + (1 - t) * F.logsigmoid(-o)).mean(),
}
for name, written in BY_HAND.items():
    FAULTS[f"column against row by hand, {name}"] = (
        lambda m, x, y, loss=written: (nn.Linear(16, 1), x, bits(64), loss),
        ("", *WIDENED),
    )
NEGATED = {
    "minus": lambda o, t: -CE(o, t),
    "times a half": lambda o, t: CE(o, t) * -0.5,
    "log-probability": lambda o, t: F.log_softmax(o, 1).gather(1, t[:, None]).mean(),
    "squared": lambda o, t: -((o - F.one_hot(t, 10)) ** 2).mean() / 2,
}
for name, written in NEGATED.items():
    FAULTS[f"negated, {name}"] = (
        lambda m, x, y, loss=written: (m, x, y, loss),
        ("", "negated"),
    )
FLAT = {
    "clamp": lambda x: x.clamp(min=100.0),
    "round": lambda x: torch.round(20 * x),
    "sign": torch.sign,
    "relu": lambda x: F.relu(x - 100.0) + 1.0,
}
for name, written in FLAT.items():
    FAULTS[f"flat, {name}"] = (
        lambda m, x, y, flat=written: (m, x, None, lambda o: flat(o).abs().mean()),
        ("", "gradient at the output is exactly zero", f"{name} in the loss"),
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_loss_is_wrongly_given_is_named(fault, mlp, batch, labels, inspect):
    """At the layer that gives it, or at the model where no layer does."""
    build, (layer, *words) = FAULTS[fault]
    model, inputs, target, loss = build(mlp, batch, labels)
    violation = one(inspect(model, inputs, target, loss=loss))
    assert layer is None or violation.layer == layer
    assert [word for word in words if word not in f"{violation.message}; {violation.cause}"] == []


HEALTHY = {
    "log_softmax, which cross_entropy takes again": lambda m, x, y: (
        nn.Sequential(m, nn.LogSoftmax(1)),
        x,
        y,
        CE,
    ),
    "attention over a set": lambda m, x, y: (Pooling(), x, None, None),
    "similarities along either dimension": lambda m, x, y: (
        Functional(nn.Linear(16, 8), contrast),
        x,
        None,
        None,
    ),
    "logits between 0 and 1": lambda m, x, y: (between_0_and_1(), x, bits(64, 1), bce),
    "log-probabilities": lambda m, x, y: (nn.Sequential(m, nn.LogSoftmax(1)), x, y, F.nll_loss),
    "classes masked out": lambda m, x, y: (Functional(m, without_class_9), x, y % 9, F.nll_loss),
    "a hinge that is met": lambda m, x, y: (m, x, None, lambda o: F.relu(o - 100.0).mean()),
}
WIDENED_ON_PURPOSE = [
    lambda o, t: ((o.squeeze(1) - t) ** 2).mean(),
    lambda o, t: ((o - t[:, None]) ** 2).mean(),
    lambda o, t: (o.squeeze(1)[:, None] - t).abs().mean(),
    lambda o, t: (o - o.squeeze(1)).abs().mean() + 0 * t.sum(),
    lambda o, t: F.mse_loss(o, torch.zeros(1, 1)) + 0 * t.sum(),
]
for place, written in enumerate(WIDENED_ON_PURPOSE):
    HEALTHY[f"all pairs asked for, one target for all, or equal shapes {place}"] = (
        lambda m, x, y, loss=written: (nn.Linear(16, 1), x, torch.randn(64), loss)
    )
MAY_BE_NEGATIVE = [
    lambda o, t: CE(o, t) - 10.0,
    lambda o, t: -((o + F.one_hot(t, 10) + 5.0) ** 3).mean(),
    lambda o, t: -F.cosine_similarity(o, F.one_hot(t, 10).float()).mean(),
    lambda o, t: -F.log_softmax(o, 1).gather(1, t[:, None]).mean(),
    lambda o, t: CE(o, t) + 5 * (F.softmax(o, 1) * F.log_softmax(o, 1)).sum(1).mean(),
    lambda o, t: torch.distributions.Categorical(logits=o).log_prob(t).neg().mean(),
]
READ_OR_NOT_NEEDED = [
    lambda o, _: o.pow(2).mean(),
    lambda o, t: F.mse_loss(o, torch.zeros_like(o)),
    lambda o, t: (o - torch.tensor(t.tolist())[:, None]).pow(2).mean(),
    lambda o, t: torch.stack([o[i, c] for i, c in enumerate(t)]).pow(2).mean(),
]
for place, written in enumerate((*MAY_BE_NEGATIVE, *READ_OR_NOT_NEEDED)):
    HEALTHY[f"may be negative, or reads its target in some way {place}"] = (
        lambda m, x, y, loss=written: (m, x, y, loss)
    )


@pytest.mark.parametrize("case", HEALTHY)
def test_what_only_looks_like_it_is_no_fault(case, mlp, batch, labels, inspect):
    """A similarity, an offset, an underscore for a target that is not needed: all are meant."""
    model, inputs, target, loss = HEALTHY[case](mlp, batch, labels)
    assert findings(inspect(model, inputs, target, loss=loss)) == []


def test_softmax_without_a_graph_is_found(mlp, batch, labels, inspect):
    """The numbers tell where autograd does not."""
    with torch.no_grad():
        report = inspect(nn.Sequential(mlp, nn.Softmax(1)), batch, labels, loss=CE)
    assert one(report).layer == "1"


def test_negated_loss_inside_the_model_is_named(mlp, batch, labels, inspect):
    """A model that returns its own loss is judged by the calls inside it."""

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = mlp

        def forward(self, x, labels):
            logits = self.model(x)
            return {"loss": -F.cross_entropy(logits, labels), "logits": logits}

    report = inspect(WithLoss(), {"x": batch, "labels": labels})
    assert "negated" in one(report).message


def test_loss_module_inside_a_model_is_seen(mlp, batch, labels, inspect):
    """A loss of torch.nn that the model's forward calls is the layer that calls the function."""

    class WithCriterion(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.criterion = nn.Sequential(mlp, nn.Softmax(1)), nn.CrossEntropyLoss()

        def forward(self, x, labels):
            return self.criterion(self.model(x), labels)

    report = inspect(WithCriterion(), {"x": batch, "labels": labels})
    assert [call.layer for call in report.observation.loss_calls] == ["criterion"]
    assert one(report).layer == "model.1"


def test_initial_loss_of_a_head_too_large_is_named(mlp, batch, labels, inspect):
    """A fresh classifier that is far from a uniform guess is too sure of itself."""
    nn.init.uniform_(mlp.head.weight, -100.0, 100.0)
    violation = one(inspect(mlp, batch, labels, loss=F.cross_entropy, settings=ONLY))
    assert violation.layer == "head"
    with torch.no_grad():
        expected = F.cross_entropy(mlp(batch), labels).item() / math.log(10)
    assert violation.value == pytest.approx(expected, rel=1e-5)
    assert (violation.limit, violation.origin) == (10.0, "default")


def test_initial_loss_of_few_targets_is_inconclusive(mlp, batch, labels, inspect):
    """Four samples say little about a loss."""
    nn.init.uniform_(mlp.head.weight, -100.0, 100.0)
    report = inspect(mlp, batch[:4], labels[:4], loss=F.cross_entropy, settings=ONLY)
    assert "loss" in {finding.check for finding in report._judgement.inconclusive}
    assert report.verdict is Verdict.INCONCLUSIVE


def test_loss_of_a_trained_model_may_be_large(mlp, batch, labels, inspect):
    """A trained classifier on labels that are not its own is no fault of its initialisation."""
    optimizer = torch.optim.Adam(mlp.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(mlp(batch), labels).backward()
        optimizer.step()
    with torch.no_grad():
        mlp.head.weight.mul_(500.0)
    report = inspect(mlp, batch, (labels + 1) % 10, loss=F.cross_entropy, settings=ONLY)
    assert report.loss > 10 * math.log(10)
    assert findings(report) == []


def test_large_inputs_are_not_the_heads_doing(mlp, batch, labels, inspect):
    """Where large numbers come in, the layer that makes the logits is not to blame."""
    report = inspect(mlp, 1e4 * batch, labels, loss=F.cross_entropy, settings=ONLY)
    assert report.loss > 10 * math.log(10)
    assert findings(report) == []


def test_fault_in_the_model_does_not_hide_that_of_the_loss(batch, inspect):
    """How the loss is written follows from nothing else, and is a story of its own."""
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.zeros_(model[0].weight)
    report = inspect(model, batch, torch.randn(64), loss=lambda o, t: (o - t).square().mean())
    assert len(findings(report)) == 1
    assert len(report.violations) > 1


def test_targets_that_are_all_ignored_are_named(mlp, batch, inspect):
    """A mean over no target is NaN, and the reason is said."""
    report = inspect(mlp, batch, torch.full((64,), -100), loss=F.cross_entropy)
    assert any("ignores all of its 64 targets" in text for _, text in findings(report))


class Tagger(nn.Module):
    """A sequence model whose embedding knows its padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20)

    def forward(self, ids):
        return self.head(self.embed(ids)).flatten(0, 1)


def padded():
    """Return ids whose last four of twelve are padding."""
    ids = torch.randint(1, 20, (8, 12))
    ids[:, 8:] = 0
    return ids


def test_padding_that_is_not_ignored_is_named(inspect):
    """Targets that end in the embedding's padding index are padding."""
    ids = padded()
    violation = one(inspect(Tagger(), ids, ids.flatten(), loss=F.cross_entropy))
    assert "33%" in violation.message
    assert "ignore_index=0" in violation.cause


def test_padding_that_is_ignored_is_no_fault(inspect):
    """With ignore_index, or without padding, there is nothing to say."""
    ids = padded()
    ignoring = nn.CrossEntropyLoss(ignore_index=0)
    assert findings(inspect(Tagger(), ids, ids.flatten(), loss=ignoring)) == []
    full = torch.randint(0, 20, (8, 12))
    assert findings(inspect(Tagger(), full, full.flatten(), loss=F.cross_entropy)) == []


class Tags(nn.Module):
    """Five tags and one for padding, for each of the ids."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 6)

    def forward(self, ids):
        return self.head(self.embed(ids)).flatten(0, 1)


@pytest.mark.parametrize("tag", [0, 5])
def test_tags_of_padding_are_named_whatever_they_are_called(tag, inspect):
    """As many targets end in one tag as ids are padding, though ids and tags are no one list."""
    ids = padded()
    tags = torch.where(ids == 0, tag, ids % 4 + 1).flatten()
    assert "33%" in one(inspect(Tags(), ids, tags, loss=F.cross_entropy)).message
    ends = (ids % 4 + 1).view(8, 12)
    ends[:, 6:] = tag
    assert findings(inspect(Tags(), ids, ends.flatten(), loss=F.cross_entropy)) == []


def test_padding_that_a_mask_takes_out_is_no_fault(inspect):
    """The loss of each token, masked by hand, counts no padding."""
    ids = padded()

    def masked(output, target):
        each = F.cross_entropy(output, target, reduction="none")
        return each[target != 0].mean()

    assert findings(inspect(Tagger(), ids, ids.flatten(), loss=masked)) == []


def test_log_softmax_over_the_positions_is_named(inspect):
    """Of (samples, positions, classes), the classes lie last."""

    class Positions(Tags):
        def forward(self, ids):
            return F.log_softmax(self.head(self.embed(ids)), dim=1).flatten(0, 1)

    ids = torch.randint(1, 20, (8, 12))
    violation = one(inspect(Positions(), ids, ids.flatten() % 6, loss=F.nll_loss, settings=ONLY))
    assert "does not sum to one over its 6 classes" in violation.message
    assert "another dimension" in violation.cause


@pytest.mark.parametrize(("labels_each", "is_fault"), [(1, False), (3, True)])
def test_several_labels_into_cross_entropy(labels_each, is_fault, mlp, batch, inspect):
    """Its targets are a distribution: the rows of several labels sum to more than one."""
    target = torch.zeros(64, 10)
    target[:, :labels_each] = 1.0
    model = nn.Sequential(mlp, nn.Linear(10, 10))
    report = inspect(model, batch, target, loss=F.cross_entropy, settings=ONLY)
    assert bool(findings(report)) is is_fault
    assert not is_fault or "sum to 3" in one(report).message
    smooth = target / labels_each
    assert findings(inspect(model, batch, smooth, loss=F.cross_entropy, settings=ONLY)) == []


@pytest.mark.parametrize("positive", [torch.exp, F.softplus, F.relu])
def test_rate_into_poisson_nll_loss(positive, batch, inspect):
    """It takes the logarithm of a rate unless it is told that it gets a rate."""

    class Rate(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(batch.shape[1], 1)

        def forward(self, x):
            return positive(self.net(x))

    counts = torch.poisson(torch.ones(64, 1))
    violation = one(inspect(Rate(), batch, counts, loss=F.poisson_nll_loss, settings=ONLY))
    assert "logarithm of a rate" in violation.message
    rates = nn.PoissonNLLLoss(log_input=False)
    assert findings(inspect(Rate(), batch, counts, loss=rates, settings=ONLY)) == []


@pytest.mark.parametrize(
    ("choose", "low", "high", "is_fault"),
    [
        (torch.max, -0.1, 0.9, False),
        (torch.min, -0.1, 0.9, True),
        (torch.minimum, 0.9, -0.1, True),
        (torch.minimum, 0.1, 0.9, False),
    ],
)
def test_smaller_of_two_opposite_multiples_is_never_positive(
    choose, low, high, is_fault, mlp, batch, inspect
):
    """A quantile loss takes the larger one; of multiples of one sign nothing is certain."""

    def quantile(output, target):
        error = target - output
        return choose(low * error, high * error).mean()

    target = mlp(batch).detach() + torch.randn(64, 1) * 0.1 - (0.0 if is_fault else 1.0)
    found = findings(inspect(mlp, batch, target, loss=quantile, settings=ONLY))
    assert ("negated" in str(found)) is is_fault


def test_loss_of_an_untrained_model_of_ids(inspect):
    """Ids are no scale: factors drawn with standard deviation 5 are what makes the logits large."""

    class Factors(nn.Module):
        def __init__(self, std):
            super().__init__()
            self.table, self.deep = nn.Embedding(100, 8), nn.Linear(16, 8)
            nn.init.normal_(self.table.weight, std=std)

        def forward(self, ids):
            factors = self.table(ids)
            deep = self.deep(factors.flatten(1)).mean(1)
            return (factors[:, 0] * factors[:, 1]).sum(1) + deep

    ids, target = torch.randint(0, 100, (64, 2)), torch.randint(0, 2, (64,)).float()
    violation = one(inspect(Factors(5.0), ids, target, loss=bce, settings=ONLY))
    assert "times that of a uniform guess" in violation.message
    assert findings(inspect(Factors(0.3), ids, target, loss=bce, settings=ONLY)) == []


def test_loss_of_something_else_is_named(mlp, batch, inspect):
    """A loss that does not depend on the output trains nothing."""
    other = torch.ones(3, requires_grad=True)
    report = inspect(mlp, batch, loss=lambda o: other.pow(2).sum())
    assert any("does not depend on the output" in text for _, text in findings(report))


def test_loss_of_what_the_model_keeps_is_no_fault(batch, inspect):
    """A loss may reach the model by what its forward left on it."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, x):
            self.energy = self.fc(x).pow(2).mean()
            return x.detach()

    model = Keeps()
    report = inspect(model, batch.clone().requires_grad_(), loss=lambda o: model.energy)
    assert findings(report) == []


def test_user_thresholds_are_obeyed(mlp, batch, labels, inspect):
    """max_initial_loss can be set."""
    nn.init.uniform_(mlp.head.weight, -100.0, 100.0)
    options = {"settings": {"max_initial_loss": 1e6}}
    assert findings(inspect(mlp, batch, labels, loss=F.cross_entropy, **options)) == []


@pytest.mark.parametrize(
    ("loss", "is_off"),
    [
        (lambda out: 0.0 * out.mean(), True),
        (lambda out: out.mean() * torch.tensor(0.0), True),
        (lambda out: (out**2 * torch.zeros(64, 1)).sum(), True),
        (lambda out: (torch.zeros(64, 1) * out).sum(), True),
        (lambda out: (out - 100.0).relu().mean(), False),
        (lambda out: ((out - 100.0).relu() * torch.zeros(64, 1)).mean(), False),
        (lambda out: 0.5 * (out**2 * torch.eye(64, 10)).sum(), False),
    ],
)
def test_loss_that_is_switched_off(mlp, batch, inspect, loss, is_off):
    """A factor of zero is a fault; a hinge that all samples satisfy is none."""
    report = inspect(mlp, batch, loss=loss)
    if is_off:
        assert "a loss weight of zero" in one(report).cause
        assert report._judgement.inconclusive == ()
    else:
        assert report.violations == ()


@pytest.mark.parametrize(
    ("low", "high", "is_wrong"),
    [(0.0, 1.0, False), (0.05, 0.95, False), (0.0, 255.0, True), (-1.0, 1.0, True)],
)
@pytest.mark.parametrize("logits", [True, False])
def test_targets_of_binary_cross_entropy(mlp, batch, inspect, low, high, is_wrong, logits):
    """They are probabilities: masks of 255 and labels of -1 are none."""
    target = low + (high - low) * torch.randint(0, 2, (64, 10)).float()
    if not logits and is_wrong:
        pytest.skip("torch refuses these")
    loss = bce if logits else lambda out, t: F.binary_cross_entropy(out.sigmoid(), t)
    report = inspect(mlp, batch, target, loss=loss)
    assert (findings(report) != []) is is_wrong
    if is_wrong:
        assert "targets from 0 to 1" in one(report).message


def test_layer_outside_the_loss_is_not_blamed_for_what_it_is_given(batch, inspect):
    """A probe that runs last sees the numbers that the loss is given, and has no part in it."""

    class Probed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.squash, self.probe = nn.Linear(16, 4), nn.Softmax(-1), nn.Dropout(0.0)

        def forward(self, x):
            out = self.squash(self.fc(x))
            self.probe(out * 1.0)
            return out

    target = torch.randint(4, (64,))
    (violation,) = inspect(Probed(), batch, target, loss=F.cross_entropy).violations
    assert (violation.check, violation.layer) == ("loss", "squash")
