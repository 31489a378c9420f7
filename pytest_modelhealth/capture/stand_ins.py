"""Stand-ins that were loaded before: what a replay or a copy of an inspector's model runs again."""

from __future__ import annotations

from typing import ClassVar

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.transcript.stand_ins import StandInModel, run_program
from pytest_modelhealth.report import Observation


class StandInEngine(Engine):
    """The stand-ins for the layers of a model that another runtime runs."""

    precedence = 3
    runs_in_torch: ClassVar[bool] = False
    why_not_measured: ClassVar[str] = (
        "the costs of a model that another runtime runs are not measured; the module that it was "
        "made of has them"
    )

    def supports(self, model: object) -> bool:
        """Whether `model` was loaded by another engine."""
        return isinstance(model, StandInModel)

    def run(self, request: Request) -> Observation:
        """Run the batch in the runtime, and play it back."""
        return run_program(request, request.model, [])
