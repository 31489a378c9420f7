"""Runs an ONNX model with onnxruntime: as it is for its outputs, and once more for every value."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.onnx_graphs.reading import program_of
from pytest_modelhealth.capture.onnx_graphs.values import from_array
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.deployed.program import Program, Ran, Runtime
from pytest_modelhealth.errors import InspectionError

_DTYPES = {
    f"tensor({name})": dtype
    for name, dtype in {
        "bool": torch.bool,
        "bfloat16": torch.bfloat16,
        "double": torch.float64,
        "float": torch.float32,
        "float16": torch.float16,
        "int32": torch.int32,
        "int64": torch.int64,
        "int8": torch.int8,
        "uint8": torch.uint8,
    }.items()
}
_NOTE = (
    "layers are seen in a run of onnxruntime that gives out each value, the outputs in one that "
    "may fuse operations"
)
_WITHOUT_GRAPH = (
    "an ONNX model without its graph: inputs and outputs alone are seen; give the file or the "
    "onnx.ModelProto, with onnx installed, to see its layers"
)
_EXTERNAL = "session.model_external_initializers_file_folder_path"


class OnnxRuntime(Runtime):
    """An ONNX model that onnxruntime runs.

    Args:
        plain: the session that gives the outputs.
        proto: the model; ``None`` where it cannot be had, and the outputs alone are seen.
        folder: where its external data lies, if it has any.
    """

    def __init__(self, plain: Any, proto: Any, folder: Path | None) -> None:
        self._plain = plain
        self._proto = proto
        self._folder = folder

    @cached_property
    def program(self) -> Program:
        """What it runs."""
        if self._proto is not None:
            return replace(program_of(self._proto, self._folder), notes=(_NOTE,))
        inputs, outputs = (
            tuple(value.name for value in values)
            for values in (self._plain.get_inputs(), self._plain.get_outputs())
        )
        return Program("ONNX", (), inputs, outputs, notes=(_WITHOUT_GRAPH,))

    @cached_property
    def _whole(self) -> Any:
        """The session that gives every value."""
        import onnxruntime
        from onnx import ValueInfoProto

        proto = copy.deepcopy(self._proto)
        known = {value.name for value in proto.graph.output}
        made = [name for node in proto.graph.node for name in node.output if name]
        proto.graph.output.extend(ValueInfoProto(name=n) for n in made if n not in known)
        options = onnxruntime.SessionOptions()
        if self._folder is not None:
            options.add_session_config_entry(_EXTERNAL, str(self._folder))
        providers = self._plain.get_providers()
        return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=providers)

    def run(self, inputs: Inputs) -> Ran:
        """Run a batch, for its outputs and for every value."""
        given = self._named(inputs)
        with torch._C.DisableTorchFunction():  # the way to onnxruntime is no code of the model
            arrays = {name: tensor.detach().cpu().numpy() for name, tensor in given.items()}
        values = dict(given)
        if self._proto is not None:
            values |= _run(self._whole, arrays)
        outputs = _run(self._plain, arrays)
        values |= outputs
        output = tuple(outputs.values())
        return Ran(self.program, values, output[0] if len(output) == 1 else output)

    def _named(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the tensors of a batch by the names of the inputs that they fill.

        Raises:
            InspectionError: they do not.
        """
        nodes = self._plain.get_inputs()
        wanted = {node.name: node for node in nodes}
        given = {n: value for n, value in inputs.kwargs.items() if isinstance(value, Tensor)}
        free = [name for name in wanted if name not in given]
        given |= dict(zip(free, find_tensors(inputs.args), strict=False))
        if set(given) != set(wanted):
            raise InspectionError(
                f"the ONNX model takes {', '.join(map(repr, wanted))}, and the batch has "
                f"{', '.join(map(repr, given)) or 'no tensor'}"
            )
        for name, node in wanted.items():
            _ensure_fits(node, given[name])
        return {name: given[name] for name in wanted}


def _ensure_fits(node: Any, tensor: Tensor) -> None:
    """Do nothing if a tensor has the shape and dtype that an input takes.

    Raises:
        InspectionError: it has not.
    """
    wanted, sizes = [size if isinstance(size, int) else "?" for size in node.shape], tensor.shape
    fits = len(sizes) == len(wanted) and all(
        want in ("?", size) for want, size in zip(wanted, sizes, strict=True)
    )
    if not fits:
        raise InspectionError(
            f"the ONNX model takes {node.name!r} of shape {_shape(wanted)}, and the batch has one "
            f"of {_shape(sizes)}: give such a batch, or export the model with dynamic shapes"
        )
    dtype = _DTYPES.get(node.type, tensor.dtype)
    if dtype != tensor.dtype:
        raise InspectionError(
            f"the ONNX model takes {node.name!r} as {dtype}, and the batch has {tensor.dtype}: "
            f"give it {node.name}.to({dtype})"
        )


def _shape(sizes: Any) -> str:
    return "x".join(map(str, sizes)) or "no dimensions"


def _run(session: Any, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a session gives, by name, as far as torch has tensors for it."""
    found = {}
    results = session.run(None, dict(arrays))
    for node, array in zip(session.get_outputs(), results, strict=True):
        try:
            found[node.name] = from_array(array)
        except (AttributeError, TypeError):  # a sequence, a map, text
            continue
    return found
