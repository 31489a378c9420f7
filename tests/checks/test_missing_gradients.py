"""The `missing_gradients` check: where the graph is cut, and what is no cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.missing_gradients import (
    Discriminating,
    Encoder,
    Proposing,
    Slope,
    SlowTeacher,
    Teacher,
    TwoHeads,
)
from pytest_modelhealth import ModelHealthWarning


@pytest.mark.parametrize(
    ("build", "layer", "part"),
    [
        (Teacher, "teacher.2", "teacher"),
        (SlowTeacher, "teacher.2", "teacher"),
        (lambda: nn.Sequential(Encoder(), nn.Linear(16, 4)), "0.fc", "0"),
        (lambda: Discriminating(beside_real=False), "g.2", "g"),
        (lambda: Discriminating(beside_real=True), "g.2", "g"),
    ],
    ids=["teacher", "detached teacher", "feature extractor", "discriminator", "beside real"],
)
def test_part_that_may_be_meant_not_to_learn_warns(build, layer, part, batch, inspect):
    """Nobody froze it, and nothing seen tells whether that is a fault: what would is said."""
    report = inspect(build(), batch)
    assert report.healthy
    (violation,) = report.warnings
    assert (violation.check, violation.layer) == ("missing_gradients", layer)
    assert f"freeze {part!r} by requires_grad_(False)" in violation.message
    assert "if it should learn" in violation.cause
    with pytest.warns(ModelHealthWarning, match="freeze"):
        report.assert_healthy()
    for text in (str(report), report.render("html"), repr(report)):
        assert layer in text
    assert report.to_dict()["warned"][0]["grade"] == "warn"
    strict = {"severity": {"missing_gradients": "fail"}}
    assert [v.layer for v in inspect(build(), batch, settings=strict).violations] == [layer]
    meant = build()
    meant.get_submodule(part).requires_grad_(False)
    report = inspect(meant, batch)
    assert report.healthy
    assert report.warnings == ()


def test_model_that_answers_in_evaluation_mode(batch, inspect, only):
    """Without a loss nothing tells whether it learns the same way; a loss or training does."""
    report = inspect(Proposing().eval(), batch)
    (line,) = report._judgement.inconclusive
    assert (report.violations, line.layer) == ((), "propose")
    assert "training mode" in line.reason
    assert only(inspect(Proposing(), batch), "missing_gradients").layer == "propose"
    graded = inspect(Proposing().eval(), batch, loss=lambda out: out.square().mean())
    assert only(graded, "missing_gradients").layer == "propose"


def test_what_the_loss_leaves_out_by_design_is_no_fault(batch, inspect):
    """A head that the loss does not use, and one that is never called, are healthy."""
    report = inspect(TwoHeads(), batch, loss=lambda out: out[1].square().mean())
    assert report["other"].status == "unused_in_loss"
    assert report["never"].status == "not_called"
    assert report.healthy


def test_frozen_layers_are_no_fault(mlp, batch, inspect):
    """A layer that is not to be trained needs no gradient."""
    mlp.fc1.requires_grad_(False)
    assert inspect(mlp, batch).healthy
    assert inspect(mlp.requires_grad_(False), batch, backward=False).healthy


def test_two_cuts_are_two_violations(batch, inspect):
    """Branches that are cut at two lines are both named, and each with its own cause."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.left, self.right = (nn.Linear(16, 8) for _ in range(3))
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            left = self.left(x).detach()
            right = self.right(x).detach()
            return self.head(self.main(x) + left + right)

    found = inspect(Branches(), batch).violations
    assert [(v.check, v.layer) for v in found] == [
        ("missing_gradients", "left"),
        ("missing_gradients", "right"),
    ]


@pytest.mark.parametrize("reads_bias", [False, True])
def test_bias_of_an_output_of_which_only_the_slope_is_fitted(reads_bias, inspect):
    """A constant that is added has no slope, so no loss of slopes depends on it."""
    report = inspect(Slope(reads_bias), torch.linspace(-1, 1, 32)[:, None])
    assert report.violations == ()
    assert ("bias" in report["last"].parameter_gradients) is reads_bias


def test_no_backward_no_violation(mlp, batch, inspect):
    """Without a backward pass nothing can be missing."""
    mlp.fc1.register_forward_hook(lambda module, args, output: output.detach())
    assert inspect(mlp, batch, backward=False).healthy
    with torch.no_grad():
        assert not inspect(mlp, batch).violations


def test_unwatched_gradients_are_not_missing(mlp, batch):
    """What was not to be observed is not judged."""
    from pytest_modelhealth import Inspector

    report = Inspector(mlp).watch("fc1", "activations").run_inspection(batch)
    assert report.healthy


@pytest.mark.parametrize("grades", [False, True])
def test_output_without_a_graph_under_a_loss(grades, batch, inspect, only):
    """With a loss of the user's nothing can be learnt; without one nothing tells."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    forward = model.forward
    model.forward = lambda x: forward(x).argmax(1).float()
    if not grades:
        assert inspect(model, batch).verdict == "inconclusive"
        return
    report = inspect(model, batch, torch.randn(64), loss=F.mse_loss)
    violation = only(report, "missing_gradients")
    assert (violation.layer, "`argmax` at" in violation.message) == ("1", True)
