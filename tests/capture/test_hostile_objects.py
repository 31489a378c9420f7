"""Objects of the user's whose every method raises, wherever a model may have them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import Inputs, InspectionError, Inspector
from pytest_modelhealth.comparing import compare
from tests.capture.oracle import report_of

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


@pytest.mark.parametrize("name", HOSTILE)
def test_no_method_of_the_users_objects_is_called(name: str) -> None:
    """As attribute, argument, output, target and beside parameters: all of it is only looked at."""
    make, x = HOSTILE[name], torch.ones(4, 6)
    batches = [(x, make(), {"key": make()}), {"x": x, "own": make(), "more": [make()]}]
    for pack, batch in zip(PACKS, [*batches, x, Inputs(x, make(), own=make())], strict=True):
        model = Net(make, pack)
        total = model.lin.weight.sum
        for loss in (None, lambda output, target, total=total: total()):
            target = None if loss is None else {"own": make()}
            report = Inspector(model).run_inspection(batch, target=target, loss=loss)
            assert report.observation.errors == (), (name, pack)
            assert report["lin"].activations.count == 24
            assert "Net" in str(report)
            report.to_dict()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_comparison_calls_none_either(name: str) -> None:
    """Two equal models with such objects are equivalent."""
    make = HOSTILE[name]
    for pack in PACKS:
        models = [Net(make, pack) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        assert compare(*models, (torch.ones(4, 6), make())).equivalent


@pytest.mark.parametrize("name", HOSTILE)
def test_an_output_of_the_users_own_kind_is_no_tensor(name: str) -> None:
    """It is not taken for one, nor opened by its own methods."""
    report = Inspector(Net(HOSTILE[name], lambda y, own: own)).run_inspection(torch.ones(4, 6))
    assert report[""].reason == "it returned a value of type Own, no tensor"


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


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_methods_that_raise_are_observed(name: str) -> None:
    """Inside a model and as the model; twice in it, too."""
    kind = type("Own", (nn.Linear,), LAYERS[name])
    for model in (kind(6, 6), nn.Sequential(layer := kind(6, 6), nn.Sequential(layer))):
        report = report_of(model, torch.ones(4, 6))
        assert {record.status for record in report.layers.values()} == {"observed"}


def test_a_module_without_a_hash_is_refused() -> None:
    """The message says what torch needs it for, and what to do: a data class makes such modules."""
    model = nn.Sequential(type("Unhashable", (nn.Linear,), {"__hash__": None})(6, 6))
    before = copy.copy(vars(model))
    with pytest.raises(InspectionError, match=r"has no hash .*unhashable.* eq=False"):
        Inspector(model).run_inspection(torch.ones(4, 6))
    assert vars(model) == before
