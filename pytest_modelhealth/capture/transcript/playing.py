"""Plays a run of a program back: modules call each other, functions return what was computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function

from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.step.forward import observed_eagerly
from pytest_modelhealth.capture.transcript.program import Node
from pytest_modelhealth.layers import FUNCTIONAL_LAYERS


class Operator:
    """An operation of a runtime, where there is no function of torch for it.

    Args:
        name: what it is called: ``"Gather"``.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *tensors: Tensor) -> Any:
        """Return what the runtime computed, which a `Playback` knows."""
        return handle_torch_function(self, (), *tensors)


@cache
def operator(name: str) -> Operator:
    """Return the operator of a name: the same one each time."""
    return Operator(name)


_CALLED_BY_METHOD = frozenset({"sigmoid", "tanh"})
"""Functions of `torch.nn.functional` that only call the method of the tensor: no mode sees them."""


def activation_called(name: str) -> Callable[..., Any] | None:
    """Return the function of an activation that a `Playback` can answer for, if there is one."""
    function: Callable[..., Any] | None = getattr(
        torch if name in _CALLED_BY_METHOD else functional, name, None
    )
    return function


class Playback(TorchFunctionMode):
    """Lets functions return what the runtime computed, below all that watches functions."""

    def __init__(self) -> None:
        super().__init__()
        self._expected: Callable[..., Any] | None = None
        self._result: Any = None

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Let results be returned, where this mode is not on already below those that watch."""
        stack = range(torch._C._len_torch_function_stack())
        if any(torch._C._get_function_stack_at(level) is self for level in stack):
            yield
            return
        with self:
            yield

    def play(self, node: Node, given: Sequence[Tensor], result: Any) -> None:
        """Call the function of an operation, which returns `result`, from the user's line."""
        self._expected, self._result = node.function, result
        said = node.settings if node.function in FUNCTIONAL_LAYERS else {}
        try:
            called_at(node.source)(handle_torch_function, node.function, (), *given, **said)
        finally:
            self._expected = self._result = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the result that is expected of `func`; anything else is called."""
        if func is self._expected:
            return self._result
        return func(*args, **(kwargs or {}))


@contextmanager
def observed_playback(recorder: Recorder, playback: Playback) -> Iterator[Hooks]:
    """Let `recorder` see stand-ins call each other, and functions below them be played back."""
    with playback, observed_eagerly(recorder) as hooks:
        yield hooks


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@cache
def called_at(source: str) -> Callable[..., Any]:
    """Return what calls a function so that the call seems to stand in a line of the user's code.

    Args:
        source: ``path:line``; with ``""`` the call has no place.
    """
    path, _, line = source.rpartition(":")
    if not path:
        return _call
    code = _call.__code__.replace(co_filename=path, co_firstlineno=int(line))
    return FunctionType(code, {}, _call.__name__)
