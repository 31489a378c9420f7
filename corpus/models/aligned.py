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


CASES: dict[str, tuple[nn.Module, nn.Module, dict[str, str]]] = {
    "a sequential rewritten as a class keeps its layers under new names": (
        mlp(), attributes(),
        {"0": "renamed first", "1": "renamed relu", "2": "renamed second", "3": "renamed relu_1",
         "4": "renamed third"},
    ),
    "and back": (
        attributes(), mlp(),
        {"first": "renamed 0", "relu": "renamed 1", "second": "renamed 2", "relu_1": "renamed 3",
         "third": "renamed 4"},
    ),
    "a name is not believed where the size is another": (
        nn.Sequential(linear(0), linear(1)),
        nn.Sequential(linear(2, 8, 16), linear(3, 16, 8), linear(4), linear(5)),
        {"0": "renamed 2", "1": "renamed 3"},
    ),
    "around a wrapped block only the wrapper is new": (
        named(body=mlp(), head=linear(3, 8, 2)),
        named(body=nn.Sequential(mlp()), head=linear(3, 8, 2)),
        {f"body.{i}": f"renamed body.0.{i}" for i in range(5)} | {"head": "matched head"},
    ),
    "an exchanged activation is the layer of another type": (
        mlp(), nn.Sequential(linear(0), nn.GELU(), linear(1), nn.Identity(), linear(2)),
        {"1": "retyped 1", "3": "retyped 3", "4": "matched 4"},
    ),
    "the number of a function is no name of a module": (
        plain(),
        Calling(lambda m, x: F.relu(m.second(m.first(x))), first=linear(2), second=linear(3)),
        {"relu": "removed", "act": "renamed relu"},
    ),
    "one layer that changed its place is moved, and those that it passed are not": (
        ordered("a", "norm", "b", "c"), ordered("a", "b", "c", "norm"),
        {"a": "matched a", "norm": "moved norm", "b": "matched b", "c": "matched c"},
    ),
    "layers with each other's weights keep their names": (
        ordered("a", "b", "c", "norm"), ordered("a", "b", "c", "norm", swapped=True),
        {"a": "matched a", "b": "matched b", "c": "matched c"},
    ),
    "a split projection is told from what is around it": (
        projections(fused=True), projections(fused=False),
        {"qkv": "removed", "q": "inserted q", "before": "matched before", "out": "matched out"},
    ),
    "transposed weights are the same weights": (
        named(c_fc=transposed(linear(0, 8, 6)), out=linear(1, 6, 8)),
        named(up=linear(0, 8, 6), out=linear(1, 6, 8)),
        {"c_fc": "retyped up", "out": "matched out"},
    ),
    "layers of other types and shapes are not paired": (
        named(a=nn.Linear(8, 3), b=nn.Tanh()),
        named(c=nn.Conv1d(4, 5, 3), d=nn.MaxPool1d(2)),
        {"a": "removed", "b": "removed", "c": "inserted c", "d": "inserted d"},
    ),
    "nor what only shares a shape": (
        attending(lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0]),
        attending(lambda x: (x @ x.mT / 8**0.5).softmax(-1) @ x),
        {"scaled_dot_product_attention": "removed", "softmax": "inserted softmax"},
    ),
    "a layer may have what the model held by itself": (
        scaled(), named(first=linear(1), second=linear(0, bias=False)),
        {"first": "matched first", "second": "inserted second"},
    ),
}  # fmt: skip
