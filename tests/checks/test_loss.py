"""The `loss` check: what a loss is wrongly given, and what only looks like it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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


def test_softmax_without_a_graph_is_found(mlp, batch, labels, inspect):
    """The numbers tell where autograd does not."""
    with torch.no_grad():
        report = inspect(nn.Sequential(mlp, nn.Softmax(1)), batch, labels, loss=F.cross_entropy)
    assert one(report).layer == "1"


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


def test_loss_of_something_else_is_named(mlp, batch, inspect):
    """A loss that does not depend on the output trains nothing."""
    other = torch.ones(3, requires_grad=True)
    report = inspect(mlp, batch, loss=lambda o: other.pow(2).sum())
    assert any("does not depend on the output" in text for _, text in findings(report))


def test_user_thresholds_are_obeyed(mlp, batch, labels, inspect):
    """max_initial_loss can be set."""
    nn.init.uniform_(mlp.head.weight, -100.0, 100.0)
    options = {"settings": {"max_initial_loss": 1e6}}
    assert findings(inspect(mlp, batch, labels, loss=F.cross_entropy, **options)) == []


def warned(report):
    """What the check warns of; nothing fails."""
    assert report.violations == (), report.violations
    return [v.message for v in report.warnings if v.check == "loss"]


@pytest.mark.parametrize(
    ("targets", "is_told"),
    [
        (torch.full((64,), 3), True),
        (torch.full((64,), 3).index_fill(0, torch.arange(40), -100), True),
        (torch.full((64,), 3).index_fill(0, torch.arange(50), -100), False),
        (torch.arange(64) % 2, False),
    ],
    ids=["all", "all that count", "too few that count", "two"],
)
@pytest.mark.parametrize("is_nll", [False, True])
def test_targets_of_one_class(targets, is_told, is_nll, mlp, batch, inspect):
    """A batch of one class is warned of from 16 targets on."""
    model = nn.Sequential(mlp, nn.LogSoftmax(1)) if is_nll else mlp
    loss = F.nll_loss if is_nll else F.cross_entropy
    messages = warned(inspect(model, batch, targets, loss=loss))
    assert len(messages) == is_told
    assert all("are class 3, of 10 classes" in message for message in messages)


def test_first_of_several_candidates(mlp, batch, inspect):
    """Where no layer has a row for each class, an index is a place among candidates."""

    def contrast(output, target):
        similar = (output * output.roll(1, 1)).sum(1, keepdim=True)
        return F.cross_entropy(torch.cat([similar, output @ torch.randn(10, 30)], 1), target)

    assert warned(inspect(mlp, batch, torch.zeros(64, dtype=torch.long), loss=contrast)) == []
