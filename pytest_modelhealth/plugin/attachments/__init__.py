"""The shelf of destinations: each registered where it is asked for.

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

from pytest_modelhealth.plugin.inspections import is_report

if TYPE_CHECKING:
    from pytest_modelhealth.checks import Check
    from pytest_modelhealth.runs.run import Run


class Evidence:
    """What the destinations share: each part is rendered when one asks, and once.

    Args:
        report: the unhealthy report, or the comparison that failed.
        explains_failure: whether the test failed because of it; else the test's own exception
            stands, and this is what else was wrong.
    """

    def __init__(self, report: Any, *, explains_failure: bool) -> None:
        self.report = report
        self.explains_failure = explains_failure
        self._is_report = is_report(report)

    @cached_property
    def verdict(self) -> str:
        """That of the report; of a comparison ``"different"`` or ``"equivalent"``."""
        if self._is_report:
            return str(self.report._judgement.verdict.value)
        return "equivalent" if self._worst is None else "different"

    @cached_property
    def _worst(self) -> Any:
        if not self._is_report:
            return self.report.first_divergence
        judgement = self.report._judgement
        return next(iter((*judgement.violations, *judgement.inconclusive)), None)

    @cached_property
    def culprit(self) -> str:
        """The layer that is worst, or where two models part; empty where none is at fault."""
        from pytest_modelhealth.rendering.notation import printable

        if self._worst is None:
            return ""
        if not self._is_report:
            return printable(self._worst.label)
        return str(self._rendered("summary", "label", self._worst.layer))

    @property
    def check(self) -> str:
        """The check that found it, or ``"comparison"``; empty where nothing is wrong."""
        if self._worst is None:
            return ""
        return str(self._worst.check) if self._is_report else "comparison"

    @cached_property
    def failure_text(self) -> str:
        """What a failure says, whether the test failed by it or not."""
        form = ("failure", "render") if self._is_report else ("comparison", "failure")
        return str(self._rendered(*form))

    @cached_property
    def json(self) -> str:
        """All numbers, as strict JSON."""
        form = ("json", "render") if self._is_report else ("comparison", "to_json")
        return str(self._rendered(*form))

    @cached_property
    def title(self) -> str:
        """Of `text`: ``"conv2 beside conv1"``, ``"conv2 through depth"``."""
        if not self._is_report:
            return f"{self.culprit} through depth"
        found = self._rendered("evidence", "culprit_and_predecessor")
        records = (found.culprit, found.predecessor) if found else ()
        labels = [self._rendered("summary", "label", record.name) for record in records if record]
        return " beside ".join(labels) or "evidence"

    @cached_property
    def text(self) -> str:
        """Text histograms; empty where there is nothing more than the failure says."""
        if not self._is_report or self._rendered("evidence", "culprit_and_predecessor") is None:
            return ""
        return str(self._rendered("evidence", "render"))

    @cached_property
    def figures(self) -> dict[str, bytes]:
        """PNG files by name, such as ``"culprit"`` and ``"gradient_flow"``; what exists."""
        pictures = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, figure in self._rendered("figures", "figures").items():  # brings matplotlib
                figure.savefig(buffer := io.BytesIO(), format="png")
                pictures[name] = buffer.getvalue()
        return pictures

    def _rendered(self, form: str, function: str, *arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():  # under -W error, one would cost the user the evidence
            warnings.simplefilter("ignore")
            return self.report._renderer(form, function)(self.report, *arguments, **options)


EVIDENCE = pytest.StashKey[tuple[Evidence, str]]()
"""The first evidence of a failing test, and the phase that it failed in; until it has ended."""


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


@pytest.hookspec
def pytest_modelhealth_checks() -> list[type[Check]]:  # type: ignore[empty-body]
    """Return a project's own checks: subclasses of `pytest_modelhealth.Check`.

    It is called once, before options are parsed, so that each setting of these checks can
    be set too: in a plugin, in the root folder's ``conftest.py``, or in that of a folder which
    pytest is started on.
    """
