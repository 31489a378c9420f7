"""Compiled code, layer by layer: what a comparison runs of a compiled model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pytest_modelhealth.capture.eager import is_compiled
from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.observing.tensors import holds_numbers
from pytest_modelhealth.capture.step.run import run_step
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Observation


class CompiledEngine(Engine):
    """Compiles a copy of the modules, with an operator in it that shows every layer's outputs.

    Nothing fuses across that. The copy shares parameters and buffers with the model, which itself
    neither runs nor is compiled.
    """

    compiled: ClassVar[bool] = True
    shows_functions: ClassVar[bool] = False

    def supports(self, model: object) -> bool:
        """Whether anything in `model` is compiled."""
        return isinstance(model, nn.Module) and any(map(is_compiled, model.modules()))

    def run(self, request: Request) -> Observation:
        """Run the batch through the copy; nothing of the model itself runs."""
        return run_step(request, _compiled_copy(request.model), [], watch=_observed)


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
            f"cannot copy the model to compile it anew: {error}; compare the model before "
            "torch.compile, or the outputs of both with torch.testing.assert_close"
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
            "compare the model before torch.compile"
        )
    backend = context.callback
    # out of what dynamo wraps around it; the second name is that of torch 2.8
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
        while hasattr(backend, name):
            backend = getattr(backend, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return copied._call_impl(*args, **kwargs)

    # dynamo takes neither the model's code for the copy nor the copy's for the model, as it keeps
    # what it learns of shapes by the name of the code, and the code it makes by code and backend
    code = call.__code__.replace(co_name=f"inspected_{next(_numbers)}")
    function = FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    vars(copied)["_compiled_call_impl"] = torch.compile(
        function,
        backend=lambda graph, inputs, **options: backend(graph, inputs, **options),
        dynamic=getattr(context, "_dynamic", None),
    )


@contextmanager
def _observed(recorder: Recorder) -> Iterator[Hooks]:
    """Let `recorder` see every layer of its modules by an operator that is compiled with them."""
    hooks = Hooks(recorder)
    layers = list(recorder.by_module.values())
    handles = [
        module.register_forward_hook(_hook(index))
        for index, (module, layer) in enumerate(recorder.by_module.items())
        if not layer.opaque
    ]
    _listeners.append((hooks, layers))
    try:
        yield hooks
    finally:
        _listeners.pop()
        for handle in handles:
            handle.remove()


def _hook(index: int) -> Callable[..., Any]:
    """Return the hook of one layer; the compiler traces into it."""

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        begins = True
        values, form = pytree.tree_flatten(output)
        shown = []
        for value in values:
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                value = torch.ops.modelhealth.see(value, index, begins, value.requires_grad)
                begins = False
            shown.append(value)
        return pytree.tree_unflatten(shown, form)

    return after


_listeners: list[tuple[Hooks, list[Layer]]] = []
"""To whom the operators show what they see; they are given the number of a layer, and know no run:
a graph that knew one could not be taken from a compiler's cache."""


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


def _tell(take: Callable[..., None], layer: int, *arguments: Any) -> None:
    """Pass on what an operator sees; an error of ours must not reach the graph."""
    if _listeners:
        hooks, layers = _listeners[-1]
        try:
            take(hooks, layers[layer], *arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is ours
            hooks.recorder.fail(layers[layer], error)


@torch.library.custom_op("modelhealth::see", mutates_args=())
def see(value: Tensor, layer: int, begins: bool, requires_grad: bool) -> Tensor:
    """Return a copy of one tensor that a layer returned, and see it and its gradient.

    `begins` says that it is the call's first; `requires_grad` says of `value` what does not show
    below autograd.
    """
    if torch._C._current_graph_task_id() == -1:  # no recomputation in the backward pass
        _tell(_take_output, layer, value, begins, requires_grad)
    return value.clone()


@torch.library.custom_op("modelhealth::see_gradient", mutates_args=())
def see_gradient(gradient: Tensor, layer: int) -> Tensor:
    """Return a copy of the gradient with respect to an output of a layer, and see it."""
    _tell(_take_gradient, layer, gradient)
    return gradient.clone()


see.register_fake(lambda value, layer, begins, requires_grad: torch.empty_like(value))
see_gradient.register_fake(lambda gradient, layer: torch.empty_like(gradient))


def _remember_layer(ctx: Any, inputs: tuple[Tensor, int, bool, bool], output: Tensor) -> None:
    ctx.layer = inputs[1]


def _pass_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.modelhealth.see_gradient(gradient, ctx.layer), None, None, None


see.register_autograd(_pass_gradient, setup_context=_remember_layer)
