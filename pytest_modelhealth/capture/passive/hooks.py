"""Hooks for a step that the user runs, of model and optimizers, and what compiled code hides."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import get_ident
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.compiler import is_compiling
from torch.optim import Optimizer

from pytest_modelhealth.capture.eager import is_compiled
from pytest_modelhealth.capture.observing.function_mode import Call, FunctionalLayers
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import NEVER_LAZY, WHY_NOT_SEEN, is_capturing
from pytest_modelhealth.capture.step.guard import is_inspecting
from pytest_modelhealth.layers import unwrapped

WHY_OPAQUE = (
    "it runs as compiled code, where no hook is called; its parameters, their gradients and "
    "updates are seen all the same"
)


class Compiled:
    """What of the process is compiled and has to do with a model, or may have.

    `torch.compile` leaves no trace on what it compiles, so everything that Python's garbage
    collector knows is looked through, once.

    Args:
        model: the model.

    Attributes:
        function: name of a compiled function that may run inside the model; ``""`` if none may. A
            function mode would have it compiled anew.
        runs_optimizer: whether an optimizer's step is compiled, which hooks would break up.
    """

    def __init__(self, model: nn.Module) -> None:
        self.function = ""
        self.runs_optimizer = False
        self._model = model
        self._wrappers: list[weakref.ref[nn.Module]] = []
        self._inside: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of compiled functions
        own = set(model.modules())
        for thing in compiled_things():
            if type(thing) is FunctionType:
                self._add_function(vars(thing)[_ORIGINAL], own)
            elif unwrapped(thing) in own:
                self._wrappers.append(weakref.ref(thing))

    def _add_function(self, function: Any, own: set[nn.Module]) -> None:
        owner = getattr(function, "__self__", getattr(function, "__wrapped__", None))
        if isinstance(owner, Optimizer):
            self.runs_optimizer = True
        elif not isinstance(owner, nn.Module):
            self.function = getattr(function, "__qualname__", type(function).__name__)
            with suppress(TypeError, ValueError):  # no function, or a variable without a value
                scope = inspect.getclosurevars(function)
                for value in (*scope.globals.values(), *scope.nonlocals.values()):
                    if isinstance(value, nn.Module):
                        self._inside.update(own.intersection(value.modules()))
        elif owner in own and getattr(function, "__name__", "") not in _CALLS:
            # a method of a module, whose own hooks lie around it
            self._inside.update(child for child in owner._modules.values() if child is not None)

    def parts(self) -> tuple[set[nn.Module], dict[nn.Module, nn.Module]]:
        """Return the modules that run as compiled code now, and what is around some of them.

        What `torch.compile` put around a module is given with that module, whose inputs and outputs
        show there.
        """
        inside: set[nn.Module] = set()
        around: dict[nn.Module, nn.Module] = {}
        for module in self._inside:
            inside.update(module.modules())
        wrappers = (wrapper for ref in self._wrappers if (wrapper := ref()) is not None)
        for module in (*wrappers, *self._model.modules()):
            if is_compiled(module):
                if unwrapped(module) is not module and module not in inside:
                    around[module] = unwrapped(module)
                inside.update(unwrapped(module).modules())
        return inside, around


def compiled_things() -> list[Any]:
    """Return all modules and functions of this process that `torch.compile` made."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or _COMPILES not in sys.modules:  # nothing was compiled yet
        return []
    things = gc.get_objects()
    functions = [one for one in things if type(one) is FunctionType and hasattr(one, _ORIGINAL)]
    return [
        *(one for one in things if type(one) is dynamo.OptimizedModule),
        *(one for one in functions if not hasattr(one, "_torchdynamo_disable")),
    ]


_ORIGINAL = "_torchdynamo_orig_callable"
_COMPILES = "torch._dynamo.repro.after_dynamo"
"""What torch imports when it first looks for a backend to compile with, and not before."""
_CALLS = frozenset({"__call__", "_call_impl", "_wrapped_call_impl", "inner"})
"""How a whole module is compiled, which shows at the module or at what is around it."""


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

    def register_around(
        self, inside: set[nn.Module], around: Mapping[nn.Module, nn.Module]
    ) -> None:
        """Hook every layer that hooks reach; of compiled ones the outside, where that shows."""
        layers = self.recorder.by_module
        for module, layer in layers.items():
            if not (layer.opaque or module in inside):
                self.hook(module, layer)
        for wrapper, module in around.items():
            self.hook(wrapper, layers[module])

    def remove(self) -> None:
        """Remove every hook, and our hooks only."""
        if self._mode_is_on:  # an exception ended a pass without a word to us
            self.functions.turn_off()
            self._mode_is_on = False
        super().remove()
        for ref, hook in self._older:
            (ref() or {}).pop(hook, None)
        self._older.clear()
        self._on_pass = self._on_backward = None  # which lead to what was seen

    def enter(self, layer: Layer, arguments: Any) -> None:
        """Begin a call of a layer."""
        if get_ident() != self._thread and not self._is_recomputation():
            return
        if not self._stack:
            if self._passed_over is not None:
                return
            # one of the user's training, which may be looked at
            if not torch.is_grad_enabled() or is_inspecting() or self._is_captured():
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
                # keep no hooks of tensors that are gone
                refs = [(weakref.ref(hooks), hook) for hooks, hook in self._tensor_hooks]
                self._tensor_hooks.clear()
                self._older = [one for one in (*self._older, *refs) if one[0]() is not None]
            if self._on_pass is not None:
                self._on_pass(arguments)
        if self._is_functional:
            self._mode_is_on = True
            self.functions.turn_on()

    def _note_backward(self) -> None:
        """Have the end of the backward pass told that runs, once."""
        task = torch._C._current_graph_task_id()
        if task == self._backward_pass:
            return
        self._backward_pass = task
        self.saw_backward = True
        engine: Any = Variable._execution_engine
        # nobody's, once it is removed
        engine.queue_callback(lambda: self._on_backward and self._on_backward())


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the tensors that an optimizer holds, each once."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list({id(parameter): parameter for parameter in held}.values())


def can_be_subtracted(parameter: Tensor) -> bool:
    """Whether the parameter is one whose values can be subtracted from a copy of it."""
    return (
        type(parameter) in NEVER_LAZY
        and parameter.requires_grad
        and parameter.layout is torch.strided
        and not parameter.is_nested
        and not parameter.is_meta
    )
