"""``python -m pytest_modelhealth page``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_modelhealth.commands import WRONG_USE, main
from tests.runs.made_runs import inspection, made_test, names_of, run_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The file of a run of one test."""
    made = run_of(made_test("test_passes", inspection(names_of(20))))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**made.head, "tests": list(made.tests)}))
    return path


def test_the_file_of_a_run_becomes_a_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page is where it was asked for, and its path is printed."""
    target = tmp_path / "page.html"
    assert main(["page", str(run), str(target)]) == 0
    assert "test_passes" in target.read_text(encoding="ascii")
    assert capsys.readouterr().out == f"page in {target}\n"


def test_what_cannot_be_read_or_written_is_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the file and what is wrong with it, and no half of a page is left."""
    target = tmp_path / "page.html"
    run.with_name("other.json").write_text("{}")
    assert main(["page", str(run.with_name("other.json")), str(target)]) == WRONG_USE
    assert "other.json: not the file of a run" in capsys.readouterr().err
    assert not target.exists()
    data = json.loads(run.read_text())
    del data["tests"][0]["results"][0]["place"]
    run.with_name("other.json").write_text(json.dumps(data))
    assert main(["page", str(run.with_name("other.json")), str(target)]) == WRONG_USE
    assert "a key is missing or of another type (KeyError('place'))" in capsys.readouterr().err
    assert not target.exists()
    assert main(["page", str(run), str(tmp_path)]) == WRONG_USE
    assert "Is a directory" in capsys.readouterr().err
