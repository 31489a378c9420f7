"""What every check on the shelf promises."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from pytest_modelhealth.checks import every_check

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
