"""What every text format on the shelf promises of every report."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

from pytest_modelhealth import rendering
from pytest_modelhealth.checks import every_check
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


# ---- checks --------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference" / "checks.md"
PACKAGE = ROOT / "pytest_modelhealth"


def test_a_check_says_what_it_is() -> None:
    """Name and summary are there and read as such; a name means one check, a rank its place."""
    for check in every_check():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", check.name)
        assert check.summary.endswith(".")
    assert len({check.name for check in every_check()}) == len(every_check())
    assert len({check.rank for check in every_check()}) == len(every_check())


def test_a_setting_belongs_to_one_check() -> None:
    """Two checks that declare one name would share its value unawares."""
    names = [setting.name for check in every_check() for setting in check.settings]
    assert len(set(names)) == len(names)


def test_each_check_is_in_the_reference_by_rank() -> None:
    """docs/reference/checks.md has a section of each name, apart, that tells of each setting."""
    text = REFERENCE.read_text(encoding="utf-8")
    parts = (part.partition("\n") for part in re.split(r"^\n## ", text, flags=re.MULTILINE)[1:])
    sections = {heading: body for heading, _, body in parts}
    assert len(sections) == len(re.findall(r"^## ", text, re.MULTILINE))
    ordered = sorted(every_check(), key=lambda check: check.rank)
    names = [check.name for check in ordered]
    assert [heading for heading in sections if heading in names] == names
    for check in ordered:
        assert [s.name for s in check.settings if f"`{s.name}`" not in sections[check.name]] == []


def test_checks_ask_for_their_settings_as_they_declare_them() -> None:
    """Values that may differ by layer are read by layer: a pattern that nobody reads is a lie."""
    sources = [
        p for room in ("checks", "probes", "training") for p in (PACKAGE / room).rglob("*.py")
    ]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources]
    whole = {
        node.slice.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == "settings"
        and isinstance(node.slice, ast.Constant)
    }
    per_layer = {s.name for check in every_check() for s in check.settings if s.per_layer}
    assert whole
    assert not whole & per_layer, "use settings.limit(name, layer), or declare per_layer=False"
