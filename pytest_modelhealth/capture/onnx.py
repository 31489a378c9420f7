"""ONNX models through onnxruntime, where the user has it."""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_modelhealth.capture.deployed.model import DeployedEngine
from pytest_modelhealth.capture.onnx_graphs.session import OnnxRuntime, is_onnx, load


class OnnxEngine(DeployedEngine):
    """ONNX files, models and sessions: each value of the graph is seen, as no gradient is."""

    precedence = 1
    files: ClassVar[str] = "ONNX files (*.onnx)"
    flat_outputs: ClassVar[bool] = True
    why_not_measured: ClassVar[str] = (
        "the costs of an ONNX model are not measured, as no operation of torch runs; the module "
        "that it was exported from has them"
    )
    runtime_class: ClassVar[type[Any]] = OnnxRuntime

    def reads(self, model: Any) -> bool:
        """Whether `model` is of ONNX."""
        return is_onnx(model)

    def runtime(self, model: Any) -> OnnxRuntime:
        """Return what runs an ONNX model.

        Raises:
            InspectionError: onnxruntime is not installed, there is no such file, or it cannot be
                run.
        """
        return load(model)
