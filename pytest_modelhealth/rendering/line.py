"""The report in one line: its `repr`."""

from __future__ import annotations

from pytest_modelhealth.rendering.notation import plural, printable
from pytest_modelhealth.rendering.summary import counts, headline
from pytest_modelhealth.report import HealthReport


def render(report: HealthReport) -> str:
    """Return verdict, worst layer and counts. Never raises: debuggers and logs call `repr`."""
    try:
        return f"<HealthReport {headline(report)}; {counts(report)}>"
    except Exception as error:  # noqa: BLE001 - a check may raise anything, repr may not
        reason = f"{type(error).__name__}: {printable(str(error))}"
        return f"<HealthReport not judged ({reason}); {plural(len(report), 'layer')}>"
