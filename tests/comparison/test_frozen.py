"""A model beside what freezing and optimising made of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corpus.models.rewritten import Several, Text
from pytest_modelhealth import InspectionError
from pytest_modelhealth.comparing import compare
from pytest_modelhealth.comparison.comparison import Comparison
from tests.capture.test_frozen import (
    Flow,
    Net,
    frozen,
    inlined,
    loaded,
    optimised,
    optimised_trace,
    traced,
)

pytestmark = pytest.mark.filterwarnings("ignore")


KINDS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "frozen": frozen,
    "optimised": optimised,
    "trace": traced,
    "optimised trace": optimised_trace,
    "inlined": inlined,
    "file": lambda model, batch: loaded(frozen(model, batch)),
    "file of a trace": lambda model, batch: loaded(traced(model, batch)),
    "frozen after loading": lambda model, batch: torch.jit.freeze(loaded(torch.jit.script(model))),
}
BATCHES: dict[type[nn.Module], Callable[[], Tensor]] = {
    Net: lambda: torch.randn(4, 3, 6, 6),
    Flow: lambda: torch.arange(8).reshape(2, 4),
    Text: lambda: torch.randint(12, (3, 5)),
    Several: lambda: torch.randn(4, 6),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", BATCHES)
def test_what_computes_the_same_is_equivalent(build: type[nn.Module], kind: str) -> None:
    """No kind of script is denied for layers that it has lost, moved or merged."""
    torch.manual_seed(0)
    model, batch = build().eval().requires_grad_(False), BATCHES[build]()
    comparison = compare(model, KINDS[kind](model, batch), batch)
    comparison.assert_equivalent()
    compared = [layer for layer in comparison.layers.values() if layer.tensors]
    assert len(compared) > 4, "so few layers show nothing"


@pytest.mark.parametrize("make", [frozen, optimised])
def test_a_right_fold_is_said_to_be_one(make: Any) -> None:
    """The folded weights are no changed parameters."""
    torch.manual_seed(0)
    model = Net().eval()
    batch = torch.randn(4, 3, 6, 6)
    comparison = compare(model, make(model, batch), batch)
    comparison.assert_equivalent()
    assert comparison["first.conv"].pair.word == comparison["first.bn"].pair.word == "folded"
    assert not any("parameters differ" in note for note in comparison.notes)


def _other_epsilon(norm: nn.BatchNorm2d) -> None:
    norm.eps = 0.1


def _stale_statistics(norm: nn.BatchNorm2d) -> None:
    norm.reset_running_stats()


@pytest.mark.parametrize("spoil", [_other_epsilon, _stale_statistics])
@pytest.mark.parametrize("make", [frozen, optimised, traced])
def test_a_wrong_fold_names_the_convolution_and_the_norm(make: Any, spoil: Any) -> None:
    """And not the layers after them, which only show it."""
    comparison = _spoiled(make, lambda model: spoil(model.second.bn))
    found = comparison.first_divergence
    assert found is not None
    assert found.layer == "second.conv"
    assert "second.bn, which was folded into it" in found.story
    assert not comparison["first.bn"].diverged


def test_a_norm_frozen_in_training_mode_is_named_and_its_mode() -> None:
    """It is not folded, and normalises by each batch."""
    comparison = _spoiled(frozen, lambda model: model.second.bn.train())
    found = comparison.first_divergence
    assert found is not None
    assert found.layer == "second.bn"
    assert "it is in training mode" in found.cause


@pytest.mark.parametrize("kind", KINDS)
def test_another_weight_names_the_layer(kind: str) -> None:
    """Whatever is left of its name."""

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.others[0].weight[1] += 0.05

    found = _spoiled(KINDS[kind], change).first_divergence
    assert found is not None
    assert found.layer == "others.0"


def _spoiled(make: Any, spoil: Callable[[nn.Module], None]) -> Comparison:
    """Compare a model with the script of a copy that was spoiled."""
    torch.manual_seed(0)
    model, batch = Net().eval(), torch.randn(16, 3, 6, 6)
    other = copy.deepcopy(model)
    spoil(other)
    comparison = compare(model, make(other, batch), batch)
    assert not comparison.equivalent
    return comparison


def test_a_frozen_script_is_no_reference() -> None:
    """It cannot be run in another precision, which the noise is measured by."""
    model, batch = Flow().eval(), torch.arange(8).reshape(2, 4)
    script = frozen(model, batch)
    with pytest.raises(InspectionError, match=r"frozen script or .* can only be the candidate"):
        compare(script, model, batch)
