"""TorchScript: its inner layers are seen by operators that a copy of its code calls."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.capture.step.run import run_step
from pytest_modelhealth.report import Observation

_INDEX, _CLOCK = "modelhealth_index", "modelhealth_clock"
_ATTRIBUTES = {_INDEX: torch._C.IntType.get(), _CLOCK: torch._C.TensorType.get()}
_NOTE = (
    "a copy of the script was run, with an operator at every layer's input and output: gradients "
    "are the script's own up to rounding, and functional layers are not seen"
)


class ScriptEngine(Engine):
    """Scripts and traces, from memory or from a file.

    The copy has code of its own, and the parameters and buffers of the model. A script that cannot
    be saved cannot be copied: its inner layers are `opaque`.
    """

    precedence = 1
    shows_functions: ClassVar[bool] = False
    why_not_measured: ClassVar[str] = (
        "the costs of a script are not measured, as it calls no hooks that would tell its layers "
        "apart; the module that it was made of has them"
    )

    def supports(self, model: object) -> bool:
        """Whether `model` as a whole is TorchScript."""
        return isinstance(model, torch.jit.ScriptModule)

    def run(self, request: Request) -> Observation:
        """Run the batch through the copy; nothing of the model itself runs."""
        try:
            copied = _copy(request.model)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            note = f"inside the script nothing was observed, since it cannot be saved: {reason}"
            return run_step(request, request.model, [note])
        hidden = _show_layers(copied)
        return run_step(request, copied, [_NOTE], watch=partial(_observed, hidden=hidden))


def _copy(model: nn.Module) -> nn.Module:
    """Return the script with code of its own on the same parameters, buffers and hooks.

    Only one that was saved and loaded has its own: a deep copy shares it with the original.
    """
    file = io.BytesIO()
    torch.jit.save(model, file)
    file.seek(0)
    copied: nn.Module = torch.jit.load(file)
    vars(copied).update({name: value for name, value in vars(model).items() if "_hooks" in name})
    originals = dict(model.named_modules())
    for name, module in copied.named_modules():
        original = originals[name]
        for own, tensor in (*original._parameters.items(), *original._buffers.items()):
            if tensor is not None:
                module._c.setattr(own, tensor)
    return copied


def _show_layers(model: nn.Module) -> dict[nn.Module, str]:
    """Let the code of each layer call the operators; return the layers where it cannot, and why.

    Layers of one class share their code, so each tells its index by an attribute of its own.
    """
    from pytest_modelhealth.capture.observing import operators  # noqa: F401 - defines them

    clock = torch.zeros((), dtype=torch.int64)
    why_hidden: dict[tuple[str, str], str] = {}
    hidden = {}
    for index, module in enumerate(model.modules()):
        script: Any = module._c
        script._register_attribute(_INDEX, _ATTRIBUTES[_INDEX], index)
        script._register_attribute(_CLOCK, _ATTRIBUTES[_CLOCK], clock)
        for method in script._method_names():
            if method.rstrip("0123456789") != "forward":  # a trace numbers further calls
                continue
            code = (script._type().qualified_name(), method)
            if code not in why_hidden:
                why_hidden[code] = _show(script._get_method(method).graph)
            if why_hidden[code]:
                hidden[module] = why_hidden[code]
    return hidden


def _show(graph: Any) -> str:
    """Let one layer's code call the operators; return why that is impossible, if it is."""
    this, *inputs = graph.inputs()
    (output,) = graph.outputs()
    kind = output.type()
    is_tuple = kind.kind() == "TupleType"
    # code that was compiled from Python, rather than traced, names its file
    has_source = any(node.sourceRange().lstrip().startswith("File") for node in graph.nodes())
    if is_tuple and not has_source:
        return "it is traced, and its trace returns inner values along with its output"
    parts = kind.elements() if is_tuple else [kind]
    if not any(map(_is_tensor, parts)):
        return f"TorchScript runs it, and its output is no tensor but {kind}"

    inputs = [value for value in inputs if _is_tensor(value.type())]
    graph.setInsertPoint(next(iter(graph.nodes()), graph.return_node()))
    index, clock = _attribute(graph, this, _INDEX), _attribute(graph, this, _CLOCK)
    for place, value in enumerate(inputs):
        arguments = [value, clock, index, graph.insertConstant(place == 0)]
        _call(graph, "modelhealth::see_input", arguments, [])

    graph.setInsertPoint(graph.return_node())
    values = _call(graph, "prim::TupleUnpack", [output], parts) if is_tuple else [output]
    begins = not inputs
    for place, value in enumerate(values):
        if _is_tensor(value.type()):
            arguments = [value, index, graph.insertConstant(begins), graph.insertConstant(False)]
            (values[place],) = _call(graph, "modelhealth::see_output", arguments, [value.type()])
            begins = False
    (shown,) = _call(graph, "prim::TupleConstruct", values, [kind]) if is_tuple else values
    graph.eraseOutput(0)
    graph.registerOutput(shown)
    return ""


def _attribute(graph: Any, this: Any, name: str) -> Any:
    """Return one of the attributes that each layer has for us."""
    node = graph.create("prim::GetAttr", [this], 1).s_("name", name)
    graph.insertNode(node)
    node.output().setType(_ATTRIBUTES[name])
    return node.output()


def _call(graph: Any, kind: str, inputs: list[Any], types: list[Any]) -> list[Any]:
    """Call an operator; return its outputs, which have these types."""
    node = graph.create(kind, inputs, len(types))
    graph.insertNode(node)
    values = list(node.outputs())
    for value, type_ in zip(values, types, strict=True):
        value.setType(type_)
    return values


def _is_tensor(kind: Any) -> bool:
    return bool(kind.kind() == "TensorType")


@contextmanager
def _observed(recorder: Recorder, hidden: dict[nn.Module, str]) -> Iterator[Hooks]:
    """Let `recorder` see every layer by the operators that its code calls."""
    from pytest_modelhealth.capture.observing.operators import Listener, listening

    hooks = Hooks(recorder)
    layers = list(recorder.by_module.values())
    for module, layer in recorder.by_module.items():
        layer.opaque = hidden.get(module, "")
    with listening(Listener(hooks, layers)):
        yield hooks
