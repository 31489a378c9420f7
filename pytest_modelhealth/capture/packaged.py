"""Packages that AOTInductor compiled: their inputs and outputs, and the names of their layers."""

from __future__ import annotations

from typing import Any, ClassVar

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.pt2.archive import archive_of, is_pt2
from pytest_modelhealth.capture.pt2.package import PackageRuntime, is_package
from pytest_modelhealth.capture.transcript.stand_ins import StandInModel, run_program
from pytest_modelhealth.report import Observation

_NOTE = (
    "an AOTInductor package: inputs and outputs alone are seen; the layers listed are those whose "
    "constants it keeps by name"
)


class PackagedEngine(Engine):
    """What `torch._inductor.aoti_compile_and_package` wrote, as a file or loaded."""

    precedence = 1
    files: ClassVar[str] = "packages of AOTInductor (*.pt2)"
    runs_in_torch: ClassVar[bool] = False
    why_not_measured: ClassVar[str] = (
        "the costs of a compiled package are not measured, as no operation of torch runs; the "
        "module that it was exported from has them"
    )

    def supports(self, model: object) -> bool:
        """Whether `model` is a package, or a path to one; not to an exported program."""
        return is_package(model) or (is_pt2(model) and not archive_of(model).programs)

    def load(self, model: Any) -> StandInModel:
        """Return stand-ins for the layers of a package.

        Raises:
            InspectionError: there is no such file, or it holds nothing that can be run.
        """
        return StandInModel(PackageRuntime(model))

    def run(self, request: Request) -> Observation:
        """Run the batch in the compiled library."""
        return run_program(request, request.model, [_NOTE])
