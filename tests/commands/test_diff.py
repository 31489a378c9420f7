"""Claims on ``python -m pytest_modelhealth diff``: its exit status, its output, its messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_modelhealth.commands import main
from tests.runs.difference import made
from tests.runs.difference.made import TOTALS, finding, inspection

HEALTHY = made.test(inspection())
UNHEALTHY = made.test(inspection(finding()))
CHANGED = made.test(inspection(totals={**TOTALS, "multiply_adds": 1}))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``healthy.json``, ``unhealthy.json``, ``changed.json`` and ``broken.json``."""
    for name, test in (("healthy", HEALTHY), ("unhealthy", UNHEALTHY), ("changed", CHANGED)):
        text = json.dumps(made.document(made.run(test)))
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "broken.json").write_text(text[:200])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("head", "fail_on", "status"),
    [
        ("healthy", "any", 0),
        ("changed", None, 0),
        ("changed", "any", 1),
        ("unhealthy", None, 1),
        ("unhealthy", "worse", 1),
        ("unhealthy", "never", 0),
    ],
)
def test_exit_status_is_that_of_the_gate(head: str, fail_on: str | None, status: int) -> None:
    """By default a change that is no worse passes."""
    gate = [] if fail_on is None else ["--fail-on", fail_on]
    assert main(["diff", "healthy.json", f"{head}.json", *gate]) == status


@pytest.mark.usefixtures("files")
def test_wrong_files_exit_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    """With one line that names the file, and nothing on the output."""
    Path("short.json").write_text(Path("healthy.json").read_text().replace('"tied"', '"t"'))
    for name in ("broken.json", "none.json", ".", "short.json"):
        assert main(["diff", "healthy.json", name, "--fail-on", "never"]) == 2
        output, error = capsys.readouterr()
        assert output == ""
        assert error.startswith("python -m pytest_modelhealth: ")
        assert f"{name}: " in error
        assert error.count("\n") == 1


def test_output_goes_to_a_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is shown then; a file that cannot be written is wrong use."""
    arguments = ["diff", "healthy.json", "unhealthy.json", "--format", "markdown", "--output"]
    assert main([*arguments, "comment.md"]) == 1
    assert (files / "comment.md").read_text().startswith("**`modelhealth: 1 test got worse")
    assert capsys.readouterr().out == ""
    assert main([*arguments, "none/comment.md"]) == 2
    assert "--output: cannot write none/comment.md" in capsys.readouterr().err


def test_it_runs_as_a_command(files: Path) -> None:
    """In a process of its own, in an encoding that has not every letter."""
    (files / "accent.json").write_text(
        (files / "unhealthy.json").read_text().replace("fc1 is dead", "caf\\u00e9 \\u2713")
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest_modelhealth", "diff", "healthy.json", "accent.json"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"caf\xe9 \\u2713" in done.stdout


def test_help_loads_no_torch() -> None:
    """So it is there at once."""
    code = (
        "import sys\nfrom pytest_modelhealth.commands import main\n"
        "try: main(['diff', '--help'])\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False"
