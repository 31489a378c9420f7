"""Starts that authors chose and that look like faults, beside the faults that they look like."""

import math

import pytest
import torch
from torch import nn

from corpus.models.starts import (
    ClassToken,
    Faces,
    Last,
    Rounded,
    Scaled,
    StandardisedConv,
    cosine_logits,
)
from pytest_modelhealth.capture.observing.autograd_graph import are_cosines
from pytest_modelhealth.checks.facts import linear_maps


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
