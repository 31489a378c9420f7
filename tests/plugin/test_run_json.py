"""Claims on ``--modelhealth-json`` and the handling of its path, with a run handed in by hand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pytest_modelhealth.runs import reading

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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (".", "Is a directory"),
        ("", "Is a directory"),
        ("test_one.py/run.json", "File exists"),
        ("/proc/run.json", "No such file or directory"),
    ],
)
def test_wrong_paths_are_refused_at_the_start(run: pytest.Pytester, given: str, says: str) -> None:
    """No test runs where the file could not be written after it."""
    result = run.runpytest(f"--modelhealth-json={given}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--modelhealth-json: cannot write to '{given}': {says}; name*"])


def test_a_read_only_folder_is_refused(run: pytest.Pytester) -> None:
    """So it is where the folder is there and takes no file."""
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    (run.path / "closed").mkdir(mode=0o500)
    result = run.runpytest("--modelhealth-json=closed/run.json")
    result.stderr.fnmatch_lines(["*cannot write to 'closed/run.json': Permission denied*"])


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


def test_a_real_run_is_read(nets: pytest.Pytester) -> None:
    """What tests inspect is in one file, which can be read."""
    nets.makepyfile(
        """
        import pytest
        from nets import BATCH, healthy, with_dead_relu

        @pytest.mark.parametrize("name", ["a|b", "<b>@x"])
        def test_healthy(inspector, name):
            inspector(healthy()).run_inspection(BATCH)

        def test_dead(inspector):
            inspector(with_dead_relu()).run_inspection(BATCH)
            inspector.compare(healthy(), healthy(), BATCH)
        """
    )
    nets.runpytest("--modelhealth-json=run.json").assert_outcomes(passed=2, failed=1)
    kinds = {
        test["id"].rpartition("::")[2]: [result["kind"] for result in test["results"]]
        for test in reading.read(nets.path / "run.json").tests
    }
    assert kinds == {
        "test_healthy[a|b]": ["inspection"],
        "test_healthy[<b>@x]": ["inspection"],
        "test_dead": ["inspection", "comparison"],
    }


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
