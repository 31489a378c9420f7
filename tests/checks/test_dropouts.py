"""Dropouts that drop everything, or in evaluation mode: found by the `normalization` check."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies


class DropPath(nn.Module):
    """Drops the branch of a sample with a probability of `rate`."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training:
            return x
        kept = x.new_empty(len(x), 1).bernoulli_(1.0 - self.rate)
        return x * kept / max(1.0 - self.rate, 1e-6)


class Residual(nn.Module):
    """A block that adds what a dropout leaves of its branch."""

    def __init__(self, drop):
        super().__init__()
        self.inner, self.branch, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.drop = drop

    def forward(self, x):
        h = self.inner(x)
        return self.head(h + self.drop(self.branch(h)))


class Attention(nn.Module):
    """Fused attention with a dropout of its own."""

    def __init__(self, respects_mode):
        super().__init__()
        self.qkv, self.respects_mode = nn.Linear(16, 48), respects_mode

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        rate = 0.0 if self.respects_mode and not self.training else 0.1
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate)


def found(report, severity="fail"):
    """The layers that the check names with a severity."""
    told = report.violations if severity == "fail" else report.warnings
    return [v.layer for v in told if v.check == "normalization"]


@pytest.mark.parametrize(
    ("drop", "layer"),
    [
        (nn.Dropout(1.0), "drop"),
        (nn.Dropout1d(1.0), "drop"),
        (DropPath(1.0), "drop"),
        (Applies(lambda x: F.dropout(x, 1.0)), "drop"),
        (Applies(lambda x: F.dropout(F.dropout(x, 1.0), 0.1)), "drop"),
    ],
    ids=["module", "channels", "path", "function", "function, and one that does not"],
)
def test_dropout_of_everything(drop, layer, batch, inspect):
    """What drops all that it is given is named, and that in the first place."""
    report = inspect(Residual(drop), batch)
    assert found(report) == [layer]
    assert report.violations[0].check == "normalization"
    assert "its rate is 1" in report.violations[0].cause


@pytest.mark.parametrize(
    "drop",
    [nn.Dropout(0.5), nn.Dropout(0.98), DropPath(0.2), Applies(lambda x: F.dropout(x, 0.9))],
    ids=["half", "nearly all", "path", "function"],
)
def test_dropout_of_some(drop, batch, inspect):
    """What leaves something is no fault."""
    assert found(inspect(Residual(drop), batch)) == []


def test_zeros_that_come_in_are_not_dropped(batch, inspect):
    """A dropout that is given zeros returns zeros."""
    model = nn.Sequential(nn.Linear(16, 32), Applies(lambda x: 0 * x), nn.Dropout(1.0))
    assert found(inspect(model, batch)) == []


@pytest.mark.parametrize("training", [False, True])
def test_off_in_evaluation(training, batch, inspect):
    """A dropout of everything that is off drops nothing."""
    model = Residual(Applies(lambda x: F.dropout(x, 1.0, training=training))).train(training)
    assert found(inspect(model, batch)) == (["drop"] if training else [])


@pytest.mark.parametrize(
    ("drop", "warned"),
    [
        (lambda x: F.dropout(x), ["drop"]),
        (lambda x: F.dropout2d(x[..., None, None], 0.2).flatten(1), ["drop"]),
        (lambda x: F.dropout(F.dropout(x, 0.5), 0.5, training=False), ["drop"]),
        (lambda x: F.dropout(x, 0.0), []),
        (lambda x: F.dropout(x, training=False), []),
    ],
    ids=["on", "channels", "one of two", "rate 0", "off"],
)
def test_functional_dropout_in_evaluation(drop, warned, batch, inspect):
    """It is warned of, as Monte Carlo dropout looks the same, and fails nothing."""
    report = inspect(Residual(Applies(drop)).eval(), batch)
    assert (found(report), found(report, "warn")) == ([], warned)


def test_functional_dropout_in_training(batch, inspect):
    """In training mode it is what it is for."""
    report = inspect(Residual(Applies(F.dropout)), batch)
    assert found(report, "warn") == []


@pytest.mark.parametrize("respects_mode", [False, True])
def test_fused_attention_in_evaluation(respects_mode, inspect):
    """Fused attention knows no mode: a rate that is passed in evaluation is a fault."""
    report = inspect(Attention(respects_mode).eval(), torch.randn(8, 6, 16))
    assert found(report) == ([] if respects_mode else ["scaled_dot_product_attention"])


def test_attention_of_torch_in_evaluation(inspect):
    """It respects its mode."""
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    report = inspect(model, torch.randn(8, 6, 16))
    assert (found(report), found(report, "warn")) == ([], [])
