"""ONNX models through onnxruntime, where the user has it."""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.onnx_graphs.loading import is_onnx, load
from pytest_modelhealth.capture.transcript.stand_ins import StandInModel, run_program
from pytest_modelhealth.report import Observation

_NOTES = {
    True: "layers are seen in a run of onnxruntime that gives out each value, the outputs in one "
    "that may fuse operations",
    False: "an ONNX model without its graph: inputs and outputs alone are seen; give the file "
    "or the onnx.ModelProto, with onnx installed, to see its layers",
}


class OnnxEngine(Engine):
    """ONNX files, models and sessions: each value of the graph is seen, as no gradient is."""

    precedence = 1
    files: ClassVar[str] = "ONNX files (*.onnx)"
    runs_in_torch: ClassVar[bool] = False
    flat_outputs: ClassVar[bool] = True
    why_not_measured: ClassVar[str] = (
        "the costs of an ONNX model are not measured, as no operation of torch runs; the module "
        "that it was exported from has them"
    )

    def supports(self, model: object) -> bool:
        """Whether `model` is of ONNX."""
        return is_onnx(model)

    def load(self, model: Any) -> StandInModel:
        """Return stand-ins for the layers of an ONNX model.

        Raises:
            InspectionError: onnxruntime is not installed, there is no such file, or it cannot be
                run.
        """
        return StandInModel(load(model))

    def run(self, request: Request) -> Observation:
        """Run the batch in onnxruntime, as it is for the outputs and once more for every value."""
        return run_program(request, request.model, [_NOTES[bool(request.model.program.nodes)]])
