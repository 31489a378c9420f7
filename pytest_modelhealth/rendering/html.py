"""The report as a fragment of HTML, for notebooks and HTML test reports."""

from __future__ import annotations

from pytest_modelhealth.rendering.summary import document
from pytest_modelhealth.report import HealthReport


def render(report: HealthReport) -> str:
    """Return a self-contained ``<div>``; every name and message in it is escaped."""
    return document(report).html()
