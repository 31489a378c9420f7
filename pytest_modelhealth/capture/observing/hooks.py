"""Hooks on modules and tensors that hand everything to a `Recorder` and change nothing.

Forward hooks and tensor hooks only: full backward hooks break in-place modules (pytorch#61519).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from pytest_modelhealth.capture.observing.flow import OpenCall
from pytest_modelhealth.capture.observing.functional import Call, FunctionalLayers
from pytest_modelhealth.capture.observing.losses import LOSS_FUNCTIONS
from pytest_modelhealth.capture.observing.options import call_options, dropout_options
from pytest_modelhealth.capture.observing.recorder import Given, Layer, Recorder
from pytest_modelhealth.capture.observing.tensors import (
    find_tensors,
    holds_numbers,
    version,
    version_probe,
)
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.statistics import Entry

_P = ParamSpec("_P")


@contextmanager
def observed(recorder: Recorder) -> Iterator[Hooks]:
    """Let `recorder` see every layer of its modules that runs inside."""
    hooks = Hooks(recorder)
    with ExitStack() as stack:
        stack.callback(hooks.remove)
        hooks.register()
        stack.callback(hooks.functional.turn_off)
        hooks.functional.turn_on()
        # first of all: a call that an exception ended may have taken the mode off
        stack.callback(hooks.end_calls)
        yield hooks


class Frame:
    """One call of a layer that has not returned yet.

    Attributes:
        call: the call in the flow, where that is recorded.
        layer: the layer.
        handling: the exception that was being handled when the call began, if any.
        inputs: the tensors it was called with.
        functions: how many calls of each function it has made so far.
        resume: puts the functional mode back on, where the call turned it off.
        is_recomputation: whether activation checkpointing makes the call again.
        is_simple: whether `Hooks.enter_simply` saw it begin.
    """

    __slots__ = (
        "call",
        "functions",
        "handling",
        "inputs",
        "is_recomputation",
        "is_simple",
        "layer",
        "resume",
    )

    def __init__(
        self, layer: Layer, is_recomputation: bool, handling: BaseException | None = None
    ) -> None:
        self.layer = layer
        self.call: OpenCall | None = None
        self.handling = handling
        self.inputs: list[Given] = []
        self.functions: dict[str, int] | None = None
        self.resume: Callable[[], None] | None = None
        self.is_recomputation = is_recomputation
        self.is_simple = False

    def number(self, function: str) -> int:
        """Return the number of the next call of `function`, from 0 on."""
        if self.functions is None:
            self.functions = {}
        index = self.functions[function] = self.functions.get(function, -1) + 1
        return index


def _guarded(
    method: Callable[Concatenate[Hooks, Layer, _P], None],
) -> Callable[Concatenate[Hooks, Layer, _P], None]:
    """Put an error of ours on the record: it must never reach the user's forward or backward."""

    @wraps(method)
    def guarded(self: Hooks, layer: Layer, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            # what we ask of a tensor is no call of the user's
            with torch._C.DisableTorchFunction():
                method(self, layer, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is ours
            self.recorder.fail(layer, error)

    return guarded  # type: ignore[return-value]


class Hooks:
    """All hooks of one run; none of them keeps a tensor longer than the call it saw it in."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.flow = recorder.flow
        self.functional = FunctionalLayers(self._function, recorder.flow)
        self._stack: list[Frame] = []
        self._id: int = RemovableHandle(OrderedDict()).id
        self._modules: list[nn.Module] = []
        self._tensor_hooks: list[Any] = []
        self._hook_dictionaries: list[dict[Any, Any]] = []
        self._differentiating = False
        self._graph_task = torch._C._current_graph_task_id()  # -1, unless this is in a backward

    def register(self) -> None:
        """Hook every module, after the user's own hooks.

        This is what `register_forward_hook` does, without a handle for each; and a scripted module
        refuses to do it itself, yet runs hooks at the script's root.
        """
        for module, layer in self.recorder.by_module.items():
            if layer.opaque:
                continue
            self._modules.append(module)
            module._forward_pre_hooks[self._id] = _EnterHook(self, layer)
            module._forward_pre_hooks_with_kwargs[self._id] = True
            module._forward_hooks[self._id] = _CompleteHook(self, layer)
            # called after an exception too, so that the stack of calls stays right where the
            # user's forward catches it
            module._forward_hooks_always_called[self._id] = True

    def enter_layer(self, layer: Layer, arguments: tuple[Any, ...]) -> None:
        """Begin a call of a layer that no module hook reaches."""
        if not _is_traced():
            self.enter(layer, arguments, {})

    def complete_layer(self, layer: Layer, output: Any) -> None:
        """End a call of a layer that no module hook reaches."""
        if not _is_traced():
            self.complete(layer, output)

    def end_calls(self) -> None:
        """End the calls that an exception left open."""
        if self._stack:
            self._drop(self._stack[0])

    def remove(self) -> None:
        """Remove every hook, and our hooks only."""
        for module in self._modules:
            module._forward_pre_hooks.pop(self._id, None)
            module._forward_pre_hooks_with_kwargs.pop(self._id, None)
            module._forward_hooks.pop(self._id, None)
            module._forward_hooks_always_called.pop(self._id, None)
        for hook, hooks in zip(self._tensor_hooks, self._hook_dictionaries, strict=True):
            hooks.pop(hook, None)
        # each of these leads back here: what a run made would be left to the garbage collector
        self._tensor_hooks.clear()
        self.functional.observe = None

    @property
    def running_layer(self) -> str | None:
        """The innermost layer that has not returned, by name; ``None`` outside the forward."""
        return self._stack[-1].layer.label if self._stack else None

    @contextmanager
    def blind(self) -> Iterator[None]:
        """See nothing of what runs inside: another inspection, of another model."""
        resume = self.functional.suspend()
        differentiating, self._differentiating = self._differentiating, False
        try:
            yield
        finally:
            self._differentiating = differentiating
            if resume is not None:
                resume()

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """Take what flows back for gradients of the loss.

        Gradients that pass at other times are of something else, such as an energy that a forward
        differentiates to get forces.
        """
        self._differentiating = True
        try:
            yield
        finally:
            self._differentiating = False

    def enter_simply(self, layer: Layer, module: nn.Module, tensor: Tensor) -> bool:
        """Begin a call of one of torch's own layers with one plain tensor, at less cost.

        Returns:
            Whether that was possible: it is not where the user's code may run inside the call, in
            another hook or in a function mode, nor in a recomputation.
        """
        if len(module._forward_hooks) != 1:
            return False
        frame = Frame(layer, self._is_recomputation(), sys.exception())
        if frame.is_recomputation:
            return False
        resume = self.functional.step_aside_alone()
        if resume is None:
            return False
        frame.resume = resume
        self._stack.append(frame)
        try:
            self.recorder.enter(layer)
            frame.inputs.append(self.recorder.add_input(layer, tensor))
            frame.call = self.flow.enter_simply(layer, tensor)
            frame.is_simple = True
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self.recorder.fail(layer, error)
        return True

    def complete_simply(self, layer: Layer, output: Any) -> bool:
        """End such a call; return whether it was one and returned one plain tensor."""
        if type(output) is not Tensor or not self._stack:
            return False
        frame = self._stack[-1]
        if not frame.is_simple or frame.layer is not layer:
            return False
        self._stack.pop()
        try:
            self.flow.complete_simply(frame.call, output)
            self._see_tensors(frame, [output] if holds_numbers(output) else [])
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self.recorder.fail(layer, error)
        finally:
            if frame.resume is not None:
                frame.resume()
        return True

    @_guarded
    def enter(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of any layer."""
        frame = Frame(layer, self._is_recomputation(), sys.exception())
        self._stack.append(frame)
        self._see_inputs(frame, (args, kwargs) if kwargs else args)
        if layer.calls_no_functional_layer and _has_one_hook(layer.module):
            frame.resume = self.functional.step_aside()
        elif _changes_under_a_mode(layer.module):
            frame.resume = self.functional.suspend()
            if frame.resume is not None:
                self.recorder.note_blind_spot(layer)

    def _is_recomputation(self) -> bool:
        """Whether activation checkpointing is running a forward again, inside our backward."""
        return torch._C._current_graph_task_id() != self._graph_task

    def _see_inputs(self, frame: Frame, arguments: Any) -> None:
        tensors = find_tensors(arguments)
        if frame.is_recomputation:
            frame.inputs = [(tensor, version(tensor), None) for tensor in tensors]
        else:
            self.recorder.enter(frame.layer)
            frame.inputs = self.recorder.add_inputs(frame.layer, tensors)
            frame.call = self.flow.enter(frame.layer, tensors)

    @_guarded
    def complete(self, layer: Layer, output: Any) -> None:
        """End the latest call of a layer, which returned `output` or raised."""
        frame = self._innermost(layer)
        if frame is None:
            return
        self._drop(frame)
        if output is None and sys.exception() is not frame.handling:
            layer.raised = type(sys.exception()).__name__
            self.flow.abandon(frame.call)
        else:
            self._see_output(frame, output)

    def _innermost(self, layer: Layer) -> Frame | None:
        """Return the latest call of `layer` that has not returned."""
        if self._stack and self._stack[-1].layer is layer:  # it nearly always is
            return self._stack[-1]
        return next((frame for frame in reversed(self._stack) if frame.layer is layer), None)

    def _drop(self, frame: Frame) -> None:
        """End a call, and those inside it that an exception ended without a word to us."""
        while self._stack:
            ended = self._stack.pop()
            if ended.resume is not None:
                ended.resume()
            if ended is frame:
                return

    def _function(
        self, name: str | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make one functional call, as a layer of the module that is running, if it is one."""
        if call in LOSS_FUNCTIONS:
            value = self.flow.run_function(call, args, kwargs)
            if not (_is_traced() or self._is_recomputation()):
                layer = self._stack[-1].layer if self._stack else None
                self.recorder.add_loss_call(layer, call, args, kwargs, value)
            return value
        if not self._stack or self._stack[-1].layer.activation is not None or _is_traced():
            return self.flow.run_function(call, args, kwargs)
        caller = self._stack[-1]
        if name is None:
            if isinstance(caller.layer.module, nn.modules.dropout._DropoutNd):
                return self.flow.run_function(call, args, kwargs)
            caller.layer.options = {**caller.layer.options, **dropout_options(call, args, kwargs)}
            return self.flow.run_function(call, args, kwargs)
        layer = self.recorder.functional_layer(caller.layer, name, caller.number(name))
        frame = Frame(layer, self._is_recomputation())
        frame.layer.options = call_options(name, args, kwargs)
        self._enter_function(frame.layer, frame, (args, kwargs))
        output = call(*args, **kwargs)
        self._complete_function(frame.layer, frame, output)
        return output

    @_guarded
    def _enter_function(self, layer: Layer, frame: Frame, arguments: Any) -> None:
        self._see_inputs(frame, arguments)

    @_guarded
    def _complete_function(self, layer: Layer, frame: Frame, output: Any) -> None:
        self._see_output(frame, output)

    def _see_output(self, frame: Frame, output: Any) -> None:
        tensors = find_tensors(output)
        is_one_vertex = frame.layer.functional or (
            frame.resume is not None and frame.layer.calls_no_functional_layer
        )
        self.flow.complete(frame.call, tensors, is_one_vertex)
        if not tensors:
            frame.layer.returned_no_tensor = _described(output)
        self._see_tensors(frame, [t for t in tensors if holds_numbers(t)])

    def _see_tensors(self, frame: Frame, tensors: list[Tensor]) -> None:
        """Take the tensors with numbers that a call returned."""
        layer, recorder = frame.layer, self.recorder
        entries: list[Entry | None] = []
        if not frame.is_recomputation:
            recorder.complete(layer)
        for tensor in tensors:
            dimension = recorder.unit_dimension(layer.module, tensor)
            if not frame.is_recomputation:
                entries.append(recorder.add_output(layer, tensor, dimension))
            if _is_among(tensor, frame.inputs):
                layer.returned_input = True
                continue
            layer.returned_own = True
            if tensor.requires_grad and "gradients" in layer.roles:
                layer.requires_grad = True
                self._hook_gradient(layer, tensor, dimension)
            elif not layer.grad_off:
                layer.grad_off = not torch.is_grad_enabled()
        if not frame.is_recomputation:
            recorder.compare_samples(layer, frame.inputs, tensors, entries)

    def _hook_gradient(self, layer: Layer, tensor: Tensor, unit_dimension: int | None) -> None:
        """Hook a tensor's gradient, and its base's where the tensor is a view.

        Reading ``grad_fn`` first brings the graph of a view up to date: without it registering a
        hook on a view whose base was written to crashes the interpreter (pytorch#196459). A view
        that is written to later never fires; the hook on its base does.
        """
        _ = tensor.grad_fn
        if tensor._backward_hooks and self._share_hook(layer, tensor, unit_dimension):
            return
        hook = _GradientHook(self, layer, unit_dimension)
        self._register(tensor, hook)
        base = tensor._base
        if base is not None and base.requires_grad and base.grad_fn is not None:
            self._register(base, _BaseGradientHook(hook, tensor, base))

    def _share_hook(self, layer: Layer, tensor: Tensor, unit_dimension: int | None) -> bool:
        """Let the hook of a layer inside, which returned the same tensor, serve both.

        It does unless the user's code hooked the tensor in between: then there are two gradients.
        A tensor that was written to has lost its hooks; one whose base was, once its ``grad_fn``
        was read.
        """
        hooks: dict[Any, Any] = tensor._backward_hooks  # type: ignore[assignment]
        latest = next(reversed(hooks))
        if type(latest) is not _GradientHook:
            return False
        return latest.add(self, layer, unit_dimension)

    def _register(self, tensor: Tensor, hook: Callable[[Tensor | None], None]) -> None:
        """Do what `Tensor.register_hook` does, without a handle."""
        hooks: dict[Any, Any] | None = tensor._backward_hooks
        if hooks is None:
            hooks = OrderedDict()
            tensor._backward_hooks = hooks
            if tensor.grad_fn is not None:
                tensor.grad_fn._register_hook_dict(tensor)
        hooks[hook] = hook
        self._tensor_hooks.append(hook)
        self._hook_dictionaries.append(hooks)

    def takes_gradients(self, layers: list[Layer]) -> bool:
        """Whether what flows back to `layers` now is the gradient of the loss.

        A pass that builds a graph, for a gradient penalty say, is a part of computing the loss.
        """
        if not self._differentiating:
            return False
        if torch.is_grad_enabled():
            for layer in layers:
                layer.passed_with_graph = True
            return False
        return True

    def see_gradient(
        self, layers: list[Layer], gradient: Tensor, unit_dimension: int | None
    ) -> bool:
        """Take the gradient of the loss with respect to a tensor that all of `layers` returned.

        Returns:
            Whether it is one.
        """
        if not self.takes_gradients(layers):
            return False
        try:
            with torch._C.DisableTorchFunction():
                self.recorder.add_gradient(layers, gradient, unit_dimension)
        except Exception as error:  # noqa: BLE001 - as in _guarded
            for layer in layers:
                self.recorder.fail(layer, error)
        return True


def _described(output: Any) -> str:
    return "None" if output is None else f"a value of type {type(output).__name__}"


def _is_among(tensor: Tensor, given: list[Given]) -> bool:
    """Whether `tensor` is one of those given, and was not written to since."""
    for other, version_then, _ in given:
        if tensor is other:
            return version(tensor) == version_then
    return False


def _has_one_hook(module: nn.Module | None) -> bool:
    """Whether no hook but ours follows the forward: the user's might call functional layers."""
    return module is not None and len(module._forward_hooks) == 1


def _is_traced() -> bool:
    """Whether what runs now is being written down: our own operations would be a part of it."""
    return torch._C._get_tracing_state() is not None or is_compiling()


_FUSED_IN_EVALUATION = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def _changes_under_a_mode(module: nn.Module | None) -> bool:
    """Whether this is a module that drops its fused path while a function mode is on.

    That changes its output: at padded positions, and elsewhere in the last bits. The path is open
    only without gradients.
    """
    if not isinstance(module, _FUSED_IN_EVALUATION) or module.training:
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()))


def _inert_hook(*arguments: Any) -> None:
    """What becomes of our hooks in a copy or a pickle of the model made during a run."""


def _make_inert() -> Callable[..., None]:
    return _inert_hook


class _UnnamedError(InspectionError, AttributeError):
    """Our hooks have no name, and torch.jit.script asks each hook for one."""


class _ModuleHook:
    """A forward hook that knows its layer; it pickles and copies to one that does nothing."""

    __slots__ = ("_hooks", "_layer")

    def __init__(self, hooks: Hooks, layer: Layer) -> None:
        self._hooks = hooks
        self._layer = layer

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _make_inert, ()

    @property
    def __name__(self) -> str:
        raise _UnnamedError(
            f"the forward of a layer around {self._layer.label!r} scripts it during the run, "
            "and torch.jit.script would compile the hooks on it too; script it once, in __init__, "
            "or inspect the model without scripting it in its forward"
        )


class _EnterHook(_ModuleHook):
    """Begins a call; most are of torch's own layers with one plain tensor."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_traced():
            if not is_compiling():
                self._layer.traced = True
            return
        hooks, layer = self._hooks, self._layer
        is_simple = (
            layer.calls_no_functional_layer
            and len(args) == 1
            and not kwargs
            and type(args[0]) is Tensor
            and hooks.enter_simply(layer, module, args[0])
        )
        if not is_simple:
            hooks.enter(layer, args, kwargs)


class _CompleteHook(_ModuleHook):
    """Ends a call, also one that raised."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._hooks.complete_simply(self._layer, output) and not _is_traced():
            self._hooks.complete(self._layer, output)


class _GradientHook:
    """A tensor hook that knows the layers that returned the tensor and whether it ever fired."""

    __slots__ = ("_hooks", "_layers", "_unit_dimension", "fired")

    def __init__(self, hooks: Hooks, layer: Layer, unit_dimension: int | None) -> None:
        self._hooks = hooks
        self._layers = [layer]
        self._unit_dimension = unit_dimension
        self.fired = False

    def add(self, hooks: Hooks, layer: Layer, unit_dimension: int | None) -> bool:
        """Take the gradient for a further layer; return whether that is possible."""
        if hooks is not self._hooks or unit_dimension != self._unit_dimension:
            return False
        self._layers.append(layer)
        return True

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.fired |= self._hooks.see_gradient(self._layers, gradient, self._unit_dimension)


class _BaseGradientHook:
    """Recovers the gradient of a view that was written to, from the gradient of its base.

    The base's gradient comes after that of all its views, so a view that is silent by then was
    written to or did not reach the loss; its version tells which.
    """

    __slots__ = ("_base_shape", "_base_stride", "_geometry", "_hook", "_probe", "_version")

    def __init__(self, hook: _GradientHook, view: Tensor, base: Tensor) -> None:
        self._hook = hook
        self._probe = version_probe(view)
        self._version = version(view)
        self._base_shape, self._base_stride = base.shape, base.stride()
        offset = view.storage_offset() - base.storage_offset()
        self._geometry = (view.shape, view.stride(), offset)

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None or self._hook.fired or version(self._probe) == self._version:
            return
        if gradient.stride() != self._base_stride:
            gradient = torch.empty_strided(
                self._base_shape, self._base_stride, dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
        self._hook(gradient.as_strided(*self._geometry))
