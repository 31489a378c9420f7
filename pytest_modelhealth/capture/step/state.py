"""All that a model holds, to tell whether it is as it was and to put it back."""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import count
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_modelhealth.capture.observing.tensors import NEVER_LAZY

MOMENTS = count(1)
"""Numbers what happens to models in any thread, in order."""


class State:
    """All that a model holds: what its modules' attributes lead to, through plain containers.

    Modules outside torch's registry, in a list say, are part of it. Objects of the user's own
    classes are not opened.

    Attributes:
        modules: every module, the model first.
        leaves: every parameter and every other tensor that collects a gradient.
        tensors: every tensor that is no parameter: buffers and plain attributes.
        generators: random generators kept in attributes.
        lazy: parameters and buffers that the first forward creates.
        moment: when this was looked at, counted by `MOMENTS`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.moment = next(MOMENTS)
        self.modules: list[nn.Module] = []
        self.leaves: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.generators: list[Any] = []
        self.lazy: list[Tensor] = []
        self._empty: list[Any] = []  # containers that hold nothing: a dozen a module, for hooks
        self._others: list[tuple[Any, list[Any]]] = []  # each with what it holds
        self._seen: dict[int, Any] = {}
        self._visit(model)

    def restore_containers(self) -> None:
        """Put the same objects in again, in the order they had."""
        for container in self._empty:
            container.clear()
        for container, held in self._others:
            if not _holds(container, held):
                _fill(container, held)

    def exchange(self, others: Mapping[int, Any]) -> None:
        """Put other objects in the place of some, given by the id of these; a set is left alone."""
        for container, _ in self._others:
            if isinstance(container, dict):
                container.update(
                    {k: others[id(v)] for k, v in container.items() if id(v) in others}
                )
            elif isinstance(container, list | deque):
                for index, value in enumerate(container):
                    container[index] = others.get(id(value), value)

    def is_as_it_was(self) -> bool:
        """Whether all containers hold what they held."""
        return not any(self._empty) and all(_holds(*other) for other in self._others)

    def _visit_all(self, values: Iterable[Any]) -> None:
        empty = self._empty
        for value in values:
            kind = type(value)
            if kind in _CONTAINERS:  # most are, and hold nothing
                if value:
                    self._open(value)
                else:
                    empty.append(value)
            elif kind not in _ATOMS:
                self._visit(value)

    def _open(self, container: Any) -> None:
        if id(container) in self._seen:
            return
        self._seen[id(container)] = container
        self._others.append((container, _items(container)))
        self._visit_all(container.values() if isinstance(container, dict) else container)

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        kind = type(value)  # an object's own word for it may be a lie
        if issubclass(kind, nn.Module):
            self._add_module(value)
        elif issubclass(kind, Tensor):
            self._add_tensor(value)
        elif kind is tuple:
            self._visit_all(value)
        elif is_generator(kind):
            self.generators.append(value)

    def _add_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        self._open(vars(module))
        if isinstance(module, torch.jit.ScriptModule):  # keeps its own in C++
            for owned in (module._parameters, module._buffers, module._modules):
                self._visit_all(owned.values())

    def _add_tensor(self, tensor: Tensor) -> None:
        is_parameter = isinstance(tensor, nn.Parameter)
        try:
            is_leaf = tensor.is_leaf
        except RuntimeError:  # a view of several that was written to, which FSDP1 keeps
            return
        if is_leaf and (is_parameter or tensor.requires_grad):
            self.leaves.append(tensor)
        if type(tensor) not in NEVER_LAZY and is_lazy(tensor):
            self.lazy.append(tensor)
        elif is_leaf and not is_parameter:
            self.tensors.append(tensor)


_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, set, deque})
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), FunctionType, torch.dtype})
_GENERATORS = (torch.Generator, random.Random)


def graph_leaves(roots: Iterable[Any]) -> list[Tensor]:
    """Return the leaf tensors that a backward pass from these nodes of a graph gets to."""
    leaves, stack = [], list(roots)
    seen = set(stack)
    while stack:
        node = stack.pop()
        if isinstance(node, _AccumulateGrad):
            leaves.append(node.variable)
            continue
        for following, _ in node.next_functions if node is not None else ():
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return leaves


_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def is_generator(kind: type) -> bool:
    """Whether objects of a class are random generators, of torch, NumPy or Python."""
    return issubclass(kind, _GENERATORS) or _is_numpy_generator(kind)


def _is_numpy_generator(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(
        kind, (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    )


def _items(container: Any) -> list[Any]:
    """Return what a container holds; of a dictionary its keys, then its values."""
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _holds(container: Any, items: list[Any]) -> bool:
    """Whether a container holds these very objects."""
    found = _items(container)
    return len(found) == len(items) and all(map(is_, found, items))


def _fill(container: Any, items: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        size = len(items) // 2
        for key, value in zip(items[:size], items[size:], strict=True):
            container[key] = value  # the update of a Counter counts
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)
