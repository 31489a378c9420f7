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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_modelhealth.errors import InspectionError, SettingsError
from pytest_modelhealth.plugin.inspections import INSPECTOR, is_report
from pytest_modelhealth.plugin.snapshots import SNAPSHOT_CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.figure import Figure

    from pytest_modelhealth.runs.run import Run


class Evidence:
    """What the destinations share: each part is rendered when one asks, and once.

    Args:
        report: the unhealthy report.
        explains_failure: whether the test failed because of this report; else its own exception
            stands, and this is what else was wrong.
    """

    def __init__(self, report: Any, *, explains_failure: bool) -> None:
        self.report = report
        self.explains_failure = explains_failure

    @cached_property
    def verdict(self) -> str:
        """``"unhealthy"``, ``"inconclusive"`` or ``"healthy"``."""
        return str(self.report._judgement.verdict.value)

    @cached_property
    def culprit(self) -> str:
        """The layer that is worst, for people; empty where none is at fault."""
        found = self._worst
        return "" if found is None else str(self._rendered("summary", "label", found.layer))

    @cached_property
    def check(self) -> str:
        """The check that found it."""
        return "" if self._worst is None else str(self._worst.check)

    @cached_property
    def place(self) -> str:
        """``path:line`` of the culprit's call, else of its class; empty where neither is known."""
        if self._worst is None:
            return ""
        places = (self._rendered("places", f"{at}_at", self._worst.layer) for at in _PLACES)
        return next(filter(None, places), "")

    @property
    def _worst(self) -> Any:
        judgement = self.report._judgement
        return next(iter((*judgement.violations, *judgement.inconclusive)), None)

    @cached_property
    def failure_text(self) -> str:
        """What a failure says, whether the test failed by it or not."""
        return str(self._rendered("failure", "render"))

    @cached_property
    def json(self) -> str:
        """All numbers, as strict JSON."""
        return str(self._rendered("json", "render"))

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
            figures = self._rendered("figures", "figures")  # brings matplotlib
            return {name: _png(figure) for name, figure in figures.items()}

    def _rendered(self, form: str, function: str, *arguments: Any, **options: Any) -> Any:
        with warnings.catch_warnings():  # under -W error, one would cost the user the evidence
            warnings.simplefilter("ignore")
            return self.report._renderer(form, function)(self.report, *arguments, **options)


class ComparisonEvidence(Evidence):
    """The same of a comparison that failed: its `report` is the `Comparison`."""

    @cached_property
    def verdict(self) -> str:
        """``"different"`` or ``"equivalent"``."""
        from pytest_modelhealth.comparison.comparison import differs

        return "different" if differs(self.report) else "equivalent"

    @cached_property
    def culprit(self) -> str:
        """The layer where the two models part."""
        found = self.report.first_divergence
        return "" if found is None else _printable(found.label)

    @cached_property
    def check(self) -> str:
        """The word for this kind of result, as no check is behind it; empty where none is wrong."""
        return "" if self.verdict == "equivalent" else "comparison"

    @cached_property
    def place(self) -> str:
        """Not known: two models are at fault."""
        return ""

    @cached_property
    def failure_text(self) -> str:
        """What a failure says."""
        return str(self._rendered("comparison", "failure"))

    @cached_property
    def json(self) -> str:
        """All numbers, as strict JSON."""
        return str(self._rendered("comparison", "to_json"))

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


_PLACES = ("called", "defined")
_FAULTY = ("unhealthy", "different")
_RANKS = (*_FAULTY, "inconclusive")


EVIDENCE = pytest.StashKey[tuple[Evidence, str]]()
"""The first evidence of a failing test, and the phase that it failed in; until it has ended."""


def told_at_end(item: pytest.Item, report: pytest.TestReport) -> dict[str, str] | None:
    """Return verdict, culprit and check of a test, by these names; empty where it made no result.

    Args:
        item: the test.
        report: of a phase. Only the body, and a phase that failed first, have something to tell:
            what it failed with, or the gravest of its results. Of others it is ``None``.
    """
    evidence, phase = item.stash.get(EVIDENCE, (None, "call"))
    if report.when not in ("call", phase):
        return None
    found = evidence or _gravest(item)
    said = {}
    if found is not None:
        said = {"verdict": found.verdict, "culprit": found.culprit, "check": found.check}
    if said.get("verdict") not in _FAULTY:
        said = _drift(item) or said
    return {name: text for name, text in said.items() if text}


def _drift(item: pytest.Item) -> dict[str, str]:
    for check, *_ in item.stash.get(SNAPSHOT_CHECKS, []):
        if check.outcome in ("drifted", "missing"):
            drifts = check.found.drifts if check.found is not None else ()
            layer = _printable(drifts[0].layer or check.now.model) if drifts else ""
            return {"verdict": str(check.outcome.value), "culprit": layer, "check": "drift"}
    return {}


def _gravest(item: pytest.Item) -> Evidence | None:
    fixture = item.stash.get(INSPECTOR, None)
    judged: dict[str, Evidence] = {}
    for result in (made.report for made in fixture.made) if fixture is not None else ():
        kind = Evidence if is_report(result) else ComparisonEvidence
        evidence = kind(result, explains_failure=False)
        try:
            judged.setdefault(evidence.verdict, evidence)
        except (InspectionError, SettingsError):  # not judged, which the test says where it asks
            continue
    return next((judged[v] for v in (*_RANKS, *judged) if v in judged), None)


class SourcePlace(NamedTuple):
    """A line of a file in a checkout.

    Args:
        path: relative to the checkout, with forward slashes.
        line: from 1.
    """

    path: str
    line: int


def source_place(places: Iterable[str], rootdir: Path, root: Path) -> SourcePlace | None:
    """Return the first place that is a file of a checkout; ``None`` where none is.

    Args:
        places: ``path:line``, relative to `rootdir` where they lie in it.
        rootdir: that of the run.
        root: that of the checkout. Libraries that are installed in it are no files of it.
    """
    from pytest_modelhealth.rendering.places import is_of_a_library

    for place in places:
        path, _, line = place.rpartition(":")
        file = rootdir / path
        if is_of_a_library(place) or not file.is_file():
            continue
        if file.resolve().is_relative_to(root.resolve()):
            relative = file.resolve().relative_to(root.resolve())
            return SourcePlace(relative.as_posix(), max(1, int(line)))
    return None


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
