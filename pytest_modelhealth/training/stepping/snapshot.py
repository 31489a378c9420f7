"""All that a training step may change, taken down once and put back as often as asked."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.step.isolation import (
    generator_restorer,
    random_state,
    restore_random_state,
)
from pytest_modelhealth.capture.step.state import Memory, State, is_generator
from pytest_modelhealth.training.stepping.reaching import Reached


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
        vars(holder)["held"] = [_opened(one) for one in found]
        self.state = State(holder)
        self.leaves = list({id(leaf): leaf for leaf in self.state.leaves}.values())
        self._memory = Memory([*self.leaves, *self.state.tensors])
        self._gradients = [leaf.grad for leaf in self.leaves]
        self._required = [leaf.requires_grad for leaf in self.leaves]
        self._hooks = [_hooks_of(leaf) for leaf in self.leaves]
        self._modes = [read() for read, _ in _MODES]
        self._generators = [generator_restorer(one) for one in self.state.generators]
        self._arrays = [(array, array.copy()) for array in self._reached.arrays]
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
        self._reached.put_back_variables()
        self.state.restore_containers()
        for array, values in self._arrays:
            _put_back_array(array, values)
        self._memory.restore()
        for leaf, required in zip(self.leaves, self._required, strict=True):
            if leaf.requires_grad != required:
                leaf.requires_grad = required
        for leaf, hooks in zip(self.leaves, self._hooks, strict=True):
            _put_back_hooks(leaf, hooks)
        for (read, write), mode in zip(_MODES, self._modes, strict=True):
            if read() != mode:
                write(mode)
        self.restore_random_numbers()


def _set_cudnn(modes: tuple[bool, bool]) -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = modes


_MODES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.autograd.set_detect_anomaly(*modes),
    ),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        _set_cudnn,
    ),
)
"""What of torch a step may switch: how each is read and set."""

_Hooks = list[tuple[str, dict[int, Any] | None]]
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _hooks_of(leaf: Tensor) -> _Hooks:
    """Return copies of what a tensor has of hooks."""
    found = ((name, getattr(leaf, name)) for name in _HOOKS)
    return [(name, None if hooks is None else dict(hooks)) for name, hooks in found]


def _put_back_hooks(leaf: Tensor, hooks: _Hooks) -> None:
    for name, before in hooks:
        now = getattr(leaf, name)
        if now == before:
            continue
        if now is not None:  # in place: autograd holds this dictionary
            now.clear()
            now.update(before or {})
        if before is None:
            setattr(leaf, name, None)


def _opened(value: Any) -> Any:
    """Return what a snapshot takes down of an object: its attributes, where it is no container."""
    if isinstance(value, _TAKEN_WHOLE) or is_generator(type(value)):
        return value
    return getattr(value, "__dict__", value)


_TAKEN_WHOLE = (nn.Module, Tensor, list, tuple, dict, set, deque)


def _put_back_array(array: Any, saved: Any) -> None:
    if array.flags.writeable:
        array[...] = saved
