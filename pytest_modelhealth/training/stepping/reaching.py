"""What a training step leads to: by its closure, its globals, its owner, and through objects."""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import attributes
from pytest_modelhealth.capture.step.state import is_generator

_DEEPEST = 3
_MOST = 10_000
"""Larger containers are data, which a step reads: to compare them after each call takes seconds."""
_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_OF_TRAINING = (
    "torch.amp", "torch.cuda.amp", "torch.optim",
    "accelerate.accelerator", "accelerate.optimizer", "accelerate.scheduler", "accelerate.state",
)  # fmt: skip
"""Where classes are defined whose objects go on with each step: they count, scale and schedule."""
_CONTAINERS = (list, tuple, dict, set, deque, Counter)
_LIBRARIES = frozenset({
    "torch", "numpy", "builtins", "transformers", "accelerate", "lightning",
    "lightning_fabric", "pytorch_lightning", "logging", "threading",
    "multiprocessing", "concurrent", "asyncio", "io", "_io", "unittest", "pytest", "_pytest",
    "pluggy", "pytest_modelhealth",
})  # fmt: skip
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_MODULE_KEEPS = frozenset(vars(nn.Module()))
_ATOMS = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
    | set(weakref.ProxyTypes)  # what it stands for is another's, and it looks like an iterator
)


class Reached:
    """What a step leads to, each once.

    Args:
        step: the user's function.
        given: the model, optimizers and what else was named.

    Attributes:
        objects: modules, tensors, containers, generators, and objects whose attributes are kept.
        arrays: NumPy arrays that can be written to.
        variables: variables that functions close over, and what they hold.
        globals: global variables that functions assign to, and what they hold.
        iterators: types of iterators, which cannot be put back.
    """

    def __init__(self, step: Any, given: Iterable[Any]) -> None:
        self.objects: list[Any] = []
        self.arrays: list[Any] = []
        self.variables: list[tuple[types.CellType, Any]] = []
        self.globals: list[tuple[dict[str, Any], str, Any]] = []
        self.iterators: list[str] = []
        self._seen: dict[int, Any] = {}
        for value in given:
            self._take(value, 0)
        self._follow(step, 0)

    def put_back_variables(self) -> None:
        """Have variables hold the objects that they held."""
        for cell, value in self.variables:
            if value is not NOTHING:
                cell.cell_contents = value
            elif _contents(cell) is not NOTHING:
                del cell.cell_contents
        for names, name, value in self.globals:
            if value is not NOTHING:
                names[name] = value
            else:
                names.pop(name, None)

    def _take(self, value: Any, depth: int, *, home: str | None = None) -> None:
        """Take an object, and what it leads to; of global ones `home` is the package."""
        kind = type(value)
        if kind in _ATOMS or id(value) in self._seen:
            return
        if issubclass(kind, _FUNCTIONS):
            if depth < _DEEPEST and not _is_library(value):
                self._follow(value, depth + 1)
        elif issubclass(kind, _CONTAINERS):
            if len(value) <= _MOST:
                self._keep(value)
                self._take_all(value.values() if isinstance(value, dict) else value, depth)
        elif issubclass(kind, Iterator):
            self.iterators.append(kind.__name__)
        elif _is_array(kind):
            self._keep(value, self.arrays)
        else:
            self._take_object(value, kind, depth, home)

    def _take_object(self, value: Any, kind: type, depth: int, home: str | None) -> None:
        if issubclass(kind, nn.Module):
            self._keep(value)
            self._take_all(_own_values(value), depth + 1)
        elif issubclass(kind, Tensor) or is_generator(kind):
            self._keep(value)
        elif issubclass(kind, _TRAINING) or _is_of_training(kind):
            self._keep(value)
            self._take_all(vars(value).values(), depth)
        elif self._is_opened(value, depth, home):
            self._keep(value)
            self._take_all(attributes(value).values(), depth + 1)

    def _take_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            if type(value) not in _ATOMS:
                self._take(value, depth)

    def _keep(self, value: Any, kept: list[Any] | None = None) -> None:
        self._seen[id(value)] = value
        (self.objects if kept is None else kept).append(value)

    def _is_opened(self, value: Any, depth: int, home: str | None) -> bool:
        if isinstance(value, type | types.ModuleType) or not hasattr(value, "__dict__"):
            return False
        kind = type(value)
        is_near = home is None or _package(kind) == home
        return depth < _DEEPEST and is_near and not _is_library(kind)

    def _follow(self, step: Any, depth: int) -> None:
        """Take what a function leads to."""
        for function, values in _opened(step):
            self._take_all(values, depth)
            if function is None or id(function) in self._seen:
                continue
            self._seen[id(function)] = function
            self._take(vars(function), depth)
            for cell in function.__closure__ or ():
                contents = _contents(cell)
                self.variables.append((cell, contents))
                self._take(contents, depth)
            self._take_globals(function, depth)

    def _take_globals(self, function: types.FunctionType, depth: int) -> None:
        names, home = function.__globals__, _package(function)
        for code in _codes(function.__code__):
            for name in code.co_names:
                if name in names:
                    self._take(names[name], depth, home=home)
            for name in _assigned(code):
                self.globals.append((names, name, names.get(name, NOTHING)))


NOTHING: Any = object()
"""Of a variable without a value."""


def named_lists(step: Any) -> dict[str, list[Any]]:
    """Return the lists that a step's closure holds, by the names of their variables."""
    found: dict[str, list[Any]] = {}
    for function, _ in _opened(step):
        if function is not None:
            names = function.__code__.co_freevars
            cells = zip(names, function.__closure__ or (), strict=True)
            held = ((name, _contents(cell)) for name, cell in cells)
            used = ((n, function.__globals__.get(n)) for n in function.__code__.co_names)
            found |= {name: value for name, value in chain(used, held) if isinstance(value, list)}
    return found


def _opened(step: Any) -> Iterator[tuple[types.FunctionType | None, list[Any]]]:
    """Yield the function that a callable runs, with the values that go in with it."""
    if isinstance(step, functools.partial):
        yield None, [step.func, *step.args, *step.keywords.values()]
        return
    values: list[Any] = []
    if isinstance(step, types.MethodType):
        values, step = [step.__self__], step.__func__
    elif not isinstance(step, types.FunctionType):
        values, step = [step], vars(type(step)).get("__call__")
    if not isinstance(step, types.FunctionType):
        yield None, values
        return
    yield step, [*values, *(step.__defaults__ or ()), *(step.__kwdefaults__ or {}).values()]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return NOTHING


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of those that are defined in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _codes(value)


def _assigned(code: types.CodeType) -> list[str]:
    """Return the global variables that code assigns to."""
    kinds = ("STORE_GLOBAL", "DELETE_GLOBAL")
    return list({one.argval for one in dis.get_instructions(code) if one.opname in kinds})


def _own_values(module: nn.Module) -> list[Any]:
    """Return what the attributes of a module and its parts hold, beside what torch registers."""
    return [
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in _MODULE_KEEPS and type(value) not in _ATOMS
    ]


def _is_array(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray) and kind is not numpy.memmap


def _is_of_training(kind: type) -> bool:
    return kind.__module__.startswith(_OF_TRAINING)


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def _is_library(value: Any) -> bool:
    return _package(value) in _LIBRARIES
