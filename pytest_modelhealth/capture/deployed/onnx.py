"""ONNX models through onnxruntime, where the user has it.

A model runs as it is for its outputs, and once more for every value.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pytest_modelhealth.capture.deployed.model import DeployedEngine
from pytest_modelhealth.capture.deployed.onnx_graph import from_array, program_of
from pytest_modelhealth.capture.deployed.program import Program, Ran, Runtime
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.errors import InspectionError

_WITHOUT_GRAPH = (
    "an ONNX model without its graph: inputs and outputs alone are seen; give the file or the "
    "onnx.ModelProto, with onnx installed, to see its layers"
)
_EXTERNAL = "session.model_external_initializers_file_folder_path"


class OnnxRuntime(Runtime):
    """An ONNX model that onnxruntime runs.

    Args:
        model: a file, an ``onnx.ModelProto``, a ``torch.onnx.ONNXProgram`` or a session; of a
            session without its graph, the outputs alone are seen.

    Raises:
        InspectionError: onnxruntime is not installed, there is no such file, or it cannot be run.
    """

    def __init__(self, model: Any) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise InspectionError(
                "an ONNX model is run by onnxruntime: pip install 'pytest-modelhealth[onnx]'"
            ) from None
        self._folder: Path | None = None  # where external data lies
        if isinstance(model, onnxruntime.InferenceSession):
            path = getattr(model, "_model_path", None)
            is_file = path is not None and Path(path).is_file()
            self._plain = model
            source = path if is_file else getattr(model, "_model_bytes", None)
            self._proto, self._folder = _read(source)
        elif isinstance(model, str | Path):
            if not Path(model).is_file():
                raise InspectionError(f"there is no ONNX file {str(model)!r}")
            self._plain = _session(str(model), f"{str(model)!r}")
            self._proto, self._folder = _read(model)
        else:
            self._proto = getattr(model, "model_proto", model)
            self._plain = _session(self._proto.SerializeToString(), "the ONNX model")

    @cached_property
    def program(self) -> Program:
        """What it runs."""
        if self._proto is None:
            return Program("ONNX", unlisted=_WITHOUT_GRAPH)
        return program_of(self._proto, self._folder)

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
        try:
            outputs = _run(self._plain, arrays)
        except Exception as error:
            if type(error).__name__ != "InvalidArgument":
                raise
            raise InspectionError(
                f"onnxruntime does not take the batch: {_reason(error)}; give such a batch, or "
                "export the model with dynamic shapes"
            ) from None
        every = _run(self._whole, arrays) if self._proto is not None else {}
        output = tuple(outputs.values())
        return Ran(
            operations=self.program.operations,
            inputs=tuple(given),
            outputs=tuple(outputs),
            values=given | every | outputs,
            output=output[0] if len(output) == 1 else output,
        )

    def _named(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return the tensors of a batch by the names of the inputs that they fill.

        Raises:
            InspectionError: they do not.
        """
        wanted = [node.name for node in self._plain.get_inputs()]
        given = {n: value for n, value in inputs.kwargs.items() if isinstance(value, Tensor)}
        free = [name for name in wanted if name not in given]
        given |= dict(zip(free, find_tensors(inputs.args), strict=False))
        if set(given) != set(wanted):
            raise InspectionError(
                f"the ONNX model takes {', '.join(map(repr, wanted))}, and the batch has "
                f"{', '.join(map(repr, given)) or 'no tensor'}"
            )
        return {name: given[name] for name in wanted}


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


def _session(source: str | bytes, what: str) -> Any:
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - its errors have no class in common
        raise InspectionError(
            f"onnxruntime {onnxruntime.__version__} cannot load {what}: {_reason(error)}; give the "
            "path of a whole model, with the files of its weights beside it, of an opset and "
            "operators that this onnxruntime has, or a session that has them"
        ) from None


_PREFIX = re.compile(r"(\[ONNXRuntimeError\] : \d+ : \w+ : )?(Load model from .*? failed:)?")


def _reason(error: Exception) -> str:
    """Return what onnxruntime says, without its numbers and the place in its source."""
    said = " ".join(str(error).split())
    said = said.rpartition(") ")[2] if "/onnxruntime_src/" in said else said
    return _PREFIX.sub("", said, count=1).rstrip(".")


def _read(source: str | Path | bytes | None) -> tuple[Any, Path | None]:
    """Return the ``onnx.ModelProto`` of a file or of its content, and where its other files lie."""
    try:
        import onnx
    except ImportError:
        return None, None
    if isinstance(source, bytes):
        return onnx.load_model_from_string(source), None
    path = Path(source or "")
    return (onnx.load(path, load_external_data=False), path.parent) if source else (None, None)


_KINDS = {
    ("onnxruntime", "InferenceSession"),
    ("onnx", "ModelProto"),
    ("torch", "ONNXProgram"),
}


class OnnxEngine(DeployedEngine):
    """ONNX files, models and sessions: each value of the graph is seen, as no gradient is."""

    files: ClassVar[str] = "ONNX files (*.onnx)"
    flat_outputs: ClassVar[bool] = True
    runtime_class: ClassVar[type[Any]] = OnnxRuntime

    def reads(self, model: Any) -> bool:
        """Whether `model` is a path to an ONNX file, an ONNX model, or a session that runs one."""
        if isinstance(model, str | Path):
            return Path(model).suffix == ".onnx"
        kind = type(model)
        return (kind.__module__.partition(".")[0], kind.__name__) in _KINDS
