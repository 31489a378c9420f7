"""Small models that are written in two ways, layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(seed: int, *sizes: int, bias: bool = True) -> nn.Linear:
    """Return a linear layer with weights of its own."""
    torch.manual_seed(seed)
    return nn.Linear(*(sizes or (8, 8)), bias=bias)


def named(**layers: nn.Module) -> nn.Sequential:
    """Return layers in a row, under names."""
    model = nn.Sequential()
    for name, module in layers.items():
        model.add_module(name, module)
    return model


def mlp(*extra: tuple[int, nn.Module]) -> nn.Sequential:
    """Return a perceptron, with further layers at the given places."""
    layers: list[nn.Module] = [linear(0), nn.ReLU(), linear(1), nn.ReLU(), linear(2)]
    for place, module in extra:
        layers.insert(place, module)
    return nn.Sequential(*layers)


class Calling(nn.Module):
    """Layers of these names, in a forward of one's own."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, module in layers.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def attributes() -> nn.Module:
    """The perceptron of `mlp`, written with attributes and functions."""
    return Calling(
        lambda m, x: m.third(F.relu(m.second(F.relu(m.first(x))))),
        first=linear(0), second=linear(1), third=linear(2),
    )  # fmt: skip


def ordered(*order: str, swapped: bool = False) -> nn.Module:
    """Three layers and a norm, called in this order; of two, each may have the other's weights."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        for name in order:
            x = getattr(model, name)(x)
        return x

    a, b = (linear(1), linear(0)) if swapped else (linear(0), linear(1))
    made = Calling(forward, a=a, b=b, c=linear(2), norm=nn.LayerNorm(8))
    made.c.extra = nn.Identity() if swapped else None  # so that the two structures differ
    return made


def projections(*, fused: bool, other: bool = False) -> nn.Module:
    """Query, key and value, from one projection or from three."""
    whole, around = linear(5, 8, 24), {"before": linear(1), "out": linear(2)}
    if fused:
        return Calling(lambda m, x: m.out(m.qkv(m.before(x))[:, :8]), qkv=whole, **around)
    parts = {name: nn.Linear(8, 8) for name in "qkv"}
    for part, weight, bias in zip(
        parts.values(), whole.weight.chunk(3), whole.bias.chunk(3), strict=True
    ):
        part.weight.data, part.bias.data = weight.data.clone(), bias.data.clone()
    if other:
        nn.init.normal_(parts["k"].weight)
    return Calling(
        lambda m, x: m.out(m.q(h := m.before(x)) * m.k(h).sigmoid() + m.v(h)), **parts, **around
    )


def transposed(of: nn.Linear) -> nn.Module:
    """A layer that keeps its weight the other way round."""
    made = Calling(lambda m, x: x @ m.weight + m.bias)
    made.weight = nn.Parameter(of.weight.detach().T.clone())
    made.bias = nn.Parameter(of.bias.detach().clone())
    return made


def scaled() -> nn.Module:
    """A model with a parameter of its own, beside its layers."""
    made = Calling(lambda m, x: F.linear(m.first(x), m.weight), first=linear(1))
    made.weight = nn.Parameter(linear(0).weight.detach())
    return made


def attending(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A function between two layers."""
    return Calling(lambda m, x: m.after(function(m.before(x))), before=linear(0), after=linear(1))


def plain() -> nn.Module:
    """Two layers without biases, and activations."""
    sides = linear(0, bias=False), linear(1, bias=False)
    return named(first=sides[0], relu=nn.ReLU(), second=sides[1], act=nn.ReLU())
