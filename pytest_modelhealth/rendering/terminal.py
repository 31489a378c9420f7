"""The report as a table for the terminal: its `str`."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_modelhealth.rendering.notation import (
    abbreviate,
    fitted_widths,
    plural,
    printable,
    shorten,
    table,
)
from pytest_modelhealth.rendering.summary import (
    by_layer,
    columns,
    consequences,
    headline,
    remarks,
    run,
)
from pytest_modelhealth.report import HealthReport, Violation
from pytest_modelhealth.report.flow import near

LAYER, TYPE = 1, 2
NARROWEST = ((TYPE, 12), (LAYER, 28), (TYPE, 8), (LAYER, 16))
"""What gives way when the table is too wide, in this order, and how far."""


def render(report: HealthReport, *, max_rows: int | None = None, width: int = 100) -> str:
    """Return the verdict and a line a layer in execution order, each violation below its layer.

    ``!`` marks a layer with a violation, ``~`` one with a consequence of another's.

    Args:
        report: the report.
        max_rows: show at most this many layers, the violated ones first; ``None`` shows all.
        width: characters that the table may take. Names are cut to fit, numbers never.
    """
    found, warned = by_layer(report.violations), by_layer(report.warnings)
    shown = _shown(report, max_rows)
    head = [headline(report), run(report), *remarks(report)]
    if not shown:
        return "\n".join(head)
    titles, *rows = _table(report, shown, width)
    body = [titles]
    for name, row in zip(shown, rows, strict=True):
        body.append(row)
        body += [_line(report, violation) for violation in found.get(name, ())]
        body += [
            f"    warning: {violation.check}: {printable(near(violation.message))}"
            for violation in warned.get(name, ())
        ]
    if len(shown) < len(report):
        body.append(f"  ... and {plural(len(report) - len(shown), 'more layer')}")
    return "\n".join([*head, "", *body])


def _line(report: HealthReport, violation: Violation) -> str:
    text = f"    {violation.check}: {printable(near(violation.message))}"
    return f"{text} ({consequences(report, violation)})" if violation.folded else text


def _shown(report: HealthReport, max_rows: int | None) -> list[str]:
    """Return the names of the layers to show, in execution order."""
    if max_rows is None:
        return list(report.layers)
    found, warned = by_layer(report.violations), by_layer(report.warnings)
    chosen = set(
        sorted(report.layers, key=lambda name: (name not in found, name not in warned))[:max_rows]
    )
    return [name for name in report.layers if name in chosen]


def _table(report: HealthReport, shown: Sequence[str], width: int) -> list[str]:
    found = by_layer(report.violations)
    following = {consequence.layer for v in report.violations for consequence in v.folded}
    shelf = columns(report)
    rows = [["", *(column.title for column in shelf)]]
    for name in shown:
        record = report.layers[name]
        mark = "!" if name in found else "~" if name in following else ""
        rows.append([mark, *(column.cell(record) for column in shelf)])
    return table(_fitted(rows, width), left=(0, LAYER, TYPE))


def _fitted(rows: list[list[str]], width: int) -> list[list[str]]:
    widths = fitted_widths(rows, width, NARROWEST)
    cut_layer, cut_type = widths[LAYER], widths[TYPE]
    return [
        [mark, abbreviate(name, cut_layer), shorten(kind, cut_type), *numbers]
        for mark, name, kind, *numbers in rows
    ]
