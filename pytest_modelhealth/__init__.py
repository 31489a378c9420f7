"""Unit tests for the inside of a PyTorch model.

The public names load on first use: importing this package imports neither torch nor matplotlib,
because pytest does so at every start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_modelhealth.capture import Inputs
    from pytest_modelhealth.checks import Check
    from pytest_modelhealth.comparing import compare
    from pytest_modelhealth.comparison.comparison import Comparison
    from pytest_modelhealth.errors import (
        InspectionError,
        LayerNotFoundError,
        ModelHealthError,
        ModelHealthWarning,
        SettingsError,
        UnknownNameError,
    )
    from pytest_modelhealth.inspector import Inspector
    from pytest_modelhealth.plugin.suite.suite import ModelHealthSuite, modelhealth_suite
    from pytest_modelhealth.removal.result import RemovableUnits
    from pytest_modelhealth.report import (
        Finding,
        HealthReport,
        Inconclusive,
        LayerRecord,
        ModelSummary,
        Observation,
        Status,
        Verdict,
        Violation,
    )
    from pytest_modelhealth.report.parts import RemovableLayer
    from pytest_modelhealth.settings import Setting, Settings
    from pytest_modelhealth.statistics import TensorStatistics
    from pytest_modelhealth.training.monitoring.history import History
    from pytest_modelhealth.training.monitoring.monitor import TrainingMonitor
    from pytest_modelhealth.training.monitoring.row import StepRow

__version__ = "0.1.0"

_HOMES = {
    "Comparison": "comparison.comparison",
    "Check": "checks",
    "Finding": "report",
    "HealthReport": "report",
    "History": "training.monitoring.history",
    "Inconclusive": "report",
    "InspectionError": "errors",
    "Inputs": "capture",
    "Inspector": "inspector",
    "LayerNotFoundError": "errors",
    "LayerRecord": "report",
    "ModelHealthError": "errors",
    "ModelHealthSuite": "plugin.suite.suite",
    "ModelHealthWarning": "errors",
    "ModelSummary": "report",
    "Observation": "report",
    "RemovableLayer": "report.parts",
    "RemovableUnits": "removal.result",
    "Setting": "settings",
    "Settings": "settings",
    "SettingsError": "errors",
    "Status": "report",
    "StepRow": "training.monitoring.row",
    "TensorStatistics": "statistics",
    "TrainingMonitor": "training.monitoring.monitor",
    "UnknownNameError": "errors",
    "Verdict": "report",
    "Violation": "report",
    "compare": "comparing",
    "modelhealth_suite": "plugin.suite.suite",
}

__all__ = [
    "Check",
    "Comparison",
    "Finding",
    "HealthReport",
    "History",
    "Inconclusive",
    "Inputs",
    "InspectionError",
    "Inspector",
    "LayerNotFoundError",
    "LayerRecord",
    "ModelHealthError",
    "ModelHealthSuite",
    "ModelHealthWarning",
    "ModelSummary",
    "Observation",
    "RemovableLayer",
    "RemovableUnits",
    "Setting",
    "Settings",
    "SettingsError",
    "Status",
    "StepRow",
    "TensorStatistics",
    "TrainingMonitor",
    "UnknownNameError",
    "Verdict",
    "Violation",
    "compare",
    "modelhealth_suite",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_modelhealth.wings import wing

    return wing(f"{_HOMES[name]}:{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
