"""The `missing_gradients` check: where the graph is cut, and gradients of exactly zero."""

from dataclasses import replace

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
from corpus.checks.zero_gradients import DRAWS, GATES, Branch, MaybeLeftOut, Weighted, zero_linear
from pytest_modelhealth import ModelHealthWarning
from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.checks.judging.judge import judge
from pytest_modelhealth.checks.zero_gradients import zero_gradients
from pytest_modelhealth.report import Flow


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


# ---- gradients of exactly zero -------------------------------------------------------------------


def told(report):
    """The violations of the check, with those folded below others."""
    every = [w for v in report.violations for w in (v, *v.folded)]
    return [v for v in every if v.check == "missing_gradients"]


def unseen(report):
    """The violations of the check as they are where no flow was recorded."""
    observation = replace(report.observation, flow=None)
    return [
        v for v in judge(observation, default_settings()).violations
        if v.check == "missing_gradients"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", GATES)
def test_gate_is_no_fault_where_no_product_is_seen(kind, batch, inspect):
    """Compiled code shows no products: a gate that learns explains what lies about it."""
    assert unseen(inspect(GATES[kind](), batch)) == []


def test_layer_that_passes_nothing_on_is_found_where_no_operation_is_seen(batch, inspect):
    """No gate is there to explain it."""
    observation = replace(inspect(Branch(lambda m, h: h.round()), batch).observation, flow=None)
    assert [w.layer for w in judge(observation, default_settings()).warned] == ["branch"]


def test_expert_that_nothing_was_routed_to_is_no_fault(batch, inspect):
    """Experts side by side take the same, and others learn."""
    report = inspect(Weighted(is_routed=True), batch)
    assert report["experts.7.2"].parameter_gradients["weight"].abs_max == 0.0
    assert told(report) == []
    assert report.warnings == ()


def test_steps_of_training_are_undone_and_said(batch, inspect):
    """They run where a gradient of zero was seen, and nothing of them is left."""
    model = Branch(lambda m, h: m.last(h), last=zero_linear(16, 16))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    report = inspect(model, batch)
    assert report.healthy
    assert report.observation.probes["zero_gradients"].forwards == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_without_further_runs_a_zero_is_warned_of(batch, inspect):
    """Where no steps may be run, a gate that opens and one that does not look the same."""
    model = Branch(lambda m, h: m.last(h), last=zero_linear(16, 16))
    report = inspect(model, batch, probes=False)
    assert [(w.check, w.layer) for w in report.warnings] == [("missing_gradients", "branch")]
    assert "was not tried" in report.warnings[0].message


def test_flat_loss_is_found(mlp, batch, inspect, only):
    """Gradients that a clamp in the loss makes exactly zero follow from the loss."""
    report = inspect(mlp, batch, loss=lambda out: out.square().mean().clamp(min=1e3))
    violation = only(report, "loss")
    assert "clamp" in violation.cause
    assert [(v.check, v.layer) for v in violation.folded] == [("missing_gradients", "head")]


def test_layer_that_passes_nothing_on_is_named(batch, inspect):
    """Where the gradient becomes exactly zero, the layer that took the output is in the cause."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Hardtanh(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].bias.fill_(1e3)
    (root,) = inspect(model, batch).violations
    assert (root.check, root.layer) == ("saturation", "1")
    violation = next(v for v in root.folded if v.check == "missing_gradients")
    assert (violation.check, violation.layer) == ("missing_gradients", "0")
    assert "'1'" in violation.cause


@pytest.mark.parametrize("is_module", [True, False])
@pytest.mark.parametrize("kind", DRAWS)
def test_branch_that_stochastic_depth_dropped_is_warned_of(kind, is_module, inspect):
    """No unit is dead and no gradient cut: the draw kept none of the samples of this batch."""
    report = inspect(MaybeLeftOut(DRAWS[kind], is_module), torch.randn(8, 16))
    assert report.healthy, report
    assert [(v.check, v.layer) for v in report.warnings] == [("missing_gradients", "branch.3")]
    assert "this batch alone" in report.warnings[0].cause


def test_deep_model_is_judged_in_linear_time(monkeypatch, inspect):
    """Where gradients underflow in many layers, the flow from each of them is not followed."""
    sweeps = []
    walk = Flow.walk

    def counted(flow, start, by="value", **options):
        if by in ("value", "gradient"):  # others end at the next layers
            sweeps.append(by)
        return walk(flow, start, by, **options)

    monkeypatch.setattr(Flow, "walk", counted)
    model = nn.Sequential(*[m for _ in range(100) for m in (nn.Linear(16, 16), nn.ReLU())])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    report = inspect(model, torch.randn(16, 16))
    zero = [r.name for r in report if r.gradients is not None and r.gradients.abs_max == 0.0]
    assert len(zero) > 50
    assert [v.check for v in report._judgement.warned] == ["missing_gradients"]
    before = len(sweeps)
    list(zero_gradients(report.observation))
    assert len(sweeps) - before <= 8
