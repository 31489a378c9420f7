"""Gradients of exactly zero: closed gates that learn are a design, what stops them for good not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from corpus.checks.zero_gradients import (
    DRAWS,
    GATES,
    Branch,
    MaybeLeftOut,
    Weighted,
    zero_linear,
)
from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.checks.judging.judge import judge
from pytest_modelhealth.checks.zero_gradients import zero_gradients
from pytest_modelhealth.report import Flow


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
