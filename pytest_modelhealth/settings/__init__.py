"""Thresholds and other settings, and where each value came from.

A setting has one name everywhere: keyword of `Inspector` and of the `modelhealth` marker, ini
option ``modelhealth_<name>``, command line option ``--modelhealth-set NAME=VALUE``. Layers of
values lie over each other, default < ini < option < marker < call, and each value keeps its origin,
so that a failure can say which line set the limit. This package imports neither torch nor pytest.
"""

from pytest_modelhealth.settings.choices import (
    APPLICABLE,
    AUTOMATIC,
    SEVERITIES,
    DtypeName,
    LayerLimit,
    Severity,
    SeverityRule,
)
from pytest_modelhealth.settings.setting import (
    Count,
    Factor,
    Limit,
    Ratio,
    Setting,
    SettingValue,
    Share,
)
from pytest_modelhealth.settings.settings import LAYERS, Settings

__all__ = [
    "APPLICABLE",
    "AUTOMATIC",
    "LAYERS",
    "SEVERITIES",
    "Count",
    "DtypeName",
    "Factor",
    "LayerLimit",
    "Limit",
    "Ratio",
    "Setting",
    "SettingValue",
    "Settings",
    "Severity",
    "SeverityRule",
    "Share",
]
