"""Workers of pytest-xdist, each a process of its own, see and say what one process does.

Starting workers takes ten times as long as their tests: one run holds all that goes well, and one
all that stops it before a test runs. What these tests say in one process stands in other files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugin.test_markers import STALE, WAIVED
from tests.plugin.test_own_checks import CONFTEST
from tests.plugin.test_verdict_asked import ASSERTS, TOLD, assert_whole_texts

# nothing is over the limit but where a test asks for one, and one limit breaks the check
OWN_CHECK = CONFTEST.replace("default=1e-6", "default=1e9").replace(
    "limit.value:", "limit.value + 0 / (limit.value - 77):"
)
TESTED_BY_IT = """
import nets, pytest

def run(inspector):
    inspector(nets.healthy()).run_inspection(nets.BATCH)

@pytest.mark.modelhealth(max_peak=1e-6)
def test_over(inspector):
    run(inspector)

@pytest.mark.modelhealth(max_peak=1e-6)
@pytest.mark.modelhealth_waive("*", check="peak", reason="known")
def test_known(inspector):
    run(inspector)

@pytest.mark.modelhealth(max_peak=1e-6, severity={"peak": "warn"})
def test_warned(inspector):
    run(inspector)

@pytest.mark.modelhealth(max_peak=77)
def test_broken_check(inspector):
    run(inspector)

def test_dead(inspector):
    inspector(nets.with_dead_relu()).run_inspection(nets.BATCH)
"""
WATCHED = """
import json, os, pathlib
import pytest, torch
from torch import nn
from pytest_modelhealth import Inspector

@pytest.mark.parametrize("seed", range(8))
def test_step(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    report = Inspector(model).run_inspection(torch.randn(40, 32))
    seen = {
        f"{record.name}/{role}/{name}": [s.mean, s.std, s.min, s.max, s.zero_count]
        for record in report
        for role in ("activations", "gradients", "parameter_gradients")
        for name, s in record.tensors(role).items()
    }
    pathlib.Path(f"{seed}.json").write_text(json.dumps([os.getpid(), seen]))
"""


def steps(folder: Path) -> tuple[set[int], list[dict[str, list[float]]]]:
    """The processes that ran `WATCHED`, and the numbers that they saw."""
    written = [json.loads((folder / f"{seed}.json").read_text()) for seed in range(8)]
    return {process for process, _ in written}, [seen for _, seen in written]


def test_two_workers_say_what_one_process_says(nets: pytest.Pytester) -> None:
    """The same numbers bit for bit; asserts, own checks and waivers as ever; what each met adds up.

    A waiver that no worker needed is named, and one that a single worker needed is not.
    """
    nets.makepyfile(test_step=WATCHED)
    nets.runpytest().assert_outcomes(passed=8)
    (alone,), expected = steps(nets.path)
    assert len(expected[0]) > 8

    nets.makeconftest(OWN_CHECK)
    nets.makepyfile(test_asserts=ASSERTS, test_own=TESTED_BY_IT, test_waived=WAIVED)
    options = ("--modelhealth-set=waive=1: a probe", "--modelhealth-set=waive=9: stale")
    # a process of its own: xdist gives its workers the sys.path that it found when it was loaded
    result = nets.runpytest_subprocess(
        "-n2", "-W", "default", "-p", "no:modelhealth.terminal", *options
    )
    result.assert_outcomes(failed=TOLD + 2, passed=15, errors=1, xfailed=1, warnings=2)
    text = result.stdout.str()
    assert "INTERNALERROR" not in text

    processes, seen = steps(nets.path)
    assert seen == expected
    assert alone not in processes
    assert {f"[gw{n}]" in text for n in range(2)} == {True}

    assert_whole_texts(text)
    result.stdout.fnmatch_lines(STALE)
    result.stdout.fnmatch_lines(["*ModelHealthWarning: 0 (peak): is over*"])
    result.stdout.fnmatch_lines(["FAILED *::test_over *(peak): *"])
    assert "check peak is broken: it raised ZeroDivisionError: " in text
    unneeded = [line for line in result.outlines if line.startswith("modelhealth: ")]
    assert len(unneeded) == 1
    assert unneeded[0].startswith(
        "modelhealth: --modelhealth-set waive: the waiver of '9': nothing"
    )


def test_workers_find_what_is_wrong_before_any_test_runs(nets: pytest.Pytester) -> None:
    """A conftest that comes too late is an error of collection."""
    folder = nets.mkdir("deep").joinpath("deeper")
    folder.mkdir()
    folder.joinpath("conftest.py").write_text(CONFTEST)
    folder.joinpath("test_own.py").write_text(TESTED_BY_IT)
    result = nets.runpytest_subprocess("-n2")
    # xdist ends with TESTS_FAILED after any error of collection, an ImportError too.
    assert result.ret in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.TESTS_FAILED)
    result.assert_outcomes(errors=1)
    assert "conftest.py: pytest_modelhealth_checks comes too late" in result.stdout.str()


@pytest.mark.parametrize(
    ("conftest", "option", "message"),
    [
        (
            "",
            "--modelhealth-set=max_grad_norm=abc",
            "--modelhealth-set max_grad_norm: max_grad_norm must",
        ),
        (
            "def pytest_modelhealth_checks(): return [int]",
            "-v",
            "pytest_modelhealth_checks: builtins.int: it is no subclass of",
        ),
    ],
    ids=["option", "hook"],
)
def test_no_worker_starts_where_nothing_can_run(
    pytester: pytest.Pytester, conftest: str, option: str, message: str
) -> None:
    """A usage error is one line, said once."""
    pytester.makeconftest(conftest)
    result = pytester.runpytest_subprocess("-n2", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert line.startswith(f"ERROR: {message}")
