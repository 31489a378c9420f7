"""A model beside what freezing and optimising made of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corpus.models.rewritten import Several, Text
from corpus.models.scripted import MAKERS, Flow, Net, inlined, loaded
from pytest_modelhealth.comparing import compare
from pytest_modelhealth.comparison.comparison import Comparison

pytestmark = pytest.mark.filterwarnings("ignore")


KINDS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "frozen": MAKERS["frozen"],
    "optimised": MAKERS["optimised"],
    "trace": MAKERS["frozen, traced"],
    "optimised trace": MAKERS["optimised, traced"],
    "inlined": inlined,
    "file": MAKERS["frozen, in a file"],
    "file of a trace": lambda model, batch: loaded(MAKERS["frozen, traced"](model, batch)),
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
    # all layers of one of these models are linear, and a frozen script has no names for them
    assert len(compared) > (0 if build is Several else 4), "so few layers show nothing"


def _other_epsilon(model: nn.Module) -> None:
    model.second.bn.eps = 0.1


def _other_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.others[0].weight[1, 0] += 0.5


@pytest.mark.parametrize(
    ("spoil", "before", "behind"),
    [(_other_epsilon, "first.relu", "second.relu"), (_other_weight, "rest.1", "others.1")],
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "inlined"])
def test_a_fault_lies_between_the_operations_that_are_right_and_wrong(
    kind: str, spoil: Any, before: str, behind: str
) -> None:
    """Activations keep their places where layers have lost their names."""
    comparison = _spoiled(KINDS[kind], spoil)
    assert not comparison[before].diverged
    assert comparison[behind].diverged
    assert behind in comparison.first_divergence.story


def test_a_script_that_kept_its_layers_names_the_one_that_is_wrong() -> None:
    """By its weight."""
    found = _spoiled(inlined, _other_weight).first_divergence
    assert found.layer == "others.0"
    assert found.kind == "parameters"


def _spoiled(make: Any, spoil: Callable[[nn.Module], None]) -> Comparison:
    """Compare a model with the script of a copy that was spoiled."""
    torch.manual_seed(0)
    model, batch = Net().eval(), torch.randn(16, 3, 6, 6)
    other = copy.deepcopy(model)
    spoil(other)
    comparison = compare(model, make(other, batch), batch)
    assert not comparison.equivalent
    return comparison
