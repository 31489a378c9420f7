"""What every text format on the shelf promises."""

from __future__ import annotations

import importlib
import pickle
import pkgutil

import pytest

from pytest_modelhealth import rendering
from pytest_modelhealth.report import Verdict
from tests.rendering import reports

MODULES = [module.name for module in pkgutil.iter_modules(rendering.__path__)]
FORMATS = [
    name
    for name in MODULES
    if hasattr(importlib.import_module(f"{rendering.__name__}.{name}"), "render")
]
FOR_PEOPLE = ("line", "terminal", "failure", "html")
TERMINAL_TEXT = ("line", "terminal", "failure", "evidence")

every_format = pytest.mark.parametrize("form", FORMATS)
every_case = pytest.mark.parametrize("case", reports.CASES, ids=lambda case: case.__name__)


def test_the_shelf_holds_every_format() -> None:
    """The formats named in the documentation are found by looking into the folder."""
    assert {"csv", "evidence", "failure", "html", "json", "line", "terminal"} <= set(FORMATS)


@every_format
@every_case
def test_every_report_renders_to_the_same_text_twice(form, case) -> None:
    """No report makes a format raise, and the text depends on nothing but the report."""
    report = case()
    first = report.render(form)
    assert isinstance(first, str)
    assert first
    assert report.render(form) == first


@every_format
@every_case
def test_rendering_does_not_change_the_report(form, case) -> None:
    """What was seen and what was judged are, byte for byte, as they were."""
    report = case()
    before = pickle.dumps((report.observation, report._judgement))
    report.render(form)
    assert pickle.dumps((report.observation, report._judgement)) == before


@every_case
def test_a_report_has_at_most_24_public_names(case) -> None:
    """What the plugin alone asks of one is none of them."""
    assert len([name for name in dir(case()) if not name.startswith("_")]) <= 24


@pytest.mark.parametrize("form", FOR_PEOPLE)
@every_case
def test_a_format_for_people_says_the_verdict(form, case) -> None:
    """The verdict is in the first lines, and an unhealthy one with culprit and check."""
    report = case()
    text = report.render(form)
    # before the first verdict word, HTML holds its style sheet
    start = text.partition("</style>")[2] or text
    head = "\n".join(start.strip().splitlines()[:2])
    assert report.verdict.value in head
    if report.verdict is Verdict.UNHEALTHY and case is not reports.hostile:
        worst = report.violations[0]
        assert report[worst.layer].label in head
        assert worst.check in head


@pytest.mark.parametrize("form", TERMINAL_TEXT)
def test_nothing_in_a_name_reaches_the_terminal_as_a_command(form) -> None:
    """Newlines, tabs, escape sequences and direction marks in names are shown as escapes."""
    text = reports.hostile().render(form)
    assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
    assert "\\x1b[31m" in text


@pytest.mark.parametrize("form", TERMINAL_TEXT)
@every_case
def test_no_line_ends_in_blanks(form, case) -> None:
    """Text can be pasted into an expected-output file without an editor changing it."""
    lines = case().render(form).splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
