"""Hooks on modules and tensors that hand everything to a `Recorder` and change nothing.

Forward hooks and tensor hooks only: full backward hooks break in-place modules (pytorch#61519).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from pytest_modelhealth.capture.observing.flow import OpenCall
from pytest_modelhealth.capture.observing.function_mode import Call, FunctionalLayers
from pytest_modelhealth.capture.observing.layer import Given, Layer, call_options, with_dropout
from pytest_modelhealth.capture.observing.loss_calls import LOSS_FUNCTIONS
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import NUMBERS, find_tensors, version
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.statistics import Entry

# looked up once: these run for every call of a layer
_Unseen = torch._C.DisableTorchFunction  # what we ask of a tensor is no call of the user's
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_tracing_state = torch._C._get_tracing_state


@contextmanager
def observed(recorder: Recorder, hooks: Hooks | None = None) -> Iterator[Hooks]:
    """Let `recorder` see every layer of its modules that runs inside, by `hooks` of its own."""
    hooks = hooks or Hooks(recorder)
    with ExitStack() as stack:
        stack.callback(hooks.remove)
        hooks.register()
        stack.callback(hooks.functions.turn_off)
        hooks.functions.turn_on()
        # first of all: a call that an exception ended may have taken the mode off
        stack.callback(hooks.end_calls)
        yield hooks


class Frame:
    """One call of a layer that has not returned yet; activation checkpointing may make it again.

    An exception may have been handled when it began.
    """

    call: OpenCall | None = None  # in the flow, where that is recorded
    inputs: Sequence[Given] = ()
    functions: dict[str, int] | None = None  # how many calls of each it has made so far
    resume: Callable[[], None] | None = None  # puts the function mode back on

    def __init__(
        self, layer: Layer, is_recomputation: bool, handling: BaseException | None = None
    ) -> None:
        self.layer, self.is_recomputation, self.handling = layer, is_recomputation, handling


class Hooks:
    """All hooks of one run; none of them keeps a tensor longer than the call it saw it in.

    An error of ours goes on the record: it must never reach the user's forward or backward.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.flow = recorder.flow
        self.functions = FunctionalLayers(self._function, recorder.flow)
        self._stack: list[Frame] = []
        self._id: int = RemovableHandle(OrderedDict()).id
        self._modules: list[nn.Module] = []
        self._tensor_hooks: list[tuple[dict[Any, Any], Any]] = []  # where each is, and itself
        self._differentiating = False
        self._graph_task = _graph_task()  # -1, unless this is in a backward

    def register(self) -> None:
        """Hook every module, after the user's own hooks.

        This is what `register_forward_hook` does, without a handle for each; and a scripted module
        refuses to do it itself, yet runs hooks at the script's root.
        """
        for module, layer in self.recorder.by_module.items():
            if not layer.opaque:
                self.hook(module, layer)

    def hook(self, module: nn.Module, layer: Layer) -> None:
        """Take the calls of `module` for those of `layer`."""
        number = self._id
        self._modules.append(module)
        enter: Any = _EnterHook((self, layer))
        complete: Any = _CompleteHook((self, layer))
        module._forward_pre_hooks[number] = enter
        module._forward_pre_hooks_with_kwargs[number] = True
        module._forward_hooks[number] = complete
        # called after an exception too, so that the stack of calls stays right where the
        # user's forward catches it
        module._forward_hooks_always_called[number] = True

    def end_calls(self) -> None:
        """End the calls that an exception left open."""
        while self._stack:
            self._end(self._stack[-1].layer)

    def remove(self) -> None:
        """Remove every hook, and our hooks only."""
        number = self._id
        for module in self._modules:
            module._forward_pre_hooks.pop(number, None)
            module._forward_pre_hooks_with_kwargs.pop(number, None)
            module._forward_hooks.pop(number, None)
            module._forward_hooks_always_called.pop(number, None)
        for hooks, hook in self._tensor_hooks:
            hooks.pop(hook, None)
        # each of these leads back here: what a run made would be left to the garbage collector
        self._tensor_hooks.clear()
        self.functions.observe = None

    @property
    def running_layer(self) -> str | None:
        """The innermost layer that has not returned, by name; ``None`` outside the forward."""
        return self._stack[-1].layer.label if self._stack else None

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

    def enter(self, layer: Layer, arguments: Any) -> None:
        """Begin a call of a layer."""
        try:
            with _Unseen():
                frame = Frame(layer, _graph_task() != self._graph_task, sys.exception())
                self._stack.append(frame)
                module: Any = layer.module
                # a hook of the user's might call functional layers
                if layer.is_torchs_own and len(module._forward_hooks) == 1:
                    frame.resume = self.functions.step_aside()
                elif isinstance(module, _FUSED_IN_EVALUATION):
                    self._keep_fused(module, layer, frame)
                self._see_inputs(layer, frame, arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is ours
            self.recorder.fail(layer, error)

    def _keep_fused(self, module: nn.Module, layer: Layer, frame: Frame) -> None:
        """Turn the mode off where a module with a fused path would drop it while one is on.

        That changes its output: at padded positions, and elsewhere in the last bits. The path is
        open only without gradients.
        """
        is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        if not (module.training or is_trained):
            frame.resume = self.functions.suspend()
            if frame.resume is not None:
                self.recorder.note(
                    f"functional layers inside {layer.label!r} were not looked at: without "
                    "gradients its fused path gives other numbers while it is watched"
                )

    def _is_recomputation(self) -> bool:
        """Whether activation checkpointing is running a forward again, inside our backward."""
        return _graph_task() != self._graph_task

    def _see_inputs(self, layer: Layer, frame: Frame, arguments: Any) -> None:
        tensors = find_tensors(arguments)
        if frame.is_recomputation:
            frame.inputs = [(tensor, version(tensor), None) for tensor in tensors]
            return
        frame.inputs = self.recorder.enter(layer, tensors)
        frame.call = call = self.flow.enter(layer, frame.inputs)
        if call is not None and layer.place is None:
            layer.place = call.place

    def complete(self, layer: Layer, output: Any) -> None:
        """End the latest call of a layer, which returned `output` or raised."""
        try:
            with _Unseen():
                frame = self._end(layer)
                if frame is None:
                    return
                if output is None and sys.exception() is not frame.handling:
                    raised = type(sys.exception()).__name__
                    layer.why_empty = f"it raised {raised}, which the model caught"
                    self.flow.complete(frame.call, [], is_one_vertex=False)
                else:
                    self._see_output(layer, frame, output)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is ours
            self.recorder.fail(layer, error)

    def _end(self, layer: Layer) -> Frame | None:
        """End the latest call of a layer, if one has not returned.

        Those inside it were ended by an exception without a word to us.
        """
        stack = self._stack
        if not stack or (
            stack[-1].layer is not layer  # hardly ever
            and all(frame.layer is not layer for frame in stack)
        ):
            return None
        while True:
            ended = stack.pop()
            if ended.resume is not None:
                ended.resume()
            if ended.layer is layer:
                return ended

    def _function(
        self, name: str | None, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make one functional call, as a layer of the module that is running, if it is one."""
        caller = self._stack[-1] if self._stack else None
        if call in LOSS_FUNCTIONS:
            value = self.flow.run_function(call, args, kwargs)
            if not (is_traced() or self._is_recomputation()):
                layer = None if caller is None else caller.layer
                self.recorder.loss_calls.add(layer, call, args, kwargs, value)
            return value
        if caller is None or caller.layer.activation is not None or is_traced():
            return self.flow.run_function(call, args, kwargs)
        if name is None:
            if not isinstance(caller.layer.module, nn.modules.dropout._DropoutNd):
                known = caller.layer.options
                caller.layer.options = with_dropout(known, call, args, kwargs)
            return self.flow.run_function(call, args, kwargs)
        functions = caller.functions = caller.functions or {}
        number, options = functions.get(name, 0), call_options(name, args, kwargs)
        functions[name] = number + 1
        layer = self.recorder.functional_layer(caller.layer, name, number, options)
        frame = Frame(layer, self._is_recomputation())
        self._guard(self._see_inputs, layer, frame, (args, kwargs))
        output = call(*args, **kwargs)
        self._guard(self._see_output, layer, frame, output)
        return output

    def _guard(self, see: Callable[..., None], layer: Layer, frame: Frame, tensors: Any) -> None:
        try:
            with _Unseen():
                see(layer, frame, tensors)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is ours
            self.recorder.fail(layer, error)

    def _see_output(self, layer: Layer, frame: Frame, output: Any) -> None:
        tensors = [output] if type(output) is Tensor else find_tensors(output)  # most layers
        is_one_vertex = layer.functional or (layer.is_torchs_own and frame.resume is not None)
        self.flow.complete(frame.call, tensors, is_one_vertex)
        call = frame.call
        # a call that made the one tensor that it returned
        is_maker = call is not None and call.outputs == (call.index,)
        made_by = call.outputs if call is not None and is_maker else None
        recorder, is_new = self.recorder, not frame.is_recomputation
        if not tensors:
            what = "None" if output is None else f"a value of type {type(output).__name__}"
            layer.why_empty = layer.why_empty or f"it returned {what}, no tensor"
        if is_new:
            recorder.complete(layer)
        returned: list[Tensor] = []
        entries: list[Entry | None] = []
        for tensor in tensors:
            if tensor.dtype not in NUMBERS:
                continue
            returned.append(tensor)
            dimension = recorder.unit_dimension(layer.kind, tensor)
            if is_new:
                entries.append(recorder.add_output(layer, tensor, dimension, made_by))
            # it is one of those given, and was not written to since
            if any(tensor is given and version(given) == then for given, then, _ in frame.inputs):
                layer.returned_input = True
            elif recorder.note_returned(layer, tensor.requires_grad):
                # where nothing else is returned, a base that was made since has this one view
                is_alone = layer.is_torchs_own and len(tensors) == 1
                begin = call.begin if is_alone and call is not None else None
                self._hook_gradient(layer, tensor, dimension, begin)
        if is_new and (layer.equal_samples is not False or not layer.name):
            recorder.compare_samples(layer, frame.inputs, returned, entries)
        if layer.replays:
            recorder.forget()

    def _hook_gradient(
        self, layer: Layer, tensor: Tensor, unit_dimension: int | None, begin: int | None
    ) -> None:
        """Hook a tensor's gradient, and its base's where the tensor is a view.

        Reading ``grad_fn`` first brings the graph of a view up to date: without it registering a
        hook on a view whose base was written to crashes the interpreter (pytorch#196459). A view
        that is written to later never fires; the hook on its base does.
        """
        node, known = tensor.grad_fn, tensor._backward_hooks
        if known:
            # that of a layer inside, which returned the same tensor, serves both, unless the user's
            # code hooked the tensor in between: then there are two gradients. A tensor that was
            # written to has lost its hooks, one whose base was by the line above
            latest: Any = next(reversed(known))
            if type(latest) is _GradientHook and latest.add(self, layer, unit_dimension):
                return
        hook = _GradientHook(self, layer, unit_dimension)
        self._register(tensor, node, known, hook)
        base = tensor._base
        if base is not None and base.requires_grad and base.grad_fn is not None:
            is_shared = begin is None or base.grad_fn._sequence_nr() < begin
            around = _BaseGradientHook(hook, tensor, base, is_shared=is_shared)
            self._register(base, base.grad_fn, base._backward_hooks, around)

    def _register(
        self, tensor: Tensor, node: Any, hooks: Any, hook: Callable[[Tensor | None], None]
    ) -> None:
        """Do what `Tensor.register_hook` does, without a handle; `hooks` are those it has."""
        if hooks is None:
            tensor._backward_hooks = hooks = OrderedDict()
            if node is not None:
                node._register_hook_dict(tensor)
        hooks[hook] = hook
        self._tensor_hooks.append((hooks, hook))

    def takes_gradients(self, layers: list[Layer]) -> bool:
        """Whether what flows back to `layers` now is the gradient of the loss.

        A pass that builds a graph, for a gradient penalty say, is a part of computing the loss.
        """
        if self._differentiating and torch.is_grad_enabled():
            self.recorder.note_pass_with_graph(layers)
            return False
        return self._differentiating


def is_traced() -> bool:
    """Whether what runs now is being written down: our own operations would be a part of it."""
    return _tracing_state() is not None or is_compiling()


_FUSED_IN_EVALUATION = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class _UnnamedError(InspectionError, AttributeError):
    """Our hooks have no name, and torch.jit.script asks each hook for one."""


class OurHook:
    """A hook on a module; it pickles and copies to one that does nothing and needs only Python."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")


class _ModuleHook(OurHook, tuple["Hooks", Layer]):
    """A forward hook that knows its layer; a tuple is made without a call of Python."""

    __slots__ = ()

    @property
    def __name__(self) -> str:
        raise _UnnamedError(
            f"torch.jit.script was called while {self[1].label!r} is watched, and would "
            "compile the hooks too; script it once, in __init__, or between the watched steps of a "
            "monitor, or inspect the model without scripting it in its forward"
        )


class _EnterHook(_ModuleHook):
    """Begins a call."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling():
            return
        hooks, layer = self
        if _tracing_state() is not None:
            layer.traced = True
        else:
            hooks.enter(layer, (args, kwargs) if kwargs else args)


class _CompleteHook(_ModuleHook):
    """Ends a call, also one that raised."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _tracing_state() is None and not is_compiling():
            hooks, layer = self
            hooks.complete(layer, output)


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
        hooks, layers = self._hooks, self._layers
        if gradient is None or not hooks.takes_gradients(layers):
            return
        self.fired = True
        try:
            with _Unseen():
                hooks.recorder.add_gradient(layers, gradient, self._unit_dimension)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is ours
            for layer in layers:
                hooks.recorder.fail(layer, error)


class _BaseGradientHook:
    """Recovers the gradient of a view that was written to, from the gradient of its base.

    The base's gradient comes after that of all its views, so a view that is silent by then was
    written to or, where others share the base, did not reach the loss; its version tells which.
    """

    __slots__ = ("_base_shape", "_base_stride", "_geometry", "_hook", "_probe", "_version")

    def __init__(self, hook: _GradientHook, view: Tensor, base: Tensor, *, is_shared: bool) -> None:
        self._hook, self._probe = hook, view.detach() if is_shared else None
        if self._probe is not None:
            # it shares the version counter of the view, and no memory
            self._probe.data = torch.empty(0, dtype=view.dtype, device=view.device)
            self._version = version(view)
        self._base_shape, self._base_stride = base.shape, base.stride()
        offset = view.storage_offset() - base.storage_offset()
        self._geometry = (view.shape, view.stride(), offset)

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None or self._hook.fired:
            return
        if self._probe is not None and version(self._probe) == self._version:
            return
        if gradient.stride() != self._base_stride:
            gradient = torch.empty_strided(
                self._base_shape, self._base_stride, dtype=gradient.dtype, device=gradient.device
            ).copy_(gradient)
        self._hook(gradient.as_strided(*self._geometry))
