"""What every text format on the shelf promises of every report."""

from __future__ import annotations

import pickle

import pytest

from pytest_modelhealth import rendering
from pytest_modelhealth.report import Verdict
from tests.rendering import reports
from tests.rendering.test_formats import Page

FORMATS = [*rendering.FORMATS]
FOR_PEOPLE = ("line", "terminal", "failure", "html")
TERMINAL_TEXT = ("line", "terminal", "failure", "evidence")


@pytest.mark.parametrize("case", reports.CASES, ids=lambda case: case.__name__)
def test_every_report_is_rendered(case) -> None:
    """Each format gives the same text twice and leaves the report as it is, byte for byte.

    Those for people say the verdict first, with culprit and check; no line of a text ends in blanks
    or has what a terminal obeys; HTML nests and fetches nothing; a failure fits a screen.
    """
    report = case()
    before = pickle.dumps((report.observation, report._judgement))
    texts = {form: report.render(form) for form in FORMATS}
    assert {"csv", "evidence", "failure", "html", "json", "line"} <= set(texts)
    assert all(texts.values())
    assert {form: report.render(form) for form in FORMATS} == texts
    assert pickle.dumps((report.observation, report._judgement)) == before
    assert len([name for name in dir(report) if not name.startswith("_")]) <= 24
    for form in FOR_PEOPLE:
        # before the first verdict word, HTML holds its style sheet
        start = texts[form].partition("</style>")[2] or texts[form]
        head = "\n".join(start.strip().splitlines()[:2])
        assert report.verdict.value in head
        if report.verdict is Verdict.UNHEALTHY and case is not reports.hostile:
            worst = report.violations[0]
            assert report[worst.layer].label in head
            assert worst.check in head
    for form in TERMINAL_TEXT:
        assert [line for line in texts[form].splitlines() if line != line.rstrip()] == []
        assert all(letter.isprintable() or letter == "\n" for letter in texts[form])
    assert len(texts["line"].splitlines()) == len(repr(report).splitlines()) == 1
    assert len(texts["failure"].splitlines()) <= 24
    page = Page(texts["html"])
    assert page.open == []
    assert {"script", "link", "img", "iframe"}.isdisjoint(page.tags)
    assert {name for name, _ in page.attributes} <= {"class", "title", "colspan"}
    if case is reports.hostile:
        assert all("\\x1b[31m" in texts[form] for form in TERMINAL_TEXT)
