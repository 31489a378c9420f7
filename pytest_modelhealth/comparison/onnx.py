"""ONNX models through onnxruntime, where the user has it: their outputs, no layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture import Inputs
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.errors import InspectionError


def is_onnx(model: Any) -> bool:
    """Whether `model` is a path to an ONNX file, an ONNX model, or a session that runs one."""
    if isinstance(model, str | Path):
        return Path(model).suffix == ".onnx"
    kind = type(model)
    home = kind.__module__.partition(".")[0]
    return (home, kind.__name__) in {
        ("onnxruntime", "InferenceSession"),
        ("onnx", "ModelProto"),
        ("torch", "ONNXProgram"),
    }


def load(model: Any) -> Any:
    """Return an onnxruntime session for an ONNX model on the CPU.

    Raises:
        InspectionError: onnxruntime is not installed, or there is no such file.
    """
    if hasattr(model, "run") and hasattr(model, "get_inputs"):
        return model
    try:
        import onnxruntime
    except ImportError:
        raise InspectionError(
            "comparing with an ONNX model needs onnxruntime: pip install onnxruntime"
        ) from None
    if isinstance(model, str | Path) and not Path(model).is_file():
        raise InspectionError(f"there is no ONNX file {str(model)!r}")
    proto = getattr(model, "model_proto", model)  # of a torch.onnx.ONNXProgram
    source = str(model) if isinstance(model, str | Path) else proto.SerializeToString()
    return onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])


def run(session: Any, inputs: Inputs) -> Any:
    """Return the outputs of a session, as tensors: one, or a tuple.

    Raises:
        InspectionError: the batch does not fill the model's inputs.
    """
    names = [node.name for node in session.get_inputs()]
    given = {name: value for name, value in inputs.kwargs.items() if isinstance(value, Tensor)}
    free = [name for name in names if name not in given]
    given |= dict(zip(free, find_tensors(inputs.args), strict=False))
    if set(given) != set(names):
        raise InspectionError(
            f"the ONNX model takes {', '.join(map(repr, names))}, and the batch has "
            f"{', '.join(map(repr, given)) or 'no tensor'}"
        )
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in given.items()}
    outputs = tuple(torch.from_numpy(array.copy()) for array in session.run(None, arrays))
    return outputs[0] if len(outputs) == 1 else outputs
