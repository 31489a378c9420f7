"""Hooks for a step that the user runs: what belongs to it is told from what does not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch.autograd import Variable
from torch.compiler import is_compiling

from pytest_modelhealth.capture.observing.cuda_graphs import WHY_NOT_SEEN, is_capturing
from pytest_modelhealth.capture.observing.function_mode import Call, FunctionalLayers
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.passive.compiled import Compiled
from pytest_modelhealth.capture.step.apart import is_inspecting

PASSES_A_PAGE = 16
"""After so many forward passes in one step, what was found in them is merged."""


class _PassiveFunctions(FunctionalLayers):
    """Leaves alone what is compiled for the first time while it is on."""

    def __torch_function__(
        self, func: Call, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, observed if it is a layer."""
        if is_compiling():
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class PassiveHooks(Hooks):
    """Sees the forward passes of a training step, and what flows back from its loss.

    A pass is a call of a layer that no other layer makes: of the model as a rule. Passed over are
    those without gradients, such as a validation between two steps, those of an inspection, those
    that a CUDA graph captures, and those of other threads. The flow between layers is not recorded.

    Args:
        recorder: takes everything down.
        is_functional: whether calls of functional layers are to be seen.
        on_pass: told of the arguments when a pass begins.
        on_backward: called when a backward pass is over that gave gradients to layers.

    Attributes:
        passes: how many forward passes there were.
        saw_backward: whether gradients came back.
    """

    def __init__(
        self,
        recorder: Recorder,
        is_functional: bool,
        on_pass: Callable[[Any], None],
        on_backward: Callable[[], None],
    ) -> None:
        super().__init__(recorder)
        recorder.flow.is_on = False
        self.functions = _PassiveFunctions(self._function, recorder.flow)
        self.passes = 0
        self.saw_backward = False
        self._is_functional = is_functional
        self._on_pass: Callable[[Any], None] | None = on_pass
        self._on_backward: Callable[[], None] | None = on_backward
        self._older: list[tuple[weakref.ref[dict[Any, Any]], Any]] = []  # as in _tensor_hooks
        self._mode_is_on = False
        self._thread = get_ident()
        self._passed_over: Layer | None = None
        self._backward_pass = self._graph_task

    def register_around(self, compiled: Compiled) -> None:
        """Hook every layer that hooks reach; of compiled ones the outside, where that shows."""
        layers = self.recorder.by_module
        for module, layer in layers.items():
            if not (layer.opaque or module in compiled.inside):
                self.hook(module, layer)
        for wrapper, inside in compiled.wrappers.items():
            self.hook(wrapper, layers[inside])

    def remove(self) -> None:
        """Remove every hook, and our hooks only."""
        if self._mode_is_on:  # an exception ended a pass without a word to us
            self.functions.turn_off()
            self._mode_is_on = False
        super().remove()
        for ref, hook in self._older:
            hooks = ref()
            if hooks is not None:
                hooks.pop(hook, None)
        self._older.clear()
        self._on_pass = self._on_backward = None

    def enter(self, layer: Layer, arguments: Any) -> None:
        """Begin a call of a layer."""
        if get_ident() != self._thread and not self._is_recomputation():
            return
        if not self._stack:
            if self._passed_over is not None:
                return
            if not self._belongs():
                self._passed_over = layer
                return
            self._begin_pass(arguments)
        super().enter(layer, arguments)

    def complete(self, layer: Layer, output: Any) -> None:
        """End the latest call of a layer, which returned `output` or raised."""
        if get_ident() != self._thread and not self._is_recomputation():
            return
        if self._passed_over is not None:
            if self._passed_over is layer:
                self._passed_over = None
            return
        super().complete(layer, output)
        if self._mode_is_on and not self._stack:
            self._mode_is_on = self.functions.suspend() is None

    def takes_gradients(self, layers: list[Layer]) -> bool:
        """Whether what flows back now is a gradient of the user's loss.

        A pass that builds a graph is a part of computing a loss, and so is one inside a forward.
        """
        if torch.is_grad_enabled():
            self.recorder.note_pass_with_graph(layers)
            return False
        if self._stack or self._is_captured():
            return False
        self._note_backward()
        return True

    def _belongs(self) -> bool:
        """Whether a pass that begins is one of the user's training, which may be looked at."""
        return torch.is_grad_enabled() and not is_inspecting() and not self._is_captured()

    def _is_captured(self) -> bool:
        """Whether a CUDA graph is captured, which is noted."""
        if is_capturing():
            self.recorder.note(WHY_NOT_SEEN)
            return True
        return False

    def _begin_pass(self, arguments: Any) -> None:
        if not self._is_recomputation():
            self.passes += 1
            if self.passes % PASSES_A_PAGE == 0:
                self._forget_what_is_gone()
            if self._on_pass is not None:
                self._on_pass(arguments)
        if self._is_functional:
            self._mode_is_on = True
            self.functions.turn_on()

    def _forget_what_is_gone(self) -> None:
        """Keep no hooks of tensors that are gone."""
        refs = [(weakref.ref(hooks), hook) for hooks, hook in self._tensor_hooks]
        self._tensor_hooks.clear()
        self._older += refs
        self._older = [known for known in self._older if known[0]() is not None]

    def _note_backward(self) -> None:
        """Have the end of the backward pass told that runs, once."""
        task = torch._C._current_graph_task_id()
        if task == self._backward_pass:
            return
        self._backward_pass = task
        self.saw_backward = True
        if self._on_backward is not None:
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self._on_backward is not None:
            self._on_backward()
