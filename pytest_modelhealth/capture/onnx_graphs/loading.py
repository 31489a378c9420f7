"""Loads an ONNX model from wherever the user has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pytest_modelhealth.capture.onnx_graphs.session import OnnxRuntime
from pytest_modelhealth.errors import InspectionError

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
