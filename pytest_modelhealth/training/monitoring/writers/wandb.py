"""Weights & Biases: a run, or the module `wandb` while one is active."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.training.libraries import is_of
from pytest_modelhealth.training.monitoring.writers.sink import Sink

_STEP = "modelhealth/step"


class WeightsAndBiases(Sink):
    """Logs to a run.

    A run refuses rows of a step that it has left behind, and counts steps of its own. So each row
    is logged at the run's step if that is ahead, and charts are drawn over ``modelhealth/step``.
    """

    meant = "a run of wandb"

    def __init__(self, destination: Any) -> None:
        run = destination.run if isinstance(destination, ModuleType) else destination
        if run is None:
            raise InspectionError(
                "to=wandb, but no run is active: call wandb.init() first, or hand over its run"
            )
        super().__init__(run)
        run.define_metric(_STEP, hidden=True)
        run.define_metric("modelhealth/*", step_metric=_STEP)

    @classmethod
    def accepts(cls, destination: object) -> bool:
        """Whether it is a run, or the module."""
        return is_of(destination, "wandb") and hasattr(destination, "log")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a row."""
        run = self._destination
        run.log({**numbers, _STEP: step}, step=max(step, run.step))
