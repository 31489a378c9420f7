"""Compiled modules, observed as they run compiled: ``Inspector(model, compiled="observe")``."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from pytest_modelhealth.capture.eager import is_compiled
from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.recorder import Recorder
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
            _compile(memo[id(module)], _compiler(module))
            inside.update(module.modules())
    return result


def _compiler(module: nn.Module) -> Any:
    """Return the context in which dynamo keeps what `torch.compile` was called with."""
    context = getattr(module, "dynamo_ctx", None)
    if context is None:
        closure = getattr(module._compiled_call_impl, "__closure__", None) or ()
        contents = (cell.cell_contents for cell in closure)
        context = next((c for c in contents if hasattr(c, "_dynamic")), None)
    if not hasattr(context, "callback"):
        raise InspectionError(
            f"cannot tell how {type(module).__name__} was compiled with torch {torch.__version__}; "
            'leave out compiled="observe" to inspect it as it runs uncompiled'
        )
    return context


def _backend(callback: Any) -> Any:
    """Return what `torch.compile` was given as backend, out of what dynamo wraps around it."""
    # the second name is that of torch 2.8
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
        while hasattr(callback, name):
            callback = getattr(callback, name)
    return callback


_numbers = itertools.count()


def _compile(module: nn.Module, context: Any) -> None:
    """Compile `module`, its hooks included, as `context` says."""
    backend = _backend(context.callback)

    def compile_and_note_lines(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        from pytest_modelhealth.capture.observing.operators import note_lines

        note_lines(graph.graph)
        return backend(graph, inputs, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # what dynamo learns of shapes it keeps by the name of the code, and the code it makes by the
    # code object
    code = call.__code__.replace(co_name=f"inspected_{next(_numbers)}")
    function = FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    vars(module)["_compiled_call_impl"] = torch.compile(
        function,
        backend=compile_and_note_lines,
        dynamic=getattr(context, "_dynamic", None),
    )


@contextmanager
def _observed(recorder: Recorder) -> Iterator[Hooks]:
    """Let `recorder` see every layer of its modules by operators that are compiled with them."""
    from pytest_modelhealth.capture.observing.operators import Listener, listening

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
        with listening(Listener(hooks, layers)):
            yield hooks
    finally:
        for handle in handles:
            handle.remove()


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


KINDS = (CompiledEngine,)
