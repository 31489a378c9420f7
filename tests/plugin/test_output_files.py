"""Options that name a file or a folder: where it can be written, and what is in it."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

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


def written(path: Path) -> list[str]:
    """Return the ids of the tests in a file."""
    return [test["id"] for test in json.loads(path.read_text(encoding="ascii"))["tests"]]


def test_file_holds_head_and_tests(run: pytest.Pytester) -> None:
    """Head and tests come back as they were, from a folder made for them, with no file beside."""
    result = run.runpytest("--modelhealth-json=reports/run.json", "-p", "no:modelhealth.recording")
    path = run.path / "reports" / "run.json"
    result.stdout.fnmatch_lines([f"modelhealth: run data in {path}"])
    found = json.loads(path.read_text(encoding="ascii"))
    assert list(found) == ["format", "format_version", "notes", "tests"]
    assert found["notes"] == ["caf\u00e9 \ud800"]
    assert found["tests"][1] == {"id": "c", "results": [1.5, None]}
    assert [one.name for one in path.parent.iterdir()] == ["run.json"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


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
}


@pytest.mark.parametrize("options", WRONG)
def test_what_cannot_be_written_is_refused_at_the_start(
    pytester: pytest.Pytester, options: str
) -> None:
    """In one line, before any test runs."""
    pytester.path.joinpath("file").write_text("")
    result = pytester.runpytest(*options.split())
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert fnmatchcase(line, f"ERROR: {WRONG[options]}")


@pytest.mark.parametrize("option", ["artifacts", "replay"])
def test_a_read_only_folder_is_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """A directory that exists is tried, not trusted."""

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    # Not chmod: root may write anywhere.
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    pytester.mkdir("out")
    result = pytester.runpytest(f"--modelhealth-{option}=out", "-s")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "cannot write to 'out': Permission denied" in result.stderr.str()


def test_each_rank_has_its_file(run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has the name given, the others their rank before the suffix."""
    for rank, name in (("0", "run.json"), ("3", "run-rank3.json"), ("none", "run.json")):
        monkeypatch.setenv("RANK", rank)
        run.runpytest("--modelhealth-json=run.json", "-p", "no:modelhealth.recording")
        assert written(run.path / name) == ["a::b", "c"]
        (run.path / name).unlink()


def test_a_full_disk_costs_the_file_alone(run: pytest.Pytester) -> None:
    """One line of the summary says so, and the tests stay passed."""
    result = run.runpytest("--modelhealth-json=/dev/full", "-p", "no:modelhealth.recording")
    result.stdout.fnmatch_lines(
        ["modelhealth: run data could not be written to /dev/full: No space left on device"]
    )
    result.assert_outcomes(passed=1)
    assert result.ret == 0


def test_collecting_leaves_the_last_file(run: pytest.Pytester) -> None:
    """Where no test runs, there is nothing to write."""
    run.path.joinpath("run.json").write_text("before")
    run.runpytest("--modelhealth-json=run.json", "--collect-only")
    assert run.path.joinpath("run.json").read_text() == "before"


def test_a_device_is_not_replaced(run: pytest.Pytester) -> None:
    """What is written to /dev/null is gone, and /dev/null is still there."""
    run.runpytest("--modelhealth-json=/dev/null", "-p", "no:modelhealth.recording")
    assert not Path("/dev/null").is_file()


def test_what_breaks_leaves_the_last_file(run: pytest.Pytester) -> None:
    """A run that cannot be written, as one with a NaN, takes nothing of the file before it."""
    run.path.joinpath("run.json").write_text("before")
    run.makepyfile(handed_in=HANDED_IN.replace("1.5", "float('nan')"))
    run.runpytest("--modelhealth-json=run.json", "-p", "no:modelhealth.recording")
    assert run.path.joinpath("run.json").read_text() == "before"
    assert not list(run.path.glob(".modelhealth-*"))


def test_a_link_stays_a_link(run: pytest.Pytester) -> None:
    """What it leads to is replaced."""
    (run.path / "real.json").write_text("before")
    (run.path / "run.json").symlink_to("real.json")
    run.runpytest("--modelhealth-json=run.json", "-p", "no:modelhealth.recording")
    assert (run.path / "run.json").is_symlink()
    assert written(run.path / "real.json") == ["a::b", "c"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


PAGE = """
import nets, pytest

@pytest.mark.parametrize("model", ["healthy", "with_nan"])
def test_it(inspector, model):
    inspector(getattr(nets, model)()).run_inspection(nets.BATCH)
"""


def test_the_page_has_passing_and_failing_tests(nets: pytest.Pytester) -> None:
    """It is written once at the end, whole, and the summary says where."""
    nets.makepyfile(PAGE)
    result = nets.runpytest("--modelhealth-html=out/page.html")
    result.assert_outcomes(passed=1, failed=1)
    path = nets.path / "out" / "page.html"
    result.stdout.fnmatch_lines([f"modelhealth: page in {path}"])
    assert [one.name for one in path.parent.iterdir()] == ["page.html"]
    text = path.read_text(encoding="ascii")
    assert re.search(r"<b class=\"bad\">1 unhealthy</b>, <b class=\"good\">1 healthy</b>", text)
    assert text.index("test_it[with_nan]") < text.index("test_it[healthy]")
    assert len(re.findall('id="data-', text)) == 2
    assert text.endswith("</html>\n")


def test_a_run_that_inspected_nothing_has_a_page(pytester: pytest.Pytester) -> None:
    """The page says so; the file of an earlier run does not stay."""
    pytester.makepyfile("def test_it(): pass")
    pytester.path.joinpath("page.html").write_text("of yesterday")
    pytester.runpytest("--modelhealth-html=page.html").assert_outcomes(passed=1)
    assert "nothing was inspected" in pytester.path.joinpath("page.html").read_text("ascii")
