"""Starts that authors chose and that look like faults, beside the faults that they look like."""

import math

import pytest
import torch
from torch import nn

from corpus import Case, cases
from corpus.models.starts import (
    ClassToken,
    Faces,
    Last,
    Rounded,
    Scaled,
    StandardisedConv,
    cosine_logits,
)
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.capture.observing.autograd_graph import are_cosines
from pytest_modelhealth.checks.facts import linear_maps
from pytest_modelhealth.report import Verdict

# those that take seconds to train are judged with the others of the corpus
STARTS = (
    "standardised convolutions, gains of one and zero",
    "last norm of each branch zero, around an activation",
    "standardised convolution of tiny raw weights",
    "ArcFace",
    "CosFace",
    "ArcFace as the loss",
    "cosines times 64",
    "classifier of the faults beside them",
    "wide convolutions of std 0.3 before batch norms",
    "wide convolutions of std 0.3 before norms of one's own",
    "LayerScale of 1e-6, class token, relative positions",
    "LayerScale of 1e-4, pooled queries, class token",
    "head that starts at 1e-8",
    "factors of one in a trunk",
)
CONTROLS = [case for case in cases(role="control") if case.name in STARTS]
FAULTS = [case for case in cases(role="fault") if case.healthy.__module__ == "corpus.models.starts"]


def report_on(case: Case) -> HealthReport:
    """Inspect a case under default settings."""
    made = case.build()
    options = {} if made.loss is None else {"loss": made.loss}
    return Inspector(made.model).run_inspection(made.inputs, made.target, **options)


def named(case):
    """The id of a case."""
    return case.name


@pytest.mark.parametrize("case", CONTROLS, ids=named)
def test_a_start_by_design_is_healthy(case):
    """What a paper or library starts with is no fault."""
    report = report_on(case)
    assert report.verdict is not Verdict.UNHEALTHY, report.render("failure")


@pytest.mark.parametrize("case", FAULTS, ids=named)
def test_the_nearest_fault_is_caught(case):
    """The fault beside it is named at its layer, with its cause."""
    found = [v for v in report_on(case).violations if case.is_at(v.layer)]
    assert any(case.is_named_in(f"{v.message} {v.cause}") for v in found), found


def test_a_gain_is_no_kernel(inspect):
    """Of a standardised convolution the weight alone is a linear map."""
    model = nn.Sequential(nn.Unflatten(1, (1, 4, 4)), StandardisedConv(1, 8))
    report = inspect(model, torch.randn(64, 16))
    assert [found.tensor for found in linear_maps(report["1"])] == ["weight"]


@pytest.mark.parametrize(
    ("logits", "truth"), [pytest.param(t, is_, id=name) for name, t, is_ in cosine_logits()]
)
def test_cosines_are_told_from_other_logits_by_their_graph(logits, truth):
    """However they are written; of plain logits a factor of 64 makes none."""
    assert are_cosines(logits) is truth


def test_a_gradient_that_vanishes_before_layerscale_is_no_design(inspect):
    """A gate explains as much as it closes: what sixteen sigmoids take away is a fault."""
    layers = [m for _ in range(16) for m in (nn.Linear(32, 32), nn.Sigmoid())]
    model = ClassToken()
    model.patches = nn.Sequential(model.patches, nn.Flatten(2), Last(nn.Sequential(*layers)))
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,))
    options = {"loss": nn.functional.cross_entropy, "settings": {"checks": ["grad_norm"]}}
    (violation,) = inspect(model, images, labels, **options).violations
    assert violation.layer.startswith("patches")
    assert "saturated" in violation.cause


def test_queries_of_the_last_block_rounded_are_warned_of(inspect):
    """Where a class token alone is read, no queries of the others are needed: it says so."""
    model = ClassToken(start=1.0)
    attention = model.blocks[2].attention
    attention.qkv = Rounded(32)
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,))
    report = inspect(model, images, labels, loss=nn.functional.cross_entropy)
    assert "blocks.2.attention.qkv.q" in {w.layer for w in report.warnings}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.head.weight.data.mul_(300), "its weights are too large"),
        (lambda m: m.head.bias.data.copy_(torch.arange(10.0) * 30), "its bias is too large"),
        (lambda m: setattr(m, "scale", 640.0), "its forward multiplies"),
    ],
)
def test_what_makes_logits_large_is_said(change, said, inspect):
    """The weights, the bias or a factor: the one that explains them."""
    model = Scaled(1.0)
    change(model)
    labels = torch.randint(0, 10, (64,))
    options = {"loss": nn.functional.cross_entropy, "settings": {"checks": ["loss"]}}
    (violation,) = inspect(model, torch.randn(64, 64), labels, **options).violations
    assert said in violation.cause


@pytest.mark.parametrize(("scale", "healthy"), [(64.0, True), (6400.0, False)])
def test_cosines_may_be_scaled_as_papers_scale_them(scale, healthy, inspect):
    """By 64 they may; by a hundred times that no paper does."""
    labels = torch.randint(0, 10, (64,))
    loss = nn.functional.cross_entropy
    report = inspect(Faces(scale), (torch.randn(64, 64), labels), labels, loss=loss)
    assert report.healthy is healthy
    assert report.observation.loss_calls[0].cosines
    assert math.isclose(report.loss or 0.0, report.observation.loss_calls[0].value or 1.0)
