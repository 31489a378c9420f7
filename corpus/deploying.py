"""How a model is brought into the forms that are deployed: one function for each, as one would.

Each takes a model in evaluation mode with the batch that it is traced, exported or calibrated on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_conv_bn_weights

Edit = Callable[[Any], object]
"""Changes what it is given."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what exporters print and warn of to themselves."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="deployed-")


_numbers = itertools.count()


def new_file(suffix: str) -> str:
    """Return the path of a file that is not there yet, and that goes when the process ends."""
    return str(Path(_folder().name) / f"model{next(_numbers)}{suffix}")


def call_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as arguments by position and by name."""
    return ((), dict(inputs)) if isinstance(inputs, dict) else ((inputs,), {})


# ---- TorchScript ---------------------------------------------------------------------------------


def frozen(model: nn.Module, batch: Any = None) -> torch.jit.ScriptModule:
    """Return the model scripted, or where a batch is given traced, and frozen."""
    with quietly():
        made = torch.jit.script(model) if batch is None else torch.jit.trace(model, batch)
        return torch.jit.freeze(made)


def optimised(model: nn.Module) -> torch.jit.ScriptModule:
    """Return the model scripted, frozen and optimised for inference."""
    with quietly():
        return torch.jit.optimize_for_inference(torch.jit.script(model))


# ---- exported programs ---------------------------------------------------------------------------


def exported(model: nn.Module, batch: Any) -> ExportedProgram:
    args, named = call_of(batch)
    with quietly():
        return torch.export.export(model, args, named)


def decomposed(model: nn.Module, batch: Any) -> ExportedProgram:
    """Return the exported program in core ATen operators."""
    with quietly():
        return exported(model, batch).run_decompositions()


def through_file(program: ExportedProgram) -> ExportedProgram:
    path = new_file(".pt2")
    with quietly():
        torch.export.save(program, path)
        return torch.export.load(path)


def rewritten(program: ExportedProgram, edit: Edit) -> ExportedProgram:
    """Return the program after a pass over its graph."""
    edit(program.graph_module.graph)
    program.graph_module.graph.lint()
    program.graph_module.recompile()
    return program


# ---- graphs of torch.fx --------------------------------------------------------------------------


def traced(model: nn.Module, edit: Edit) -> fx.GraphModule:
    """Return the model as a graph of torch.fx after a pass over it."""
    made = fx.symbolic_trace(model)
    edit(made.graph)
    made.graph.lint()
    made.recompile()
    return made


def nodes(graph: fx.Graph, target: Any) -> list[fx.Node]:
    """Return the nodes that call a function."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target == target]


def bypassed(graph: fx.Graph, node: fx.Node, argument: int = 0) -> None:
    """Let whoever reads a node read one of its arguments instead."""
    node.replace_all_uses_with(node.args[argument])
    graph.erase_node(node)


def with_argument(node: fx.Node, number: int, value: Any) -> None:
    """Give a node another argument."""
    node.args = (*node.args[:number], value, *node.args[number + 1 :])


def folded(conv: nn.Conv2d, norm: nn.BatchNorm2d, eps: float | None = None) -> nn.Conv2d:
    """Return a convolution with the batch norm after it folded in."""
    if eps is None:
        return fuse_conv_bn_eval(conv, norm)
    made = copy.deepcopy(conv)
    made.weight, made.bias = fuse_conv_bn_weights(
        *(conv.weight, conv.bias, norm.running_mean, norm.running_var),
        *(eps, norm.weight, norm.bias),
    )
    return made


# ---- ONNX ----------------------------------------------------------------------------------------


def onnx_program(model: nn.Module, batch: Any, **options: Any) -> Any:
    """Return what ``torch.onnx.export(dynamo=True)`` makes."""
    args, named = call_of(batch)
    with quietly():
        return torch.onnx.export(model, args, kwargs=named, dynamo=True, verbose=False, **options)


def onnx_file(model: nn.Module, batch: Any, **options: Any) -> str:
    """Return the path of the file that the exporter over ``torch.export`` makes."""
    path = new_file(".onnx")
    with quietly():
        onnx_program(model, batch, **options).save(path)
    return path


def legacy_file(model: nn.Module, batch: Tensor, **options: Any) -> str:
    """Return the path of the file that the exporter over TorchScript makes."""
    path = new_file(".onnx")
    with quietly():
        torch.onnx.export(model, (batch,), path, dynamo=False, **options)
    return path


def edited(path: str, edit: Edit) -> str:
    """Change the graph in an ONNX file."""
    import onnx

    made = onnx.load(path)
    edit(made.graph)
    onnx.checker.check_model(made)
    onnx.save(made, path)
    return path


def session(path: str) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def operators(graph: Any, kind: str) -> list[Any]:
    """Return the nodes of a kind of operator of an ONNX graph."""
    return [node for node in graph.node if node.op_type == kind]


def set_attribute(node: Any, name: str, value: Any) -> None:
    """Give an ONNX node an attribute, in place of the one it may have."""
    import onnx

    for index, attribute in reversed(list(enumerate(node.attribute))):
        if attribute.name == name:
            del node.attribute[index]
    node.attribute.append(onnx.helper.make_attribute(name, value))


def initializer(graph: Any, name: str) -> Any:
    return next(one for one in graph.initializer if one.name == name)


def replaced_initializer(graph: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Put another array in place of a weight of an ONNX graph."""
    import onnx

    one = initializer(graph, name)
    one.CopyFrom(onnx.numpy_helper.from_array(change(onnx.numpy_helper.to_array(one)), name))


# ---- quantised -----------------------------------------------------------------------------------


def dynamic(model: nn.Module) -> nn.Module:
    """Return the model with its linear layers in int8, scales of activations found in each call."""
    with quietly():
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def static(model: nn.Module, batch: Any, calibration: Any = None) -> fx.GraphModule:
    """Return the model in int8 by torch.fx, calibrated on a batch."""
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    with quietly():
        made = prepare_fx(model, get_default_qconfig_mapping("x86"), (batch,))
        made(batch if calibration is None else calibration)
        return convert_fx(made)


def torchao(model: nn.Module, config: str, **options: Any) -> nn.Module:
    """Quantise the model in place by one of torchao's configurations."""
    with quietly():
        import torchao.quantization as library

        library.quantize_(model, getattr(library, config)(**options))
    return model


def pt2e(model: nn.Module, batch: Any, calibration: Any = None) -> fx.GraphModule:
    """Return the exported model quantised for the inductor backend of x86."""
    with quietly():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        made = prepare_pt2e(exported(model, batch).module(), quantizer)
        made(batch if calibration is None else calibration)
        return convert_pt2e(made)


def repacked(layer: Any, weight: Tensor, bias: Tensor | None) -> None:
    """Give a quantised layer of ``torch.ao`` other weights."""
    layer.set_weight_bias(weight, bias)


# ---- running -------------------------------------------------------------------------------------


def is_onnx(candidate: Any) -> bool:
    """Whether it is an ONNX model: a path, a program of torch's exporter, or a session."""
    return isinstance(candidate, str) or any(
        hasattr(candidate, name) for name in ("model_proto", "get_inputs")
    )


class Session(nn.Module):
    """An ONNX model, from a path, a program or a session, to be called like the model it was."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        import onnxruntime

        if isinstance(source, onnxruntime.InferenceSession):
            self.session = source
        else:
            given = source if isinstance(source, str) else source.model_proto.SerializeToString()
            self.session = session(given)

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor:
        names = [one.name for one in self.session.get_inputs()]
        feed = dict(zip(names, args, strict=False)) | named
        (first, *_) = self.session.run(None, {key: value.numpy() for key, value in feed.items()})
        return torch.from_numpy(first)
