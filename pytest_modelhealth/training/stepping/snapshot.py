"""All that a training step may change: what it leads to, put back as often as asked."""

from __future__ import annotations

import copy
import functools
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import attributes
from pytest_modelhealth.capture.passive.hooks import named_values
from pytest_modelhealth.capture.step.isolation import (
    generator_restorer,
    random_state,
    restore_random_state,
    set_switches,
    switches,
)
from pytest_modelhealth.capture.step.state import Memory, State, is_generator

_DEEPEST = 3
_MOST = 10_000
"""Larger containers are data, which a step reads: to compare them after each call takes seconds."""
_OF_TRAINING = (
    "torch.amp", "torch.cuda.amp", "torch.optim",
    "accelerate.accelerator", "accelerate.optimizer", "accelerate.scheduler", "accelerate.state",
)  # fmt: skip
"""Where classes are defined whose objects go on with each step: they count, scale and schedule."""
_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
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
_NOTHING: Any = object()
"""Of a variable without a value."""


class Snapshot:
    """A model, its optimizers, and what else a step leads to.

    Everything is put back in place: a step may close over any of it.

    Args:
        model: the model.
        optimizers: those that were given.
        restore: what was named, each with `state_dict` and `load_state_dict`.
        step: the user's function; what it leads to is put back too, as far as it is variables,
            modules, optimizers, schedules, scalers, tensors, NumPy arrays, random generators,
            plain containers, and the attributes of objects. Iterators and files are not.
    """

    def __init__(
        self, model: nn.Module, optimizers: Iterable[Any], restore: Iterable[Any], step: Any
    ) -> None:
        restore = tuple(restore)
        self._reached = Reached(step, (model, *optimizers, *restore))
        self.found = found = self._reached.objects
        self.iterators = self._reached.iterators
        holder = nn.Module()
        vars(holder)["held"] = [
            one
            if isinstance(one, _TAKEN_WHOLE) or is_generator(type(one))
            else getattr(one, "__dict__", one)
            for one in found
        ]
        self.state = State(holder)
        self.leaves = list({id(leaf): leaf for leaf in self.state.leaves}.values())
        self._memory = Memory([*self.leaves, *self.state.tensors])
        self._gradients = [leaf.grad for leaf in self.leaves]
        self._flags = [
            (leaf, leaf.requires_grad, [copy.copy(getattr(leaf, name)) for name in _HOOKS])
            for leaf in self.leaves
        ]
        self._switches = switches()
        self._generators = [generator_restorer(one) for one in self.state.generators]
        self._arrays = [(array, array.copy()) for array in self._reached.arrays]
        self._random_state = random_state()
        self._saved = [(one, copy.deepcopy(one.state_dict())) for one in restore]

    def rewind(self) -> None:
        """Put everything back, but with no gradient anywhere."""
        self._put_back()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """Leave no gradient on anything that an optimizer or the model holds."""
        for leaf in self.leaves:
            leaf.grad = None

    def restore(self) -> None:
        """Put everything back, gradients too: the same objects, with the values they had."""
        self._put_back()
        for leaf, gradient in zip(self.leaves, self._gradients, strict=True):
            leaf.grad = gradient

    def restore_random_numbers(self) -> None:
        """Put all random generators back."""
        for put_back in self._generators:
            put_back()
        restore_random_state(self._random_state)

    def _put_back(self) -> None:
        for one, saved in self._saved:
            one.load_state_dict(copy.deepcopy(saved))
        self._reached.put_back_variables()
        self.state.restore_containers()
        for array, values in self._arrays:
            if array.flags.writeable:
                array[...] = values
        self._memory.restore()
        self._put_back_flags()
        set_switches(self._switches)
        self.restore_random_numbers()

    def _put_back_flags(self) -> None:
        for leaf, required, hooks in self._flags:
            if leaf.requires_grad != required:
                leaf.requires_grad = required
            for name, before in zip(_HOOKS, hooks, strict=True):
                now = getattr(leaf, name)
                if now is not None and now != before:  # in place: autograd holds this dictionary
                    now.clear()
                    now.update(before or {})
                if before is None and now is not None:
                    setattr(leaf, name, None)


_TAKEN_WHOLE = (nn.Module, Tensor, list, tuple, dict, set, deque)
"""What is no object of which the attributes are taken down."""
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Reached:
    """What a step leads to, each once.

    Functions lead to what they close over and the global variables that their own code names, as
    `inspect.getclosurevars` tells; what a function inside them alone names is not followed.

    Args:
        step: the user's function.
        given: the model, optimizers and what else was named.

    Attributes:
        objects: modules, tensors, containers, generators, and objects whose attributes are kept.
        arrays: NumPy arrays that can be written to.
        iterators: types of iterators, which cannot be put back.
    """

    def __init__(self, step: Any, given: Iterable[Any]) -> None:
        self.objects: list[Any] = []
        self.arrays: list[Any] = []
        self.iterators: list[str] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._seen: dict[int, Any] = {}
        for value in given:
            self._take(value, 0)
        self._follow(step, 0)

    def put_back_variables(self) -> None:
        """Have variables hold the objects that they held."""
        for cell, value in self._cells:
            if value is not _NOTHING:
                cell.cell_contents = value
            elif _contents(cell) is not _NOTHING:
                del cell.cell_contents
        for names, name, value in self._globals:
            if value is not _NOTHING:
                names[name] = value
            else:
                names.pop(name, None)

    def _take(self, value: Any, depth: int, home: str | None = None) -> None:
        """Take an object, and what it leads to; of global ones `home` is the package."""
        kind = type(value)
        if kind in _ATOMS or id(value) in self._seen:
            return
        if issubclass(kind, _FUNCTIONS):
            if depth < _DEEPEST and _package(value) not in _LIBRARIES:
                self._follow(value, depth + 1)
        elif issubclass(kind, _CONTAINERS):
            if len(value) <= _MOST:
                self._keep(value, value.values() if isinstance(value, dict) else value, depth)
        elif issubclass(kind, Iterator):
            self.iterators.append(kind.__name__)
        elif _is_array(kind):
            self._seen[id(value)] = value
            self.arrays.append(value)
        elif (inside := _inside(value, depth, home)) is not None:
            self._keep(value, *inside)

    def _keep(self, value: Any, inside: Iterable[Any], depth: int) -> None:
        self._seen[id(value)] = value
        self.objects.append(value)
        for one in inside:
            self._take(one, depth)

    def _follow(self, step: Any, depth: int) -> None:
        """Take what a function leads to."""
        function, values = _opened(step)
        for value in values:
            self._take(value, depth)
        if function is None or id(function) in self._seen:
            return
        self._seen[id(function)] = function
        self._take(vars(function), depth)
        for cell in function.__closure__ or ():
            self._cells.append((cell, _contents(cell)))
            self._take(_contents(cell), depth)
        names = function.__globals__
        for name in function.__code__.co_names:
            value = names.get(name, _NOTHING)
            self._globals.append((names, name, value))
            self._take(value, depth, _package(function))


def named_in(step: Any) -> dict[str, Any]:
    """Return what a step names, by the names of its variables."""
    return named_values(_opened(step)[0])


def _opened(step: Any) -> tuple[types.FunctionType | None, list[Any]]:
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


def _inside(value: Any, depth: int, home: str | None) -> tuple[Iterable[Any], int] | None:
    """Return what an object holds, and how deep that is; ``None`` where it is not kept.

    Those that are the user's own are kept only where they are near.
    """
    kind, package = type(value), _package(type(value))
    if issubclass(kind, nn.Module):
        attributes_of_parts = (pair for part in value.modules() for pair in vars(part).items())
        return [held for name, held in attributes_of_parts if name not in _MODULE_KEEPS], depth + 1
    if issubclass(kind, Tensor) or is_generator(kind):
        return (), depth
    if issubclass(kind, _TRAINING) or kind.__module__.startswith(_OF_TRAINING):
        return vars(value).values(), depth
    is_own = hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType)
    is_near = depth < _DEEPEST and home in (None, package) and package not in _LIBRARIES
    return (attributes(value).values(), depth + 1) if is_own and is_near else None


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return _NOTHING


def _is_array(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray) and kind is not numpy.memmap


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]
