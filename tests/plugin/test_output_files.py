"""Options that name a file or a folder: where it can be written, and what is in it."""

from __future__ import annotations

import errno
import json
import os
import string
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_modelhealth.plugin.output_files import folder_name

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes and devices of POSIX")

HANDED_IN = """
import pytest
from pytest_modelhealth.runs.run import Run

HEAD = {"format": "pytest-modelhealth run", "format_version": 1, "notes": ["caf\\u00e9 \\ud800"]}
TESTS = [{"id": "a::b", "results": []}, {"id": "c", "results": [1.5, None]}]

@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    hook = config.hook
    if any(hook.pytest_modelhealth_wants_run(config=config)):
        hook.pytest_modelhealth_run_ended(
            config=config, run=Run(HEAD, TESTS), terminalreporter=terminalreporter
        )
"""
"""A conftest.py that stands in for what records runs."""


@pytest.fixture
def run(pytester: pytest.Pytester) -> pytest.Pytester:
    """A suite whose run is written by hand."""
    pytester.makeconftest("from handed_in import *")
    pytester.makepyfile(handed_in=HANDED_IN, test_one="def test_one(): pass")
    pytester.syspathinsert()
    return pytester


def write(run: pytest.Pytester, path: str, *options: str) -> pytest.RunResult:
    """Have the data of a run written to a path."""
    result = run.runpytest(f"--modelhealth-json={path}", "-p", "no:modelhealth.recording", *options)
    assert result.ret == pytest.ExitCode.OK
    return result


def written(path: Path) -> list[str]:
    """Return the ids of the tests in a file."""
    return [test["id"] for test in json.loads(path.read_text(encoding="ascii"))["tests"]]


def test_file_holds_head_and_tests(run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come back as they were, from a folder made for them, with no file beside.

    Rank 0 has the name given, the others their rank before the suffix.
    """
    path = run.path / "reports" / "run.json"
    write(run, "reports/run.json").stdout.fnmatch_lines([f"modelhealth: run data in {path}"])
    found = json.loads(path.read_text(encoding="ascii"))
    assert list(found) == ["format", "format_version", "notes", "tests"]
    assert found["notes"] == ["caf\u00e9 \ud800"]
    assert found["tests"][1] == {"id": "c", "results": [1.5, None]}
    assert [one.name for one in path.parent.iterdir()] == ["run.json"]
    os.umask(mask := os.umask(0))
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask
    for rank, name in (("0", "run.json"), ("3", "run-rank3.json"), ("none", "run.json")):
        monkeypatch.setenv("RANK", rank)
        write(run, "run.json")
        assert written(run.path / name) == ["a::b", "c"]
        (run.path / name).unlink()


WRONG = {
    "--modelhealth-json=.": "--modelhealth-json: cannot write to '.': Is a directory; name a file*",
    "--modelhealth-json=": "--modelhealth-json: cannot write to '': Is a directory; name a file*",
    "--modelhealth-json=file/below": "*: cannot write to 'file/below': File exists; name a file*",
    "--modelhealth-json=/proc/a": "*: cannot write to '/proc/a': No such file or directory; name*",
    "--modelhealth-html=.": "--modelhealth-html: cannot write to '.': Is a directory; name a file*",
    "--modelhealth-codequality=.": "--modelhealth-codequality: cannot write to '.': *",
    "--modelhealth-artifacts=file/below": "*: cannot write to 'file/below': *",
    "--modelhealth-artifacts=file": "--modelhealth-artifacts: cannot write to 'file': *",
    "--modelhealth-replay=file/below": "--modelhealth-replay: cannot write to 'file/below': *",
    "--modelhealth-replay-from=none": "no bundle can be read at none, *",
    "--modelhealth-json=a -p no:terminal": "--modelhealth-json needs pytest's terminal: *",
    "--modelhealth-artifacts=denied": "*: cannot write to 'denied': Permission denied; *",
    "--modelhealth-replay=denied": "*: cannot write to 'denied': Permission denied; *",
}


@pytest.mark.parametrize("options", WRONG)
def test_what_cannot_be_written_is_refused_at_the_start(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """In one line, before any test runs; a directory that exists is tried, not trusted."""

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    pytester.path.joinpath("file").write_text("")
    if "denied" in options:  # not by chmod: root may write anywhere
        pytester.mkdir("denied")
        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
        options += " -s"
    result = pytester.runpytest(*options.split())
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert fnmatchcase(line, f"ERROR: {WRONG[options.removesuffix(' -s')]}")


def test_the_last_file_is_replaced_whole_or_not_at_all(run: pytest.Pytester) -> None:
    """Not where tests are only collected, nor by a run that cannot be written.

    A device is not replaced, a link stays one, and a full disk costs the file alone.
    """
    path = run.path / "run.json"
    path.write_text("before")
    write(run, "run.json", "--collect-only")
    assert path.read_text() == "before"
    write(run, "/dev/null")
    assert not Path("/dev/null").is_file()
    write(run, "/dev/full").stdout.fnmatch_lines(
        ["modelhealth: run data could not be written to /dev/full: No space left on device"]
    )
    link = run.path / "link.json"
    link.symlink_to("real.json")
    write(run, "link.json")
    assert link.is_symlink()
    assert written(run.path / "real.json") == ["a::b", "c"]
    run.makepyfile(handed_in=HANDED_IN.replace("1.5", "float('nan')"))
    run.runpytest("--modelhealth-json=run.json", "-p", "no:modelhealth.recording")
    assert path.read_text() == "before"
    assert not list(run.path.glob(".modelhealth-*"))


def test_a_run_without_a_fault_leaves_no_old_file(nets: pytest.Pytester) -> None:
    """The page says that nothing was inspected; the folder of figures is there and empty."""
    nets.makepyfile("def test_it(): pass")
    nets.path.joinpath("page.html").write_text("of yesterday")
    options = ("--modelhealth-html=page.html", "--modelhealth-artifacts=deep/er")
    nets.runpytest(*options).assert_outcomes(passed=1)
    assert "nothing was inspected" in nets.path.joinpath("page.html").read_text("ascii")
    assert list(nets.path.joinpath("deep", "er").iterdir()) == []


def test_lost_results_replace_no_file(
    nets: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test may empty the folder for temporary files; the last file is worth more than none."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    nets.makepyfile(
        """
        import pathlib, shutil, tempfile
        import nets

        def test_it(inspector):
            inspector(nets.healthy()).run_inspection(nets.BATCH)

        def test_deletes():
            for folder in pathlib.Path(tempfile.gettempdir()).glob(".modelhealth-*"):
                shutil.rmtree(folder)
        """
    )
    path = nets.path / "run.json"
    path.write_text("of yesterday")
    result = nets.runpytest("--modelhealth-json=run.json")
    result.assert_outcomes(passed=2)
    assert path.read_text() == "of yesterday"
    result.stdout.fnmatch_lines(
        ["modelhealth: run data could not be written to *: all results are lost, and *"]
    )


@given(st.text(max_size=300), st.text(max_size=300))
def test_folder_names_are_safe_and_distinct(one: str, other: str) -> None:
    """Any id makes a name of safe characters and bounded length; two ids make two names."""
    name = folder_name(one)
    assert set(name) <= set(string.ascii_letters + string.digits + "._-")
    assert len(name) <= 110
    assert name not in (".", "..")
    assert (name == folder_name(other)) == (one == other)
    assert (name.lower() == folder_name(other).lower()) == (one == other)


BROKEN = """
import pytest
from torch import nn

@pytest.fixture
def data():
    raise ValueError("no data")

def test_plain():
    pass

def test_no_data(data, inspector):
    pass

def test_forward(inspector):
    class Net(nn.Module):
        def forward(self, x):
            raise RuntimeError("shape is wrong")
    inspector(Net()).run_inspection(1.0)
"""


GITHUB = {
    "RUN_ID": "7", "SERVER_URL": "https://github.com", "REPOSITORY": "us/nets", "REF_NAME": "topic"
}  # fmt: skip
CHECKOUT = ["checkout", "-q", "--detach"]  # as CI does, so that no branch is known


def test_what_failed_before_it_inspected_is_in_the_file(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import, a fixture and a forward that raise: each with its exception and line.

    Which run it was stands there, too: the command, the commit, and what CI tells.
    """
    for key, value in GITHUB.items():
        monkeypatch.setenv(f"GITHUB_{key}", value)
    monkeypatch.delenv("GITHUB_HEAD_REF", raising=False)
    git = ["git", "-C", str(pytester.path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"], CHECKOUT):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    pytester.makepyfile(test_broken=BROKEN, test_import="import nothing_there")
    options = ("--modelhealth-json=run.json", "--continue-on-collection-errors")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    run = json.loads((pytester.path / "run.json").read_text(encoding="ascii"))
    assert (run["ran"], run["exit_status"]) == (4, 1)
    assert run["run"] == {
        "command": run["run"]["command"],
        "commit": head.stdout.strip(),
        "branch": "topic",
        "link": "https://github.com/us/nets/actions/runs/7",
    }
    assert run["run"]["command"].startswith("pytest ")
    assert run["run"]["command"].endswith(" ".join(options))
    keys = ("outcome", "message", "raised_at", "line", "results")
    tests = {test["id"]: [test[key] for key in keys] for test in run["tests"]}
    missing = "ModuleNotFoundError: No module named 'nothing_there'"
    assert tests == {
        "test_import.py": ["error", missing, "", 1, []],
        "test_broken.py::test_no_data": [
            "error", "ValueError: no data", "test_broken.py:6", 11, []
        ],
        "test_broken.py::test_forward": [
            "failed", "RuntimeError: shape is wrong", "test_broken.py:17", 14, []
        ],
    }  # fmt: skip


EARLY = """
import pytest

def test_fails():
    assert not 1

def test_ends():
    pytest.exit("enough", returncode=42)

def test_ctrl_c():
    raise KeyboardInterrupt
"""
WHYS = {
    "-x": (1, "1 of 3 tests ran: stopping after 1 failures"),
    "": (42, "2 of 3 tests ran: Exit enough"),
    "--no-summary": (42, "2 of 3 tests ran: Exit enough"),
    "--deselect test_early.py::test_ends": (2, "2 of 2 tests ran: KeyboardInterrupt"),
    "not_there.py": (4, "0 of 0 tests ran: pytest was called with what it cannot use"),
}


@pytest.mark.parametrize("options", WHYS)
def test_a_run_that_ends_early_is_written_and_says_so(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """In every output: page, data, code quality, and GitHub's summary."""
    pytester.makepyfile(test_early=EARLY)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    files = [f"--modelhealth-{one}=run.{one}" for one in ("json", "html", "codequality")]
    result = pytester.runpytest(*files, *options.split(), no_reraise_ctrlc=True)
    status, why = WHYS[options]
    assert result.ret == status
    note = f"the run ended early, {why}"
    run = json.loads((pytester.path / "run.json").read_text(encoding="ascii"))
    assert (run["exit_status"], run["notes"]) == (status, [note])
    for name in ("run.html", "summary.md"):
        text = (pytester.path / name).read_text(encoding="utf-8")
        assert note in text
        assert f"exit status {status}" in text
    failed = [test["id"] for test in run["tests"]]
    assert failed == ["test_early.py::test_fails"] * (status != 4)
    assert len(json.loads((pytester.path / "run.codequality").read_text())) == len(failed)
    result.stdout.fnmatch_lines([f"modelhealth: {note}", "modelhealth: page in *run.html"])
