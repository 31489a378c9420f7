"""The report as a table for the terminal: its `str`."""

from __future__ import annotations

from pytest_modelhealth.rendering.summary import document
from pytest_modelhealth.report import HealthReport


def render(report: HealthReport, *, max_rows: int | None = None, width: int = 100) -> str:
    """Return the verdict and a line a layer in execution order, each violation below its layer.

    ``!`` marks a layer with a violation, ``~`` one with a consequence of another's.

    Args:
        report: the report.
        max_rows: show at most this many layers, the violated ones first; ``None`` shows all.
        width: characters that the table may take. Names are cut to fit, numbers never.
    """
    return document(report, max_rows).text(width=width)
