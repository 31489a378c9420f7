"""Objects whose every method raises, and models that have, take and return them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_METHODS = {
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "len", "repr", "str", "hash", "iter", "getattr"),
    *("contains", "getitem", "int", "float", "index", "format", "sizeof", "dir", "next", "enter"),
    *("exit", "call", "length_hint", "array", "setattr", "delattr", "copy", "deepcopy", "reduce"),
    *("reduce_ex", "add", "and", "or"),
}


class HostileError(Exception):
    """What the methods raise."""


def _raises(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise HostileError(name)

    return method


def hostile(*bases: type, claims: type | None = None, **more: Any) -> Callable[[], Any]:
    """Return what makes objects of a class; ``__class__`` claims to be another, or raises."""
    methods = {f"__{name}__": _raises(name) for name in _METHODS}
    own = property(_raises("class") if claims is None else lambda self: claims)
    kind = type("Own", bases or (object,), methods | {"__class__": own, "loss": own} | more)
    return lambda: kind.__new__(kind)


HOSTILE = {
    "object": hostile(),
    "object with slots": hostile(__slots__=("tensor",)),
    "object without attributes": hostile(__getattribute__=_raises("getattribute")),
    "dictionary": hostile(dict, keys=_raises("keys"), values=_raises("v"), items=_raises("i")),
    "list": hostile(list),
    "claims to be a tensor": hostile(claims=Tensor),
    "claims to be a module": hostile(claims=nn.Module),
    "claims to be a dictionary": hostile(claims=dict),
    "claims to be a list": hostile(claims=list),
}


@dataclass
class Output:
    """An output of the user's own kind."""

    y: Tensor
    own: Any


class Net(nn.Module):
    """Has such objects in its attributes, takes some, and returns some."""

    def __init__(self, make: Callable[[], Any], pack: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.lin, self.make, self.pack = nn.Linear(6, 6), make, pack
        vars(self).update(own=make(), graph=make())  # torch would ask them for their class
        self.held = [make(), (make(), {"key": make()})]
        self.stray = [torch.ones(6, requires_grad=True)]

    def forward(self, x: Tensor, *own: Any, **more: Any) -> Any:
        return self.pack(self.lin(x) * self.stray[0], self.make())


PACKS: list[Callable[[Tensor, Any], Any]] = [
    lambda y, own: y,
    lambda y, own: {"y": y, "own": own},
    lambda y, own: (own, [y, own]),
    Output,
]


def closed(self: nn.Module, name: str) -> Any:
    """Raise for each attribute that a layer has not."""
    if name in ("weight", "bias"):
        return nn.Module.__getattr__(self, name)
    raise HostileError(name)


LAYERS: dict[str, dict[str, Any]] = {
    # it cannot be shown, measured or compared
    "nameless": {
        f"__{name}__": _raises(name) for name in ("repr", "extra_repr", "len", "bool", "eq")
    }
    | {"__hash__": nn.Module.__hash__},
    "claims to be a dictionary": {"__class__": property(lambda self: dict)},
    "closed": {"__getattr__": closed},
}
