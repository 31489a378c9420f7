"""Unit tests for the inside of a PyTorch model.

The public names load on first use: importing this package imports neither torch nor matplotlib,
because pytest does so at every start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_modelhealth.capture import Inputs as Inputs
    from pytest_modelhealth.checks import Check as Check
    from pytest_modelhealth.comparing import compare as compare
    from pytest_modelhealth.comparison.comparison import Comparison as Comparison
    from pytest_modelhealth.errors import InspectionError as InspectionError
    from pytest_modelhealth.errors import LayerNotFoundError as LayerNotFoundError
    from pytest_modelhealth.errors import ModelHealthError as ModelHealthError
    from pytest_modelhealth.errors import ModelHealthWarning as ModelHealthWarning
    from pytest_modelhealth.errors import SettingsError as SettingsError
    from pytest_modelhealth.errors import UnknownNameError as UnknownNameError
    from pytest_modelhealth.inspector import Inspector as Inspector
    from pytest_modelhealth.plugin.suite.suite import ModelHealthSuite as ModelHealthSuite
    from pytest_modelhealth.plugin.suite.suite import modelhealth_suite as modelhealth_suite
    from pytest_modelhealth.removal.result import RemovableUnits as RemovableUnits
    from pytest_modelhealth.report import Finding as Finding
    from pytest_modelhealth.report import HealthReport as HealthReport
    from pytest_modelhealth.report import Inconclusive as Inconclusive
    from pytest_modelhealth.report import LayerRecord as LayerRecord
    from pytest_modelhealth.report import ModelSummary as ModelSummary
    from pytest_modelhealth.report import Observation as Observation
    from pytest_modelhealth.report import Status as Status
    from pytest_modelhealth.report import Verdict as Verdict
    from pytest_modelhealth.report import Violation as Violation
    from pytest_modelhealth.report.parts import RemovableLayer as RemovableLayer
    from pytest_modelhealth.settings import Setting as Setting
    from pytest_modelhealth.settings import Settings as Settings
    from pytest_modelhealth.statistics import TensorStatistics as TensorStatistics
    from pytest_modelhealth.training.monitoring.history import History as History
    from pytest_modelhealth.training.monitoring.monitor import TrainingMonitor as TrainingMonitor
    from pytest_modelhealth.training.monitoring.row import StepRow as StepRow

__version__ = "0.1.0"

_NAMES = {
    "capture": "Inputs",
    "checks": "Check",
    "comparing": "compare",
    "comparison.comparison": "Comparison",
    "errors": "InspectionError LayerNotFoundError ModelHealthError ModelHealthWarning "
    "SettingsError UnknownNameError",
    "inspector": "Inspector",
    "plugin.suite.suite": "ModelHealthSuite modelhealth_suite",
    "removal.result": "RemovableUnits",
    "report": "Finding HealthReport Inconclusive LayerRecord ModelSummary Observation "
    "Status Verdict Violation",
    "report.parts": "RemovableLayer",
    "settings": "Setting Settings",
    "statistics": "TensorStatistics",
    "training.monitoring.history": "History",
    "training.monitoring.monitor": "TrainingMonitor",
    "training.monitoring.row": "StepRow",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_modelhealth.wings import wing

    return wing(f"{_HOMES[name]}:{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
