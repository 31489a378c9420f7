"""Compiled modules, observed as they run compiled: ``Inspector(model, compiled="observe")``."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pytest_modelhealth.capture.eager import is_compiled
from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.observing.graphs import source_line
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import holds_numbers
from pytest_modelhealth.capture.step.run import run_step
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Observation

_NOTE = (
    "these are values of compiled code: a copy was compiled with an operator at every layer's "
    "input and output, across which nothing fuses; functional layers are not seen"
)


class CompiledEngine(Engine):
    """Compiles a copy of the modules, with operators in it that show every layer's tensors.

    The copy shares parameters and buffers with the model. It has a backend object of its own: the
    compiler then neither takes the model's code for the copy nor the copy's for the model.
    """

    compiled: ClassVar[bool] = True
    shows_functions: ClassVar[bool] = False
    why_not_measured: ClassVar[str] = (
        "the costs of compiled code are not measured, as it fuses layers; leave out "
        'compiled="observe" for those of the model as it runs uncompiled'
    )

    def supports(self, model: object) -> bool:
        """Whether anything in `model` is compiled."""
        return isinstance(model, nn.Module) and any(map(is_compiled, model.modules()))

    def run(self, request: Request) -> Observation:
        """Run the batch through the copy; nothing of the model itself runs."""
        return run_step(request, _compiled_copy(request.model), [_NOTE], watch=_observed)


def _compiled_copy(model: nn.Module) -> nn.Module:
    """Return a copy on the same parameters and buffers, compiled where `model` is compiled."""
    compiled = [module for module in model.modules() if is_compiled(module)]
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    try:
        for module in reversed(compiled):  # inner ones first: the outer ones' copies hold them
            memo[id(module)] = copy.deepcopy(getattr(module, "_orig_mod", module), memo)
        result: nn.Module = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise InspectionError(
            f"cannot copy the model to compile it anew: {error}; "
            'without compiled="observe" it is inspected as it runs uncompiled'
        ) from error
    inside: set[nn.Module] = set()
    for module in compiled:
        if module not in inside:
            _compile(module, memo[id(module)])
            inside.update(module.modules())
    return result


_numbers = itertools.count()


def _compile(module: nn.Module, copied: nn.Module) -> None:
    """Compile a copy of `module`, its hooks included, as that was compiled."""
    context: Any = getattr(module, "dynamo_ctx", None)  # in which dynamo keeps that
    if context is None:
        closure = getattr(module._compiled_call_impl, "__closure__", None) or ()
        contents = (cell.cell_contents for cell in closure)
        context = next((c for c in contents if hasattr(c, "_dynamic")), None)
    if not hasattr(context, "callback"):
        raise InspectionError(
            f"cannot tell how {type(module).__name__} was compiled with torch {torch.__version__}; "
            'leave out compiled="observe" to inspect it as it runs uncompiled'
        )
    backend = context.callback
    # out of what dynamo wraps around it; the second name is that of torch 2.8
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
        while hasattr(backend, name):
            backend = getattr(backend, name)

    def compile_and_note_lines(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        _note_lines(graph.graph)
        return backend(graph, inputs, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        return copied._call_impl(*args, **kwargs)

    # what dynamo learns of shapes it keeps by the name of the code, and the code it makes by the
    # code object
    code = call.__code__.replace(co_name=f"inspected_{next(_numbers)}")
    function = FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    vars(copied)["_compiled_call_impl"] = torch.compile(
        function,
        backend=compile_and_note_lines,
        dynamic=getattr(context, "_dynamic", None),
    )


@contextmanager
def _observed(recorder: Recorder) -> Iterator[Hooks]:
    """Let `recorder` see every layer of its modules by operators that are compiled with them."""
    hooks = Hooks(recorder)
    layers = list(recorder.by_module.values())
    clock = torch.zeros((), dtype=torch.int64)
    handles = []
    for index, (module, layer) in enumerate(recorder.by_module.items()):
        if not layer.opaque:
            before, after = _layer_hooks(index, clock)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        with _lock:  # runs in several threads wait for one another
            _listeners.append((hooks, layers))
            try:
                yield hooks
            finally:
                _listeners.pop()
    finally:
        for handle in handles:
            handle.remove()
    for layer in layers:
        if layer.calls and not layer.returned_own and not layer.unsupported:
            layer.unsupported = (
                "its output holds no floating-point tensor, or nothing uses it and the optimised "
                "code does not compute it"
            )


def _layer_hooks(index: int, clock: Tensor) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Return the hooks of one layer; the compiler traces into them."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        begins = True
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                torch.ops.modelhealth.see_input(value.detach(), clock, index, begins)
                begins = False

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        begins = not any(isinstance(v, Tensor) for v in pytree.tree_leaves((args, kwargs)))
        values, form = pytree.tree_flatten(output)
        shown = []
        for value in values:
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                value = torch.ops.modelhealth.see_output(value, index, begins, value.requires_grad)
                begins = False
            shown.append(value)
        return pytree.tree_unflatten(shown, form)

    return before, after


# What the operators show; they are given the number of a layer. They know no run: a graph that knew
# one could not be taken from a compiler's cache.

_lock = threading.RLock()
_listeners: list[tuple[Hooks, list[Layer]]] = []


def _tell(take: Callable[..., None], layer: int, *arguments: Any) -> None:
    """Pass on what an operator sees; an error of ours must not reach the graph."""
    if _listeners:
        hooks, layers = _listeners[-1]
        try:
            take(hooks, layers[layer], *arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is ours
            hooks.recorder.fail(layers[layer], error)


def _take_input(hooks: Hooks, layer: Layer, value: Tensor, begins: bool) -> None:
    recorder = hooks.recorder
    if begins:
        recorder.enter(layer)
    recorder.forget()
    recorder.add_input(layer, value)


def _take_output(
    hooks: Hooks, layer: Layer, value: Tensor, begins: bool, requires_grad: bool
) -> None:
    recorder = hooks.recorder
    if begins:
        recorder.enter(layer)
    if holds_numbers(value):
        recorder.note_returned(layer, requires_grad or value.requires_grad)
        recorder.forget()
        recorder.complete(layer)
        recorder.add_output(layer, value, recorder.unit_dimension(layer.kind, value))


def _take_gradient(hooks: Hooks, layer: Layer, gradient: Tensor) -> None:
    if "gradients" in layer.roles and hooks.takes_gradients([layer]):
        dimension = hooks.recorder.unit_dimension(layer.kind, gradient)
        hooks.recorder.add_gradient([layer], gradient, dimension)


def _take_line(hooks: Hooks, layer: Layer, line: str) -> None:
    layer.source = layer.source or line


def _note_lines(graph: fx.Graph) -> None:
    """Note the line of the user's code that calls each layer that a graph shows by operators.

    Behind a break of the graph, the hooks of several layers may share one graph, which is given the
    number of the layer: those lines stay unknown.
    """
    for node in graph.nodes:
        index = next((value for value in node.args if type(value) is int), None)
        if node.target in _SHOWN and index is not None:
            _tell(_take_line, index, source_line(node.meta.get("stack_trace")))


def _is_recomputation() -> bool:
    return torch._C._current_graph_task_id() != -1


@torch.library.custom_op("modelhealth::see_input", mutates_args=("clock",))
def see_input(value: Tensor, clock: Tensor, layer: int, begins: bool) -> None:
    """See one tensor that a layer is called with; `begins` says that it is the call's first.

    The write to `clock`, any integer tensor, keeps a compiler from dropping the call.
    """
    clock.add_(1)
    if not _is_recomputation():
        _tell(_take_input, layer, value, begins)


@torch.library.custom_op("modelhealth::see_output", mutates_args=())
def see_output(value: Tensor, layer: int, begins: bool, requires_grad: bool) -> Tensor:
    """Return a copy of one tensor that a layer returned, and see it and its gradient.

    `begins` says that the call showed no input; `requires_grad` says of `value` what does not show
    below autograd.
    """
    if not _is_recomputation():
        _tell(_take_output, layer, value, begins, requires_grad)
    return value.clone()


@torch.library.custom_op("modelhealth::see_gradient", mutates_args=())
def see_gradient(gradient: Tensor, layer: int) -> Tensor:
    """Return a copy of the gradient with respect to an output of a layer, and see it."""
    _tell(_take_gradient, layer, gradient)
    return gradient.clone()


see_input.register_fake(lambda value, clock, layer, begins: None)
see_output.register_fake(lambda value, layer, begins, requires_grad: torch.empty_like(value))
see_gradient.register_fake(lambda gradient, layer: torch.empty_like(gradient))


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

KINDS = (CompiledEngine,)
