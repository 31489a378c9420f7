"""All that a training step may change, taken down once and put back as often as asked."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import attributes
from pytest_modelhealth.capture.step.memory import Memory
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.capture.step.untouched import (
    generator_restorer,
    random_state,
    restore_random_state,
)


class Snapshot:
    """A model, its optimizers, and what else a step leads to.

    Everything is put back in place: a step may close over any of it.

    Args:
        model: the model.
        optimizers: those that were given.
        restore: what was named, each with `state_dict` and `load_state_dict`.
        step: the user's function; what its closure holds is put back too, as far as it is modules,
            optimizers, schedules, scalers, tensors, random generators and plain containers.
    """

    def __init__(
        self, model: nn.Module, optimizers: Iterable[Any], restore: Iterable[Any], step: Any
    ) -> None:
        restore = tuple(restore)
        found = [model, *optimizers, *restore, *reached(step)]
        self.found = found
        holder = nn.Module()
        vars(holder)["held"] = [_opened(one) for one in found]
        self.state = State(holder)
        self.leaves = list({id(leaf): leaf for leaf in self.state.leaves}.values())
        self._memory = Memory([*self.leaves, *self.state.tensors])
        self._gradients = [leaf.grad for leaf in self.leaves]
        self._required = [leaf.requires_grad for leaf in self.leaves]
        self._generators = [generator_restorer(one) for one in self.state.generators]
        self._random_state = random_state()
        self._saved = [(one, copy.deepcopy(one.state_dict())) for one in restore]

    def rewind(self) -> None:
        """Put everything back, but with no gradient anywhere."""
        self._put_back()
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
        self.state.restore_containers()
        self._memory.restore()
        for leaf, required in zip(self.leaves, self._required, strict=True):
            if leaf.requires_grad != required:
                leaf.requires_grad = required
        self.restore_random_numbers()


def _opened(value: Any) -> Any:
    """Return what a snapshot takes down of an object: its attributes, where it is no container."""
    if isinstance(value, nn.Module | Tensor | list | tuple | dict | set | torch.Generator):
        return value
    return getattr(value, "__dict__", value)


def reached(step: Any) -> list[Any]:
    """Return the objects that a function leads to: by its closure, its globals and its owner."""
    found: dict[int, Any] = {}
    for value in _reached(step, 0):
        found.setdefault(id(value), value)
    return list(found.values())


_DEEPEST = 3
_OWN = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


def _reached(step: Any, depth: int) -> Iterator[Any]:
    for name, value, is_global in _named(step):
        del name
        yield from _taken(value, depth, is_global=is_global)


def _taken(value: Any, depth: int, *, is_global: bool) -> Iterator[Any]:
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        if depth < _DEEPEST and not _is_library(value):
            yield from _reached(value, depth + 1)
    elif isinstance(value, (*_OWN, torch.Generator)) or _is_of_training(value):
        yield value
    elif not is_global and not isinstance(value, type | types.ModuleType):
        if isinstance(value, list | tuple | dict | set | Tensor):
            yield value
        elif depth < _DEEPEST and hasattr(value, "__dict__") and not _is_library(type(value)):
            yield value
            for held in attributes(value).values():
                yield from _taken(held, depth + 1, is_global=False)


def _is_of_training(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.startswith(("torch.amp", "torch.cuda.amp", "torch.optim"))


def _is_library(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in _LIBRARIES


_LIBRARIES = {
    "accelerate",
    "builtins",
    "lightning",
    "lightning_fabric",
    "numpy",
    "pytorch_lightning",
    "torch",
    "transformers",
}


def named_lists(step: Any) -> dict[str, list[Any]]:
    """Return the lists that a step's closure holds, by the names of their variables."""
    return {name: value for name, value, _ in _named(step) if isinstance(value, list)}


def _named(step: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield what a function leads to: its name, itself, and whether it is global."""
    if isinstance(step, functools.partial):
        for value in (step.func, *step.args, *step.keywords.values()):
            yield "", value, False
        return
    if isinstance(step, types.MethodType):
        yield "self", step.__self__, False
        step = step.__func__
    elif not isinstance(step, types.FunctionType):
        yield "self", step, False
        step = vars(type(step)).get("__call__")
    if not isinstance(step, types.FunctionType):
        return
    yield from _cells(step)
    for value in step.__defaults__ or ():
        yield "", value, False
    for name in step.__code__.co_names:
        if name in step.__globals__:
            yield name, step.__globals__[name], True


def _cells(step: types.FunctionType) -> Iterator[tuple[str, Any, bool]]:
    for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents, False
        except ValueError:  # a variable that has no value yet
            continue


Step = Callable[[Any, Any, Any], Any]
