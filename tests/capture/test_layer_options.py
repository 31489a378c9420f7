"""How modules and calls are set up, as the capture records it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth.report import LayerRecord
from tests.capture.oracle import report_of


def records(model: nn.Module) -> Mapping[str, LayerRecord]:
    """Return the layers of one inspection."""
    return report_of(model, torch.randn(4, 6)).layers


def test_modules_tell_how_they_are_set_up() -> None:
    """Plain attributes of modules are recorded; tensors, tuples and private ones are not."""
    model = nn.Sequential(nn.BatchNorm1d(6, eps=1e-3), nn.Dropout(0.25), nn.Softmax(dim=0)).eval()
    seen = records(model)
    assert seen["0"].options == {
        "training": False,
        "num_features": 6,
        "eps": 1e-3,
        "momentum": 0.1,
        "affine": True,
        "track_running_stats": True,
    }
    assert seen["1"].options == {"training": False, "p": 0.25, "inplace": False}
    assert seen["2"].options == {"training": False, "dim": 0}
    assert seen[""].options == {"training": False}


def test_modules_of_one_class_tell_each_its_own() -> None:
    """An attribute that one of them alone has, or has as a number, is none of the other."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].rank = 4
    model[2].rank = [4]
    own = [records(model)[name].options for name in "012"]
    shared = {"training": True, "in_features": 6, "out_features": 6}
    assert own == [shared, shared | {"rank": 4}, shared]


class Calls(nn.Module):
    """Functional calls with arguments by position and by name."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(x, 0.3)
        x = F.softmax(x, dim=-1) + torch.softmax(x, 0) + x.softmax(dim=1)
        return F.dropout(x, 0.1)


def test_functional_calls_tell_their_arguments() -> None:
    """A functional layer's options are its call's plain arguments; dropout is its caller's."""
    seen = records(Calls().eval())
    assert seen["leaky_relu"].options == {"negative_slope": 0.3, "inplace": False}
    assert [seen[f"softmax{i}"].options for i in ("", "_1", "_2")] == [
        {"dim": -1},
        {"dim": 0},
        {"dim": 1},
    ]
    assert seen[""].options == {"training": False, "dropout_p": 0.1, "dropout_training": True}


def test_training_is_that_of_the_forward() -> None:
    """A forward that switches a layer's mode is recorded as it ran, and undone."""

    class Switches(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0].train()(x)

    model = Switches(nn.Dropout(0.5)).eval()
    assert records(model)["0"].options["training"] is True
    assert not model[0].training
