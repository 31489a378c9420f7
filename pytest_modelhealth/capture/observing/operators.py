"""Operators that show what a graph computes, where hooks do not run: compiled code and scripts.

Whoever runs the graph takes them for opaque calls and so keeps them in their places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.source_lines import source_line
from pytest_modelhealth.capture.observing.tensors import holds_numbers

_lock = threading.RLock()
_listeners: list[Listener] = []


class Listener:
    """Takes what the operators show of one run; their `layer` is an index into `layers`."""

    def __init__(self, hooks: Hooks, layers: list[Layer]) -> None:
        self._hooks = hooks
        self._layers = layers

    def input(self, index: int, value: Tensor, begins: bool) -> None:
        """Take one tensor that a layer is called with."""
        layer, recorder = self._layers[index], self._hooks.recorder
        if begins:
            recorder.enter(layer)
        recorder.forget()
        recorder.add_input(layer, value)

    def output(self, index: int, value: Tensor, begins: bool, requires_grad: bool) -> None:
        """Take one tensor that a layer returned."""
        layer, recorder = self._layers[index], self._hooks.recorder
        if begins:
            recorder.enter(layer)
        if not holds_numbers(value):
            return
        recorder.note_returned(layer, requires_grad=requires_grad or value.requires_grad)
        recorder.forget()
        recorder.complete(layer)
        recorder.add_output(layer, value, recorder.unit_dimension(layer.module, value))

    def gradient(self, index: int, gradient: Tensor) -> None:
        """Take the gradient with respect to one tensor that a layer returned."""
        layer = self._layers[index]
        if "gradients" in layer.roles and self._hooks.takes_gradients([layer]):
            dimension = self._hooks.recorder.unit_dimension(layer.module, gradient)
            self._hooks.recorder.add_gradient([layer], gradient, dimension)

    def close(self) -> None:
        """Say of each layer that was called, and whose output never showed, why it did not."""
        for layer in self._layers:
            if layer.calls and not layer.returned_own and not layer.unsupported:
                self._hooks.recorder.note_unsupported(
                    layer,
                    "its output holds no floating-point tensor, or nothing uses it and the "
                    "optimised code does not compute it",
                )

    def line(self, index: int, line: str) -> None:
        """Take the line of the user's code that calls a layer."""
        self._hooks.recorder.note_source(self._layers[index], line)

    def fail(self, index: int, error: Exception) -> None:
        """Note an error of ours."""
        self._hooks.recorder.fail(self._layers[index], error)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hand what the operators see to `listener`; runs in several threads wait for one another.

    The operators know no run: a graph that knew one could not be taken from a compiler's cache.
    """
    with _lock:
        _listeners.append(listener)
        try:
            yield
        finally:
            _listeners.pop()
            listener.close()


def _tell(method: Callable[..., None], layer: int, *arguments: Any) -> None:
    """Pass on what an operator sees; an error of ours must not reach the graph."""
    if not _listeners:
        return
    try:
        method(_listeners[-1], layer, *arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is ours
        _listeners[-1].fail(layer, error)


def note_lines(graph: fx.Graph) -> None:
    """Note the line of the user's code that calls each layer that a graph shows by operators.

    Behind a break of the graph, the hooks of several layers may share one graph, which is given the
    number of the layer: those lines stay unknown.
    """
    for node in graph.nodes:
        if node.target not in _SHOWN:
            continue
        index = next((value for value in node.args if type(value) is int), None)
        if index is not None:
            _tell(Listener.line, index, source_line(node.meta.get("stack_trace")))


def _is_recomputation() -> bool:
    return torch._C._current_graph_task_id() != -1


@torch.library.custom_op("modelhealth::see_input", mutates_args=("clock",))
def see_input(value: Tensor, clock: Tensor, layer: int, begins: bool) -> None:
    """See one tensor that a layer is called with; `begins` says that it is the call's first.

    The write to `clock`, any integer tensor, keeps a compiler from dropping the call.
    """
    clock.add_(1)
    if not _is_recomputation():
        _tell(Listener.input, layer, value, begins)


@torch.library.custom_op("modelhealth::see_output", mutates_args=())
def see_output(value: Tensor, layer: int, begins: bool, requires_grad: bool) -> Tensor:
    """Return a copy of one tensor that a layer returned, and see it and its gradient.

    `begins` says that the call showed no input; `requires_grad` says of `value` what does not show
    below autograd.
    """
    if not _is_recomputation():
        _tell(Listener.output, layer, value, begins, requires_grad)
    return value.clone()


@torch.library.custom_op("modelhealth::see_gradient", mutates_args=())
def see_gradient(gradient: Tensor, layer: int) -> Tensor:
    """Return a copy of the gradient with respect to an output of a layer, and see it."""
    _tell(Listener.gradient, layer, gradient)
    return gradient.clone()


@see_input.register_fake
def _(value: Tensor, clock: Tensor, layer: int, begins: bool) -> None:
    return None


@see_output.register_fake
def _(value: Tensor, layer: int, begins: bool, requires_grad: bool) -> Tensor:
    return torch.empty_like(value)


@see_gradient.register_fake
def _(gradient: Tensor, layer: int) -> Tensor:
    return torch.empty_like(gradient)


def _remember_layer(ctx: Any, inputs: tuple[Tensor, int, bool, bool], output: Tensor) -> None:
    ctx.layer = inputs[1]


def _pass_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.modelhealth.see_gradient(gradient, ctx.layer), None, None, None


see_output.register_autograd(_pass_gradient, setup_context=_remember_layer)

_SHOWN = {
    function
    for packet in (torch.ops.modelhealth.see_input, torch.ops.modelhealth.see_output)
    for function in (packet, packet.default)
}
