"""The report as a table for the terminal: its `str`."""

from __future__ import annotations

from pytest_modelhealth.rendering.notation import plural, printable, table
from pytest_modelhealth.rendering.summary import (
    by_layer,
    columns,
    consequences,
    headline,
    remarks,
    run,
)
from pytest_modelhealth.report import HealthReport
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
    following = {consequence.layer for v in report.violations for consequence in v.folded}
    gravest = sorted(report.layers, key=lambda name: (name not in found, name not in warned))
    chosen = set(gravest[:max_rows])
    shown = [record for record in report if record.name in chosen]
    lines = [headline(report), run(report), *remarks(report)]
    if not shown:
        return "\n".join(lines)
    shelf = columns(report)
    rows = [["", *(column.title for column in shelf)]]
    for record in shown:
        mark = "!" if record.name in found else "~" if record.name in following else ""
        rows.append([mark, *(column.cell(record) for column in shelf)])
    titles, *body = table(rows, (0, LAYER, TYPE), width=width, narrowest=NARROWEST, names=LAYER)
    lines += ["", titles]
    for record, line in zip(shown, body, strict=True):
        lines.append(line)
        for violation in found.get(record.name, ()):
            text = f"    {violation.check}: {printable(near(violation.message))}"
            folded = f" ({consequences(report, violation)})" if violation.folded else ""
            lines.append(text + folded)
        for violation in warned.get(record.name, ()):
            message = printable(near(violation.message))
            lines.append(f"    warning: {violation.check}: {message}")
    if len(shown) < len(report):
        lines.append(f"  ... and {plural(len(report) - len(shown), 'more layer')}")
    return "\n".join(lines)
