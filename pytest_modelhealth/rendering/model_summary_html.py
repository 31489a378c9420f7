"""The summary of a model as a fragment of HTML, for notebooks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from pytest_modelhealth.rendering.layer_tree import Alike
from pytest_modelhealth.rendering.model_summary_text import COLUMNS, alike, facts, line, selected
from pytest_modelhealth.report import ModelSummary


def fragment(summary: ModelSummary) -> str:
    """Return a self-contained ``<div>``; every name in it is escaped."""
    lines, left_out = selected(summary)
    html: str = _template().render(
        line=line(summary),
        facts=facts(summary),
        notes=summary.notes,
        columns=COLUMNS,
        lines=[
            {"alike": alike(row).strip(), "depth": row.depth}
            if isinstance(row, Alike)
            else {
                "cells": [column.cell(row).strip() for column in COLUMNS],
                "name": row["label"],
                "reason": row["reason"],
                "depth": row["depth"],
            }
            for row in lines
        ],
        left_out=left_out,
    )
    return html


@cache
def _template() -> Template:
    folder = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined)
    return environment.get_template("model_summary.html")
