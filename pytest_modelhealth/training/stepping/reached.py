"""All that a training step may change: what it leads to beside model and optimizers."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.autograd_graph import walk
from pytest_modelhealth.capture.step.state import State, is_generator
from pytest_modelhealth.settings.setting import dotted

_DEEPEST, _DATA = 3, 4
"""How deep functions and objects are followed, and how deep those in data lie."""
_MOST = 10_000
"""Larger containers are data, which a step reads: to compare them after each call takes seconds."""
_OF_TRAINING = (
    "torch.amp", "torch.cuda.amp", "torch.optim",
    "accelerate.accelerator", "accelerate.optimizer", "accelerate.scheduler", "accelerate.state",
)  # fmt: skip
"""Where classes are defined whose objects go on with each step: they count, scale and schedule."""
_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_CONTAINERS = (list, tuple, dict, set, deque)
_LIBRARIES = frozenset({
    "torch", "numpy", "builtins", "transformers", "accelerate", "lightning",
    "lightning_fabric", "pytorch_lightning", "logging", "threading",
    "multiprocessing", "concurrent", "asyncio", "io", "_io", "unittest", "pytest", "_pytest",
    "pluggy", "pytest_modelhealth",
})  # fmt: skip
_KNOWN = (type, types.ModuleType, nn.Module, Tensor, Iterator, *_TRAINING, *_CONTAINERS)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_NOTHING: Any = object()
"""Of a variable without a value."""


class Reached(State):
    """What a step leads to, each once.

    It is variables, modules, optimizers, schedules, scalers, tensors, NumPy arrays, random
    generators, plain containers, and the attributes of objects of the user's own that are near.
    Functions lead to what they close over and the global variables that their own code names, as
    `inspect.getclosurevars` tells; what a function inside them alone names is not followed.
    Iterators and files cannot be put back.

    Args:
        step: the user's function.
        given: the model, optimizers and what else was named.

    Attributes:
        objects: optimizers, schedules and scalers.
        iterators: types of iterators.
        globals: dictionary, name and value of global variables.
    """

    # what a proxy stands for is another's, and it looks like an iterator
    _closed = (State._closed - {types.FunctionType}) | {torch.device, *weakref.ProxyTypes}

    def __init__(self, step: Any, given: Iterable[Any]) -> None:
        self.objects: list[Any] = []
        self.iterators: list[str] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any, str]] = []
        self.globals: list[tuple[dict[str, Any], str, Any]] = []
        self._depth = 0
        super().__init__(*given)
        self._follow(step)

    def live_nodes(self) -> list[int]:
        """Return how many nodes of autograd's graph each container and variable keeps alive now."""
        containers = [*self._empty, *(container for container, _ in self._others)]
        known = {id(one) for one in containers}  # each is counted by itself
        graphs = ([*_graphs(values, known)] for values, _ in self._holders())
        return [len(walk(nodes)) if nodes else 0 for nodes in graphs]

    def names_of(self, numbers: list[int]) -> Iterator[str]:
        """Yield what containers and variables are called, by their places in `live_nodes`."""
        names: dict[int, str] = {}
        for container, _ in self._others:
            if isinstance(container, dict):
                names.update((id(v), key) for key, v in container.items() if type(key) is str)
        for layer, module in self.modules[0].named_modules():
            for name, value in {**vars(module), **module._buffers}.items():
                names[id(value)] = dotted(layer, name)
        holders = [*self._holders()]
        names.update((id(value), name) for values, name in holders if name for value in values)
        for held, _ in map(holders.__getitem__, numbers):
            values = held.values() if isinstance(held, dict) else held
            largest = max(values, key=lambda value: len(walk(_graphs([value], set()))))
            yield names.get(id(largest)) or names.get(id(held)) or f"a {type(held).__name__}"

    def leaf_names(self) -> Iterator[tuple[int, str]]:
        """Yield the numbers and names of parameters that variables of the step lead to."""
        for values, variable in self._holders():
            for value in values if variable else ():
                if isinstance(value, nn.Parameter):
                    yield id(value), variable
                elif isinstance(value, nn.Module):
                    yield from ((id(p), dotted(variable, n)) for n, p in value.named_parameters())

    def _holders(self) -> Iterator[tuple[Any, str]]:
        """Yield each container, and what each variable holds, with its name."""
        yield from ((one, "") for one in (*self._empty, *(one for one, _ in self._others)))
        yield from (((_contents(cell),), name) for cell, _, name in self._cells)
        yield from (((names.get(name),), name) for names, name, _ in self.globals)

    def restore(self) -> None:
        """Have variables and containers hold the objects that they held, and arrays the numbers."""
        for cell, value, _ in self._cells:
            if value is not _NOTHING:
                cell.cell_contents = value
            elif _contents(cell) is not _NOTHING:
                del cell.cell_contents
        for names, name, value in self.globals:
            if value is not _NOTHING:
                names[name] = value
            else:
                names.pop(name, None)
        super().restore()
        for array, values in self._arrays:
            if array.flags.writeable:
                array[...] = values

    def _open(self, container: Any) -> None:
        depth = self._depth
        self._depth = _DATA if len(container) > _MOST else depth
        super()._open(container)
        self._depth = depth

    def _visit(self, value: Any) -> None:
        kind, numpy = type(value), sys.modules.get("numpy")
        is_plain = issubclass(kind, nn.Module | Tensor) or is_generator(kind)
        if is_plain or id(value) in self._seen or self._depth == _DATA:
            super()._visit(value)
        elif issubclass(kind, _FUNCTIONS):
            if _package(value) not in _LIBRARIES:
                self._deeper(self._follow, value)
        elif issubclass(kind, _CONTAINERS):
            self._seen[id(value)] = value
            self._visit_small(value.values() if issubclass(kind, dict) else value)
        elif issubclass(kind, Iterator):
            self.iterators.append(kind.__name__)
        elif numpy is not None and issubclass(kind, numpy.ndarray) and kind is not numpy.memmap:
            self._seen[id(value)] = value
            self._arrays.append((value, value.copy()))
        elif issubclass(kind, _TRAINING) or kind.__module__.startswith(_OF_TRAINING):
            self.objects.append(value)
            self._open(vars(value))
        elif _is_own(value):
            self._deeper(self._open, vars(value))

    def _deeper(self, take: Callable[[Any], None], value: Any) -> None:
        if self._depth < _DEEPEST:
            self._depth += 1
            take(value)
            self._depth -= 1

    def _visit_small(self, values: Iterable[Any]) -> None:
        self._visit_all(
            v for v in values if not (issubclass(type(v), _CONTAINERS) and len(v) > _MOST)
        )

    def _follow(self, step: Any) -> None:
        """Take what a function leads to."""
        function, values = opened(step)
        self._visit_small(values)
        if function is None or id(function) in self._seen:
            return
        self._seen[id(function)] = function
        cells, free = function.__closure__ or (), function.__code__.co_freevars
        self._cells += [(c, _contents(c), name) for c, name in zip(cells, free, strict=True)]
        names, home = function.__globals__, _package(function)
        variables = [(names, n, names.get(n, _NOTHING)) for n in function.__code__.co_names]
        self.globals += variables
        own = [v for *_, v in variables if not _is_own(v) or _package(type(v)) == home]
        self._visit_small([vars(function), *map(_contents, cells), *own])


def opened(step: Any) -> tuple[types.FunctionType | None, list[Any]]:
    """Return the function that a callable runs, with the values that go in with it."""
    values: list[Any] = []
    if isinstance(step, functools.partial):
        return None, [step.func, *step.args, *step.keywords.values()]
    if isinstance(step, types.MethodType):
        values, step = [step.__self__], step.__func__
    elif not isinstance(step, types.FunctionType):
        values, step = [step], vars(type(step)).get("__call__")
    if not isinstance(step, types.FunctionType):
        return None, values
    return step, [*values, *(step.__defaults__ or ()), *(step.__kwdefaults__ or {}).values()]


def _is_own(value: Any) -> bool:
    """Whether an object is of a class of the user's own, or of a library that is not known."""
    kind = type(value)
    is_known = issubclass(kind, _KNOWN) or is_generator(kind) or _package(kind) in _LIBRARIES
    return hasattr(value, "__dict__") and not is_known


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return _NOTHING


def _graphs(held: Any, known: Set[int], depth: int = 0) -> Iterator[Any]:
    """Yield the graphs of tensors in a container, and in new ones there that are not `known`."""
    for value in held.values() if isinstance(held, dict) else held:
        kind = type(value)
        if kind in State._closed or id(value) in known:
            continue
        if issubclass(kind, Tensor):
            if value.grad_fn is not None:
                yield value.grad_fn
        elif issubclass(kind, _CONTAINERS) and depth < _DATA:
            yield from _graphs(value, known, depth + 1) if len(value) <= _MOST else ()


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]
