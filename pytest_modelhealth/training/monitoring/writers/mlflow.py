"""MLflow: the module, a run, or a client while a run is active."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.training.libraries import is_of
from pytest_modelhealth.training.monitoring.writers.sink import Sink

_MOST = 1000
"""Metrics that a server takes in one request."""


class MLflow(Sink):
    """Logs metrics to a run, which stays the same although another becomes active.

    The module begins a run at the first row where none is active, as `mlflow.log_metrics` does.
    """

    meant = "the module mlflow, one of its runs, or an MlflowClient"

    def __init__(self, destination: Any) -> None:
        super().__init__(destination)
        self._run = getattr(getattr(destination, "info", None), "run_id", None) or _active_run()
        if self._run is None and hasattr(destination, "log_batch"):
            raise InspectionError(
                "to is an MlflowClient, and no run is active: call mlflow.start_run() first, or "
                "hand over a function: to=lambda step, numbers: client.log_metric(...)"
            )

    @classmethod
    def accepts(cls, destination: object) -> bool:
        """Whether it is the module, a run or a client."""
        if not is_of(destination, "mlflow"):
            return False
        return any(hasattr(destination, name) for name in ("log_metrics", "log_batch", "info"))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log each number as a metric."""
        metrics = {_FORBIDDEN.sub("_", name): value for name, value in numbers.items()}
        if hasattr(self._destination, "log_batch"):
            self._write_by_client(step, metrics)
            return
        is_module = isinstance(self._destination, ModuleType)
        mlflow: Any = self._destination if is_module else sys.modules["mlflow"]
        if self._run is None:
            mlflow.log_metrics(metrics, step=step)
            self._run = _active_run()
        else:
            mlflow.log_metrics(metrics, step=step, run_id=self._run)

    def _write_by_client(self, step: int, metrics: Mapping[str, float]) -> None:
        make: Any = sys.modules["mlflow"].entities.Metric
        now = int(time.time() * 1000)
        listed = [make(name, value, now, step) for name, value in metrics.items()]
        for start in range(0, len(listed), _MOST):
            self._destination.log_batch(self._run, metrics=listed[start : start + _MOST])


_FORBIDDEN = re.compile(r"[^\w\-. /]")


def _active_run() -> str | None:
    run = sys.modules["mlflow"].active_run() if "mlflow" in sys.modules else None
    return None if run is None else str(run.info.run_id)
