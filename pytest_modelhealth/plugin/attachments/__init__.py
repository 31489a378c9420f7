"""The shelf of destinations: one a file, found by itself.

A destination is a pytest plugin that brings the options and summary lines it needs, and implements
`pytest_modelhealth_attach`, which gets the evidence of each failing test, or
`pytest_modelhealth_wants_run` and `pytest_modelhealth_run_ended`, which get the run as a whole;
``-p no:modelhealth.<name>`` switches it off. A ``conftest.py`` may implement the hooks too.
"""

from __future__ import annotations

import io
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pytest_modelhealth.runs.run import Run


class Evidence:
    """What the destinations share: each part is rendered when one asks, and once.

    Args:
        report: the unhealthy report.
        explains_failure: whether the test failed because of this report; else its own exception
            stands, and this is what else was wrong.
    """

    _drawn_by = "histogram"

    def __init__(self, report: Any, *, explains_failure: bool) -> None:
        self.report = report
        self.explains_failure = explains_failure

    @cached_property
    def title(self) -> str:
        """The culprit and the layer before it: ``"conv2 beside conv1"``."""
        found = self._rendered("evidence", "culprit_and_predecessor")
        records = (found.culprit, found.predecessor) if found else ()
        return (
            " beside ".join(_printable(record.label) for record in records if record) or "evidence"
        )

    @cached_property
    def text(self) -> str:
        """Text histograms of the culprit beside its predecessor; empty where there are none."""
        if self._rendered("evidence", "culprit_and_predecessor") is None:
            return ""
        text: str = self._rendered("evidence", "render")
        return text

    @cached_property
    def figures(self) -> dict[str, bytes]:
        """PNG files by name, such as ``"culprit"`` and ``"gradient_flow"``; what exists."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            figures = self._rendered(self._drawn_by, "figures")  # brings matplotlib
            return {name: _png(figure) for name, figure in figures.items()}

    def _rendered(self, form: str, function: str, **options: Any) -> Any:
        with warnings.catch_warnings():  # under -W error, one would cost the user the evidence
            warnings.simplefilter("ignore")
            return self.report.renderer(form, function)(self.report, **options)


class ComparisonEvidence(Evidence):
    """The same of a comparison that failed: its `report` is the `Comparison`."""

    _drawn_by = "error_depth"

    @cached_property
    def title(self) -> str:
        """The layer where the two models part."""
        found = self.report.first_divergence
        return "names changed" if found is None else f"{_printable(found.label)} through depth"

    @cached_property
    def text(self) -> str:
        """The table of more layers around that one than the failure has; empty where it has all."""
        text: str = self._rendered("comparison", "further", max_rows=40)
        return text


def _printable(text: str) -> str:
    from pytest_modelhealth.rendering.notation import printable

    return printable(text)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


@pytest.hookspec
def pytest_modelhealth_attach(
    item: pytest.Item, report: pytest.TestReport, evidence: Evidence
) -> None:
    """Attach the evidence to the report of a failing test.

    It runs where the test ran, in an xdist worker too. What it sets on `report` crosses to the
    controller and must be plain: None, bool, int, float, str and lists and dicts of them.
    """


@pytest.hookspec
def pytest_modelhealth_wants_run(config: pytest.Config) -> bool | None:
    """Return whether `pytest_modelhealth_run_ended` is to be called; else nothing is recorded."""


@pytest.hookspec
def pytest_modelhealth_run_ended(
    config: pytest.Config, run: Run, terminalreporter: pytest.TerminalReporter
) -> None:
    """Use what all tests of the run inspected; it is called once, not in xdist's workers.

    `run` has what ``docs/reference/run-format.md`` says. Its tests are read from disk one by one,
    so iterate over them and keep none. What is raised costs a line of the summary, and neither the
    result of the run nor the other destinations.
    """
