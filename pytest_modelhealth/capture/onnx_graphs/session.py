"""Loads an ONNX model from wherever the user has it, and runs it with onnxruntime.

It runs as it is for its outputs, and once more for every value.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.deployed.program import Program, Ran, Runtime
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.onnx_graphs.reading import program_of
from pytest_modelhealth.capture.onnx_graphs.weights import from_array
from pytest_modelhealth.capture.step.batch import Inputs
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


_KINDS = {
    ("onnxruntime", "InferenceSession"),
    ("onnx", "ModelProto"),
    ("torch", "ONNXProgram"),
}


def is_onnx(model: Any) -> bool:
    """Whether `model` is a path to an ONNX file, an ONNX model, or a session that runs one."""
    if isinstance(model, str | Path):
        return Path(model).suffix == ".onnx"
    kind = type(model)
    return (kind.__module__.partition(".")[0], kind.__name__) in _KINDS


def load(model: Any) -> OnnxRuntime:
    """Return what runs an ONNX model.

    Raises:
        InspectionError: onnxruntime is not installed, there is no such file, or it cannot be run.
    """
    try:
        import onnxruntime
    except ImportError:
        raise InspectionError(
            "an ONNX model is run by onnxruntime: pip install 'pytest-modelhealth[onnx]'"
        ) from None
    if isinstance(model, onnxruntime.InferenceSession):
        return OnnxRuntime(model, *_model_of(model))
    if isinstance(model, str | Path):
        path = Path(model)
        if not path.is_file():
            raise InspectionError(f"there is no ONNX file {str(model)!r}")
        return OnnxRuntime(_session(str(path), f"{str(path)!r}"), *_read(path))
    proto = getattr(model, "model_proto", model)  # of a torch.onnx.ONNXProgram
    return OnnxRuntime(_session(proto.SerializeToString(), "the ONNX model"), proto, None)


def _session(source: str | bytes, what: str) -> Any:
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - its errors have no class in common
        raise InspectionError(
            f"onnxruntime {onnxruntime.__version__} cannot load {what}: {_reason(error)}; "
            f"{_next_move(error, source)}"
        ) from None


def _next_move(error: Exception, source: str | bytes) -> str:
    """Return what to do about a model that onnxruntime cannot load."""
    said = str(error)
    if type(error).__name__ == "InvalidProtobuf" or "No graph was found" in said:
        return "it is no ONNX model, or not all of one: export or copy it again"
    missing = _missing_data(source)
    if missing and isinstance(source, str):
        return f"it keeps weights in {missing}, and there is no such file: put it beside the model"
    if missing:
        return f"it keeps weights in {missing}, which were not loaded: give the path of its file"
    if "not a registered function/op" in said or "No Op registered" in said:
        return (
            "give an onnxruntime.InferenceSession that has the operator, by "
            "SessionOptions.register_custom_ops_library, or export the model without it"
        )
    return "export it with an opset_version that this onnxruntime runs, or install a newer one"


def _missing_data(source: str | bytes) -> str:
    """Return the file with weights that is not where the model expects it, ``""`` for none."""
    proto, folder = _read(Path(source)) if isinstance(source, str) else (_parsed(source), None)
    tensors = proto.graph.initializer if proto is not None else ()
    entries = (entry for tensor in tensors for entry in tensor.external_data)
    places = dict.fromkeys(entry.value for entry in entries if entry.key == "location")
    lost = (place for place in places if folder is None or not (folder / place).is_file())
    return next(map(repr, lost), "")


_PREFIX = re.compile(r"(\[ONNXRuntimeError\] : \d+ : \w+ : )?(Load model from .*? failed:)?")


def _reason(error: Exception) -> str:
    """Return what onnxruntime says, without its numbers and the place in its source."""
    said = str(error).strip().partition("\n")[0]
    said = said.rpartition(") ")[2] if "/onnxruntime_src/" in said else said
    return _PREFIX.sub("", said, count=1).rstrip(".")


def _model_of(session: Any) -> tuple[Any, Path | None]:
    """Return the model that a session was made of, and where its external data lies."""
    path, content = getattr(session, "_model_path", None), getattr(session, "_model_bytes", None)
    if path is not None and Path(path).is_file():
        return _read(Path(path))
    return (_parsed(content), None) if content else (None, None)


def _read(path: Path) -> tuple[Any, Path | None]:
    try:
        import onnx
    except ImportError:
        return None, None
    return onnx.load(path, load_external_data=False), path.parent


def _parsed(content: bytes) -> Any:
    try:
        import onnx
    except ImportError:
        return None
    return onnx.load_model_from_string(content)
