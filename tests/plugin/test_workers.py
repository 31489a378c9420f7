"""Workers of pytest-xdist, each a process of its own, see and say what one process does.

Starting workers takes ten times as long as their tests: one run holds all that goes well, and one
all that stops it before a test runs. A worker that dies stands in test_recording.py.
"""

from __future__ import annotations

import html
import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from pytest_modelhealth.bundles.data import read
from tests.plugin.test_failing_run import SUITE as EVERY_OUTCOME
from tests.plugin.test_junit import properties, results
from tests.plugin.test_markers import STALE, WAIVED
from tests.plugin.test_own_checks import CONFTEST
from tests.plugin.test_verdict_asked import ASSERTS

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
DRIFTS = """
import nets, pytest

SCALES = {"same": 1, "other": 1, "gone": 1}

@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_snapshot(inspector, health_snapshot, scale):
    assert inspector(nets.healthy()).run_inspection(nets.BATCH * scale) == health_snapshot
"""
OPTIONS = shlex.split("""
-p no:cacheprovider -W default -rA --modelhealth-set=waive=1:probe
--modelhealth-artifacts=out/artifacts --html=out/report.html --self-contained-html
--junitxml=out/junit.xml --alluredir=out/allure --modelhealth-json=out/run.json
--modelhealth-html=out/page.html --modelhealth-codequality=out/gitlab.json
--modelhealth-replay=out/bundles
""")


def told(folder: Path, lines: list[str]) -> dict[str, object]:
    """What a run says, whoever ran which test and when, by where it says so."""
    out = folder / "out"
    run = json.loads((out / "run.json").read_text())
    for test in run["tests"]:
        del test["seconds"]
    page = (out / "page.html").read_text("ascii")
    report = html.unescape((out / "report.html").read_text("utf-8"))
    summary = (folder / "summary.md").read_text("utf-8").splitlines()
    text = "\n".join(lines)
    blocks = re.findall(r"^_+ (.+?) _+\n(.*?)(?=^(?:_+|=+) )", text, re.MULTILINE | re.DOTALL)
    at_the_end = [one for one in lines if one.startswith(("modelhealth: ", "FAILED", "ERROR"))]
    return {
        "numbers": {
            path.name: json.loads(path.read_text())[1] for path in folder.glob("[0-7].json")
        },
        "run": sorted(map(json.dumps, run["tests"])),
        "notes": (run["notes"], run["exit_status"], run["environment"]),
        "GitLab": sorted(map(json.dumps, json.loads((out / "gitlab.json").read_text()))),
        "GitHub": (sorted(summary), sum(one.startswith("::error ") for one in lines)),
        "JUnit": {
            name: sorted(pairs) for name, pairs in properties(str(out / "junit.xml")).items()
        },
        "Allure": {
            name: sorted(one["attachments"]) for name, one in results(out / "allure").items()
        },
        "page": sorted(set(re.findall(r"test_\w+\.py::[\w:]+", page))),
        "figures in the report": Counter(re.findall(r"data:image/png;base64,[^\"]{80}", report)),
        "files": sorted(
            str(path.relative_to(out))
            for name in ("artifacts", "bundles")
            for path in (out / name).rglob("*")
        ),
        "bundles": sorted(str(read(one)["test"]) for one in (out / "bundles").iterdir()),
        "failures": sorted(
            (title, re.sub(r"^\[gw\d\] .*\n| at 0x\w+|\d\.\d MB", "", body, flags=re.MULTILINE))
            for title, body in blocks
        ),
        "summary": sorted(one for one in at_the_end if "run it again: " not in one),
        "snapshots": [one for one in lines if "snapshot" in one and "passed" in one],
    }


@pytest.mark.slow
def test_two_workers_say_what_one_process_says(
    nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To everyone who is told, word for word, and the same numbers bit for bit."""
    nets.makeconftest(OWN_CHECK)
    nets.makepyfile(test_drifts=DRIFTS)
    nets.runpytest("--snapshot-update").assert_outcomes(passed=3)
    nets.makepyfile(
        test_asserts=ASSERTS,
        test_drifts=DRIFTS.replace('"other": 1, "gone": 1', '"other": 2'),
        test_every=EVERY_OUTCOME,
        test_own=TESTED_BY_IT,
        test_step=WATCHED,
        test_waived=WAIVED,
    )
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of this run, by which syrupy is told
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(nets.path / "summary.md"))
    # a process of its own: xdist gives its workers the sys.path that it found when it was loaded
    alone = nets.runpytest_subprocess(*OPTIONS)
    expected = told(nets.path, alone.outlines)
    (process,) = {json.loads(one.read_text())[0] for one in nets.path.glob("[0-7].json")}
    for name in ("out", "summary.md"):
        nets.path.joinpath(name).rename(nets.path / f"alone-{name}")

    result = nets.runpytest_subprocess("-n2", *OPTIONS)
    found = told(nets.path, result.outlines)
    assert found.keys() == expected.keys()
    for who, said in expected.items():
        assert found[who] == said, who
        assert said
    assert result.parseoutcomes() == alone.parseoutcomes()
    text = result.stdout.str()
    assert "INTERNALERROR" not in text
    processes = {json.loads(one.read_text())[0] for one in nets.path.glob("[0-7].json")}
    assert process not in processes
    assert {f"[gw{n}]" in text for n in range(2)} == {True}

    result.stdout.fnmatch_lines(STALE)
    result.stdout.fnmatch_lines(["*ModelHealthWarning: 0 (peak): is over*"])
    result.stdout.fnmatch_lines(["FAILED *::test_over *(peak): *"])
    result.stdout.fnmatch_lines(["* 1 snapshot unused*"])
    assert "check peak is broken: it raised ZeroDivisionError: " in text


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
    result = pytester.runpytest_inprocess("-n2", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line]
    assert line.startswith(f"ERROR: {message}")
