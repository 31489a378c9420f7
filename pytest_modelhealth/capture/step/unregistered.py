"""Finds the tensors that a run trains and that the model does not register as parameters."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import attributes, contents, is_a, pairs
from pytest_modelhealth.capture.step.state import graph_leaves
from pytest_modelhealth.report import UnregisteredParameter
from pytest_modelhealth.statistics import UnsupportedTensorError, reduce

_DEEPEST = 6
_TORCH_KEEPS = frozenset(vars(nn.Module()))
_RUNNING: tuple[type, ...] = (types.FrameType, types.GeneratorType, type(iter([])))


class Place(NamedTuple):
    """Where a tensor is: its path in a registered layer, and what holds it there."""

    path: str
    layer: str
    kind: str


class Registered:
    """The parameters of a model and the leaves of a batch, as they are before the forward.

    They are kept, so that none of them can make room for another of the same id.
    """

    def __init__(self, model: nn.Module, parameters: list[Tensor], batch: list[Tensor]) -> None:
        self._model = model
        self._known = [*parameters, *batch, *graph_leaves(tensor.grad_fn for tensor in batch)]
        self._ids = {id(None), *map(id, self._known)}

    def knows(self, module: nn.Module) -> bool:
        """Whether every parameter of `module` is one of them."""
        held = module._parameters
        return not held or self._ids.issuperset(map(id, held.values()))

    def leaves_out(
        self, leaves: Iterable[Tensor], line: Callable[[Tensor], str]
    ) -> tuple[UnregisteredParameter, ...]:
        """Return what of `leaves` has a gradient and is the model's, but no parameter of it.

        What the model does not hold belongs to somebody else, a loss or another model, unless
        nobody does: then the forward made it, and `line` tells where.
        """
        strays = [leaf for leaf in leaves if id(leaf) not in self._ids and leaf.grad is not None]
        held = places(self._model, {id(leaf) for leaf in strays}) if strays else {}
        unregistered = []
        for leaf in strays:
            place = held.get(id(leaf))
            if place is None and isinstance(leaf, nn.Parameter) and _is_held_by_running_code(leaf):
                place = Place("", "", "made")
            if place is not None:
                try:
                    gradient = None if leaf.grad is None else reduce(leaf.grad)
                except UnsupportedTensorError:
                    gradient = None
                where = "" if place.path else line(leaf)
                unregistered.append(UnregisteredParameter(*place, leaf.numel(), gradient, where))
        return tuple(sorted(unregistered, key=lambda one: (one.layer, one.path)))


def _is_held_by_running_code(leaf: Tensor) -> bool:
    """Whether nothing but the graph holds a leaf: our own lists hang on running functions."""
    for holder in gc.get_referrers(leaf):
        if isinstance(holder, list | tuple):
            if not all(
                isinstance(one, (*_RUNNING, list, tuple)) for one in gc.get_referrers(holder)
            ):
                return False
        elif not isinstance(holder, _RUNNING):
            return False
    return True


def places(model: nn.Module, wanted: set[int]) -> dict[int, Place]:
    """Return where in the model's attributes each of the tensors is, by id."""
    found: dict[int, Place] = {}
    met: set[int] = set()
    for layer, module in model.named_modules():
        met.add(id(module))
        for name, value in vars(module).items():
            if name not in _TORCH_KEEPS:
                for path, tensor, kind in _walk(value, name, "attribute", met, 0):
                    if id(tensor) in wanted:
                        found.setdefault(id(tensor), Place(path, layer, kind))
        for name, parameter in module._parameters.items():  # it was not there before the forward
            if id(parameter) in wanted:
                found.setdefault(id(parameter), Place(name, layer, "made"))
    return found


def _walk(
    value: Any, path: str, kind: str, met: set[int], depth: int
) -> Iterator[tuple[str, Tensor, str]]:
    """Yield each tensor that attributes and containers lead to, with its path."""
    if is_a(value, Tensor):
        is_bare = kind == "attribute" and not isinstance(value, nn.Parameter)
        yield path, value, "tensor" if is_bare else kind
        return
    if depth > _DEEPEST or id(value) in met:
        return
    inside = "module" if is_a(value, nn.Module) else kind
    for suffix, item in _items(value):
        met.add(id(value))
        yield from _walk(item, path + suffix, inside, met, depth + 1)


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    kind = type(value)
    if is_a(value, nn.Module):
        held = {**value._parameters, **value._modules, **value._buffers}
        held |= {name: item for name, item in vars(value).items() if not name.startswith("_")}
    elif issubclass(kind, Mapping):
        return [
            (f"[{repr(key) if type(key) in (str, int, bool, float) else type(key).__name__}]", item)
            for key, item in pairs(value)
        ]
    elif issubclass(kind, list | tuple | set):
        return [(f"[{index}]", item) for index, item in enumerate(contents(value, kind))]
    elif issubclass(kind, type) or callable(value):
        return []
    else:
        held = attributes(value)
    return [(f".{name}", item) for name, item in held.items()]
