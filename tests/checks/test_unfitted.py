"""What depth alone explains behind batch normalisations that have seen no batch, and what not."""

import pytest
import torch
from torch import nn

from corpus.models.starts import UNFITTED, deep, drawn


@pytest.mark.parametrize("check", UNFITTED)
def test_what_depth_explains_is_one_line(check, inspect):
    """Whatever it is called and in however many layers, it says what would settle it."""
    model, batch = UNFITTED[check](), torch.randn(64, 16)
    report = inspect(model.eval(), batch)
    assert report.violations == ()
    (line,) = report._judgement.inconclusive
    assert (line.check, line.layer) == ("normalization", "1")
    assert check in line.reason
    assert "train for a step first, or inspect in training mode" in line.reason
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1.0
    model.train()(batch)  # a step: now they normalise
    report = inspect(model.eval(), batch)
    assert report.violations == report._judgement.inconclusive == ()


class Towers(nn.Module):
    """One tower with batch normalisations that saw nothing, and one without any."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.normed = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU())
        self.plain = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))

    def forward(self, x):
        return self.heads[0](self.normed(self.first(x))), self.heads[1](self.plain(x))


@pytest.mark.parametrize(
    ("layer", "found"), [("plain.0", ["plain.1"]), ("normed.1", [])], ids=["beside", "behind"]
)
def test_only_what_lies_behind_is_left_in_doubt(layer, found, batch, inspect):
    """Units that a bias holds down beside the normalisation are as dead as anywhere."""
    model = Towers().eval()
    nn.init.constant_(model.get_submodule(layer).bias, -50.0)
    report = inspect(model, batch)
    assert [v.layer for v in report.violations] == found
    assert len(report._judgement.inconclusive) == (not found)


def test_what_depth_cannot_explain_stays_a_fault(batch, inspect):
    """A NaN, a cut and weights of zero are what they are behind any normalisation."""
    model = deep(nn.ReLU, 0.3, nn.Identity(), 3).eval()
    nn.init.zeros_(model[3].weight)
    assert [v.check for v in inspect(model, batch).violations] == ["initial_weights"]
    model = deep(nn.ReLU, 0.3, nn.Identity(), 3).eval()
    model[6].register_forward_hook(lambda module, args, out: out / 0.0)
    assert [v.check for v in inspect(model, batch).violations] == ["finite"]
    model = deep(nn.ReLU, 0.3, nn.Identity(), 3).eval()
    model[6].register_forward_hook(lambda module, args, out: out.detach())
    report = inspect(model, batch, loss=lambda out: out.square().mean())
    assert [v.check for v in report.violations] == ["missing_gradients"]


@pytest.mark.parametrize(
    ("centre", "shift"), [(1.0, 0.0), (0.0, 0.0), (0.1, 0.1)], ids=["DCGAN", "MobileViT", "RepVGG"]
)
def test_scales_that_an_initialiser_draws_were_not_trained(centre, shift, batch, inspect):
    """They vary before the first step; after one every bias has moved, too."""
    model = drawn(deep(nn.ReLU, 0.3, nn.Identity(), 3), centre, shift)
    assert inspect(model.eval(), batch).violations == ()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):  # in evaluation mode, so that no statistic moves
        optimizer.zero_grad()
        (model(batch) - 1.0).square().mean().backward()
        optimizer.step()
    found = inspect(model, batch).violations
    assert {v.check for v in found} == {"normalization"}
    assert all("never updated" in v.cause for v in found)


def test_layers_that_are_not_judged_draw_no_line(inspect):
    """What lies outside of the setting `layers` is neither a violation nor in doubt."""
    model, batch = UNFITTED["dead_units"]().eval(), torch.randn(64, 16)
    assert inspect(model, batch, settings={"layers": "0"}).healthy
    assert not inspect(model, batch, settings={"layers": "*"}).healthy
