"""What every check on the shelf promises."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pytest_modelhealth.checks import Check
from pytest_modelhealth.training import every_check

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference" / "checks.md"
PACKAGE = ROOT / "pytest_modelhealth"

each_check = pytest.mark.parametrize("check", every_check(), ids=lambda check: check.name)


@each_check
def test_a_check_says_what_it_is(check: Check) -> None:
    """Name and summary are there and read as such."""
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", check.name)
    assert check.summary.endswith(".")


def test_names_and_ranks_are_unique() -> None:
    """Violations have a definite order, and a name means one check."""
    assert len({check.name for check in every_check()}) == len(every_check())
    assert len({check.rank for check in every_check()}) == len(every_check())


def test_a_setting_belongs_to_one_check() -> None:
    """Two checks that declare one name would share its value unawares."""
    names = [setting.name for check in every_check() for setting in check.settings]
    assert len(set(names)) == len(names)


@each_check
def test_a_check_is_in_the_reference_with_its_settings(check: Check) -> None:
    """docs/reference/checks.md has a section of the check's name that tells of each setting."""
    sections = re.split(r"^## ", REFERENCE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = [text for text in sections if text.partition("\n")[0] == check.name]
    assert len(texts) == 1, f"write a section '## {check.name}'"
    assert [s.name for s in check.settings if f"`{s.name}`" not in texts[0]] == []


def test_the_reference_has_the_order_of_rank() -> None:
    """The page says that violations come in its order; each heading stands apart."""
    text = REFERENCE.read_text(encoding="utf-8")
    ordered = [check.name for check in sorted(every_check(), key=lambda check: check.rank)]
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [heading for heading in headings if heading in ordered] == ordered
    assert len(re.findall(r"^\n## ", text, re.MULTILINE)) == len(headings)


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
