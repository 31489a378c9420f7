"""The report as a fragment of HTML, for notebooks and HTML test reports."""

from __future__ import annotations

from pytest_modelhealth.rendering.summary import (
    by_layer,
    columns,
    consequences,
    headline,
    remarks,
    run,
)
from pytest_modelhealth.rendering.template import template
from pytest_modelhealth.report import HealthReport, Status


def render(report: HealthReport) -> str:
    """Return a self-contained ``<div>``; every name and message in it is escaped."""
    verdict, _, reason = headline(report).partition(": ")
    found, warned = by_layer(report.violations), by_layer(report.warnings)
    shelf = columns(report)
    rows = [
        {
            "cells": [column.cell(record) for column in shelf],
            "reason": record.reason,
            "observed": record.status is Status.OBSERVED,
            "violations": [(v, consequences(report, v)) for v in found.get(record.name, ())],
            "warnings": warned.get(record.name, ()),
        }
        for record in report
    ]
    html: str = template("report.html").render(
        verdict=verdict,
        reason=reason,
        run=run(report),
        remarks=remarks(report),
        columns=shelf,
        rows=rows,
    )
    return html
