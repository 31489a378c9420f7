"""Leaves that learn nothing as nobody registered them, and leaves that are others'."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Mlp, Net, batch

CHECK = "unregistered_parameters"


def linear():
    """Return a layer to hide: 272 elements in two parameters."""
    return nn.Linear(16, 16)


def keeping(use, **hidden):
    """Return a head over what is kept under these names, which torch may not know."""
    model = Net(lambda m, x: m.head(use(m, x)), head=(16, 4))
    for name, value in hidden.items():
        setattr(model, name, value)
    return model


def in_a_list():
    """Return layers in a plain list."""
    return keeping(lambda m, x: m.blocks[1](m.blocks[0](x)), blocks=[linear(), linear()])


def made_anew(*, assigned):
    """Return a parameter that each forward makes, and keeps or not."""

    def use(m, x):
        weight = nn.Parameter(m.head.weight.detach().t() @ m.head.weight.detach())
        if assigned:
            m.head.extra = weight
        return x @ weight

    return keeping(use)


def registered_too():
    """Return a list of what is registered elsewhere."""
    model = keeping(lambda m, x: m.order[0](x), fc=linear())
    model.order = [model.fc]
    return model


def remembers(m, x):
    """Keep the batch."""
    m.last = x
    return x * 2.0


def by_a_loss(loss, hold):
    """Return a model under a loss that holds parameters of its own."""

    def build():
        held = hold()
        return Mlp(), batch(), None, lambda output: loss(output, held).mean()

    return build


KEPT = "nn.ModuleList"
FAULTS = {
    # wherever a module is kept, its parameters are found at their path, and the fix is told
    "list": (in_a_list, "fail", "", "blocks[0].bias, blocks[0].weight, blocks[1].bias", KEPT,
             "(544 elements)"),
    "dictionary": (
        lambda: keeping(lambda m, x: m.heads["a"](x), heads={"a": linear()}), "fail", "",
        "heads['a'].bias, heads['a'].weight", KEPT,
    ),
    "list of lists": (
        lambda: keeping(lambda m, x: m.grid[0][0](x), grid=[[linear()], ()]), "fail", "",
        "grid[0][0].bias", KEPT,
    ),
    "container in a list": (
        lambda: keeping(lambda m, x: m.parts[0](x), parts=[nn.Sequential(linear())]), "fail", "",
        "parts[0].0.bias", KEPT,
    ),
    "object": (
        lambda: keeping(lambda m, x: m.box.inner(x), box=SimpleNamespace(inner=linear())),
        "fail", "", "box.inner.bias", KEPT,
    ),
    # the owner is the registered module whose attribute holds the list
    "the layer that keeps them": (
        lambda: nn.Sequential(nn.Linear(16, 16), in_a_list()), "fail", "1",
    ),
    "a tensor": (
        lambda: keeping(lambda m, x: x * m.scale, scale=torch.ones(16, requires_grad=True)),
        "warn", "", "scale", "nn.Parameter",
    ),
    "a parameter in a list": (
        lambda: keeping(lambda m, x: x * m.scales[0], scales=[nn.Parameter(torch.ones(16))]),
        "fail", "", "scales[0]", "nn.ParameterList",
    ),
    "made by the forward": (lambda: made_anew(assigned=False), "fail", "", "makes them anew"),
    "made and kept": (lambda: made_anew(assigned=True), "fail", "head", "makes them anew"),
    # what is kept is no leaf, and what it was made of nobody holds
    "computed with where it is made": (
        lambda: keeping(lambda m, x: x * m.scale, scale=nn.Parameter(torch.ones(16)) * 2.0),
        "fail", "", "1 that only the graph holds (used at", "what is kept is computed of them",
    ),
}  # fmt: skip
HEALTHY = {
    # a batch that requires a gradient, or comes out of another model, is the user's own
    "a batch with a gradient": lambda: (Mlp(), batch().requires_grad_()),
    "a batch of another model": lambda: (Mlp(), linear()(batch())),
    "a batch that the model keeps": lambda: (keeping(remembers), batch().requires_grad_()),
    # what a loss learns, and another model that it uses, is not the model's to register
    "a loss that is a model": by_a_loss(lambda o, critic: critic(o), lambda: nn.Linear(10, 1)),
    "a loss that learns": by_a_loss(
        lambda o, doubt: o.pow(2) * torch.exp(-doubt), lambda: torch.zeros((), requires_grad=True)
    ),
    "a list that a loss reads": by_a_loss(
        lambda o, scales: (o * scales[0]).pow(2), lambda: [nn.Parameter(torch.ones(10))]
    ),
    # weights that another layer makes are no leaves
    "fast weights": lambda: keeping(lambda m, x: F.linear(x, m.maker.weight * 2.0), maker=linear()),
    # a forward makes its input a leaf, to differentiate by it
    "a leaf for forces": lambda: keeping(lambda m, x: x.detach().requires_grad_().tanh()),
    "a reference to a registered module": registered_too,
    # what gets no gradient needs no optimizer
    "a frozen teacher in a list": lambda: keeping(
        lambda m, x: m.teacher[0](x), teacher=[linear().requires_grad_(False)]
    ),
}
