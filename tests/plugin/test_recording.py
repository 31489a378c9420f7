"""The run as a whole: who gets it, what is in it, and that nothing is recorded for nobody."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

CONFTEST = """
import json

def pytest_modelhealth_wants_run(config):
    return True

def pytest_modelhealth_run_ended(run, terminalreporter):
    tests = [list(run.tests) for _ in range(2)]
    assert tests[0] == tests[1]
    with open("run.json", "w") as file:
        json.dump({**run.head, "tests": tests[0]}, file, allow_nan=False)

class Broken:
    def pytest_modelhealth_run_ended(self, config):
        raise OSError(28, "No space left on device")

def pytest_configure(config):
    config.pluginmanager.register(Broken(), "broken_destination")
"""

TESTS = """
import nets, pytest

@pytest.fixture
def inspected(inspector):
    return inspector(nets.healthy()).run_inspection(nets.BATCH)

def test_passes(inspected):
    inspected.assert_healthy()

def test_unhealthy(inspector):
    inspector(nets.with_nan()).run_inspection(nets.BATCH)

def test_two(inspector):
    inspector(nets.healthy()).run_inspection(nets.BATCH)
    inspector.compare(nets.healthy(), nets.with_dead_relu(), nets.BATCH)

@pytest.mark.xfail(strict=True)
def test_expected(inspected):
    assert False

def test_torn_down(inspected, request):
    request.addfinalizer(lambda: 1 / 0)

def test_other_reason(inspected):
    raise ValueError("<b>what</b>\\nelse")

def test_drift(inspector, health_snapshot):
    assert inspector(nets.healthy()).run_inspection(nets.BATCH) == health_snapshot

def test_inspects_nothing():
    pass
"""


def test_all_that_tests_inspect(nets):
    """Every test that inspected is there with its outcome."""
    nets.makeconftest(CONFTEST)
    nets.makepyfile(test_it=TESTS)

    result = nets.runpytest_inprocess()

    run = json.loads((nets.path / "run.json").read_text())
    tests = {test["id"].partition("::")[2]: test for test in run["tests"]}
    results = {name: [r["verdict"] for r in test["results"]] for name, test in tests.items()}
    assert results == {
        "test_passes": ["healthy"],
        "test_unhealthy": ["unhealthy"],
        "test_two": ["healthy", "different"],
        "test_expected": ["healthy"],
        "test_torn_down": ["healthy"],
        "test_other_reason": ["healthy"],
        "test_drift": ["healthy", "missing"],
    }
    outcomes = {name: test["outcome"] for name, test in tests.items()}
    assert outcomes == {
        "test_passes": "passed",
        "test_unhealthy": "failed",
        "test_two": "failed",
        "test_expected": "xfailed",
        "test_torn_down": "error",
        "test_other_reason": "failed",
        "test_drift": "failed",
    }
    assert tests["test_other_reason"]["message"] == "<b>what</b>"
    lines = TESTS.strip().splitlines()
    for name in ("test_unhealthy", "test_drift"):
        path, _, number = tests[name]["results"][-1]["place"].rpartition(":")
        assert path == "test_it.py"
        assert "run_inspection" in lines[int(number) - 1]
        assert lines[tests[name]["line"] - 1].startswith(f"def {name}(")
    assert (run["format_version"], run["exit_status"], run["notes"]) == (2, 1, [])
    assert all(run["environment"].values())
    # a destination that fails costs a line, and no other destination its run
    result.stdout.fnmatch_lines("modelhealth: broken_destination failed: OSError*No space left*")
    result.assert_outcomes(passed=3, failed=4, xfailed=1, errors=1)


def test_a_run_that_cannot_be_written_down(nets, monkeypatch):
    """A full disk costs a line for each test, and no test its result."""

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pytest_modelhealth.plugin.recording.json", SimpleNamespace(dump=full))
    nets.makeconftest(CONFTEST)
    nets.makepyfile(test_it=TESTS)
    result = nets.runpytest("-k", "passes")
    result.assert_outcomes(passed=1, deselected=7)
    result.stdout.fnmatch_lines("modelhealth: *test_passes could not be recorded: *No space left*")


@pytest.mark.slow
def test_what_a_test_destroys_is_named(nets, tmp_path, monkeypatch):
    """A deleted folder and a dead worker cost their own tests, each by its name, and no other."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    nets.makeconftest(CONFTEST)
    nets.makepyfile(
        test_it="""
        import os, pathlib, shutil, tempfile
        import nets

        def run(inspector):
            inspector(nets.healthy()).run_inspection(nets.BATCH)

        def test_before(inspector):
            run(inspector)

        def test_deletes(inspector):
            run(inspector)
            for folder in pathlib.Path(tempfile.gettempdir()).glob("modelhealth-*"):
                shutil.rmtree(folder)

        def test_dies(inspector):
            run(inspector)
            os._exit(1)

        def test_after(inspector):
            run(inspector)
        """
    )
    result = nets.runpytest_subprocess("-n1", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=1)
    run = json.loads((nets.path / "run.json").read_text())
    assert [test["id"] for test in run["tests"]] == [
        "test_it.py::test_deletes",
        "test_it.py::test_after",
    ]
    dead, deleted = run["notes"]
    assert dead == "test_it.py::test_dies ended its process: what it inspected is lost"
    assert deleted.startswith("test_it.py::test_before is missing: ")
    result.stdout.fnmatch_lines([f"modelhealth: {dead}", f"modelhealth: {deleted}"])
    assert not list(tmp_path.glob("modelhealth-*"))


def test_without_a_terminal_no_file_is_asked_for(nets):
    """Under ``-p no:terminal`` there is no summary, where files are written."""
    nets.makepyfile(test_it=TESTS)
    result = nets.runpytest("-p", "no:terminal", "--modelhealth-json=run.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--modelhealth-json needs pytest's terminal" in result.stderr.str()
