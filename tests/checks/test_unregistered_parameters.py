"""The `unregistered_parameters` check: leaves that learn nothing, and leaves that are others'."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def findings(report):
    """Return what the check found."""
    return [v for v in report.violations if v.check == "unregistered_parameters"]


class Holder(nn.Module):
    """A head over whatever `keep` hides in the model."""

    def __init__(self, keep, use):
        super().__init__()
        self.head = nn.Linear(16, 4)
        self.use = use
        keep(self)

    def forward(self, x):
        return self.head(self.use(self, x))


def linear():
    """Return a layer to hide: 272 elements in two parameters."""
    return nn.Linear(16, 16)


MODULES = {
    "list": (
        lambda m: setattr(m, "blocks", [linear(), linear()]),
        lambda m, x: m.blocks[1](m.blocks[0](x)),
        ["blocks[0].bias", "blocks[0].weight", "blocks[1].bias", "blocks[1].weight"],
    ),
    "dictionary": (
        lambda m: setattr(m, "heads", {"a": linear()}),
        lambda m, x: m.heads["a"](x),
        ["heads['a'].bias", "heads['a'].weight"],
    ),
    "list of lists": (
        lambda m: setattr(m, "grid", [[linear()], ()]),
        lambda m, x: m.grid[0][0](x),
        ["grid[0][0].bias", "grid[0][0].weight"],
    ),
    "container in a list": (
        lambda m: setattr(m, "parts", [nn.Sequential(linear())]),
        lambda m, x: m.parts[0](x),
        ["parts[0].0.bias", "parts[0].0.weight"],
    ),
    "object": (
        lambda m: setattr(m, "box", SimpleNamespace(inner=linear())),
        lambda m, x: m.box.inner(x),
        ["box.inner.bias", "box.inner.weight"],
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_torch_does_not_know_are_named(name, batch, inspect):
    """Wherever a module is kept, its parameters are found at their path, and the fix is told."""
    keep, use, paths = MODULES[name]
    report = inspect(Holder(keep, use), batch)
    assert [one.path for one in report.observation.unregistered] == paths
    (violation,) = findings(report)
    assert (violation.layer, violation.value) == ("", len(paths))
    assert "nn.ModuleList" in violation.cause
    assert f"({272 * len(paths) // 2:,} elements)" in violation.message


def test_the_layer_that_keeps_them_is_named(batch, inspect):
    """The owner is the registered module whose attribute holds the list."""
    inner = Holder(MODULES["list"][0], MODULES["list"][1])
    (violation,) = findings(inspect(nn.Sequential(nn.Linear(16, 16), inner), batch))
    assert violation.layer == "1"


def test_tensor_kept_as_attribute_is_named(batch, inspect):
    """A tensor with requires_grad is trained by nobody unless it is a Parameter."""

    def keep(model):
        model.scale = torch.ones(16, requires_grad=True)

    (violation,) = findings(inspect(Holder(keep, lambda m, x: x * m.scale), batch))
    assert "scale" in violation.message
    assert "nn.Parameter" in violation.cause


@pytest.mark.parametrize("assigned", [True, False])
def test_parameter_made_by_the_forward_is_named(batch, inspect, assigned):
    """A Parameter that each forward makes anew is held by no optimizer."""

    def use(model, x):
        weight = nn.Parameter(model.head.weight.detach().t() @ model.head.weight.detach())
        if assigned:
            model.head.extra = weight
        return x @ weight

    (violation,) = findings(inspect(Holder(lambda m: None, use), batch))
    assert "makes them anew" in violation.cause


def test_parameters_made_by_the_forward_are_told_once_with_their_lines(batch, inspect):
    """Some are used at a line of the user's code, some in a layer that is made anew."""

    def use(model, x):
        scale, layer = nn.Parameter(torch.ones(16)), linear()
        for _ in range(2):
            x = x @ nn.Parameter(torch.randn(16, 16))
        return layer(x) * scale

    keep, _, paths = MODULES["dictionary"]
    (violation,) = findings(
        inspect(Holder(keep, lambda m, x: use(m, MODULES["dictionary"][1](m, x))), batch)
    )
    shown = violation.message.partition(": ")[2]
    assert shown.startswith("5 that only the graph holds (used at ")
    assert shown.endswith(f"), {', '.join(paths)}")
    lines = re.findall(r"test_unregistered_parameters\.py:(\d+)", shown)
    code = [Path(__file__).read_text().splitlines()[int(line) - 1].strip() for line in lines]
    assert sorted(code) == ["return layer(x) * scale", "x = x @ nn.Parameter(torch.randn(16, 16))"]


def test_parameter_computed_with_where_it_is_made_is_named(batch, inspect):
    """What is kept is no leaf, and what it was made of nobody holds."""

    def keep(model):
        model.scale = nn.Parameter(torch.ones(16)) * 2.0

    (violation,) = findings(inspect(Holder(keep, lambda m, x: x * m.scale), batch))
    assert re.search(r"1 that only the graph holds \(used at \S+:\d+\)", violation.message)
    assert "what is kept is computed of them" in violation.cause


def test_inputs_of_the_user_are_no_fault(mlp, batch, inspect):
    """A batch that requires a gradient, or comes out of another model, is the user's own."""
    assert findings(inspect(mlp, batch.clone().requires_grad_())) == []
    assert findings(inspect(mlp, nn.Linear(16, 16)(batch))) == []


def test_input_that_the_model_keeps_is_no_fault(batch, inspect):
    """A model may remember its batch in an attribute."""

    def use(model, x):
        model.last = x
        return x * 2.0

    assert findings(inspect(Holder(lambda m: None, use), batch.clone().requires_grad_())) == []


def test_parameters_of_the_loss_are_no_fault(mlp, batch, inspect):
    """What a loss learns, and another model that it uses, is not the model's to register."""
    critic, uncertainty = nn.Linear(10, 1), torch.zeros((), requires_grad=True)
    assert findings(inspect(mlp, batch, loss=lambda out: critic(out).mean())) == []
    report = inspect(mlp, batch, loss=lambda out: out.pow(2).mean() * torch.exp(-uncertainty))
    assert findings(report) == []


def test_fast_weights_are_no_fault(batch, inspect):
    """Weights that another layer makes are no leaves."""

    def keep(model):
        model.maker = linear()

    use = Holder(keep, lambda m, x: F.linear(x, m.maker.weight * 2.0))
    assert findings(inspect(use, batch)) == []


def test_leaf_for_forces_is_no_fault(batch, inspect):
    """A forward that makes its input a leaf, to differentiate by it, makes no parameter."""
    model = Holder(lambda m: None, lambda m, x: x.detach().requires_grad_().tanh())
    assert findings(inspect(model, batch)) == []


def test_reference_to_a_registered_module_is_no_fault(batch, inspect):
    """A list that holds what is registered elsewhere hides nothing."""

    def keep(model):
        model.fc = linear()
        model.order = [model.fc]

    assert findings(inspect(Holder(keep, lambda m, x: m.order[0](x)), batch)) == []


def test_frozen_teacher_in_a_list_is_no_fault(batch, inspect):
    """What gets no gradient needs no optimizer."""

    def keep(model):
        model.teacher = [linear().requires_grad_(False)]

    assert findings(inspect(Holder(keep, lambda m, x: m.teacher[0](x)), batch)) == []


def test_gradients_of_what_is_hidden_are_put_back(batch, inspect):
    """What a hidden parameter had as gradient is there again afterwards, the same object."""
    model = Holder(MODULES["list"][0], MODULES["list"][1])
    before = model.blocks[0].weight.grad = torch.ones(16, 16)
    inspect(model, batch)
    assert model.blocks[0].weight.grad is before
    assert bool((before == 1).all())


def test_parameters_that_others_keep_in_a_list_are_no_fault(mlp, batch, inspect):
    """A list that the loss reads is held by somebody."""
    scales = [nn.Parameter(torch.ones(10))]
    assert findings(inspect(mlp, batch, loss=lambda out: (out * scales[0]).pow(2).mean())) == []
