"""Workers of pytest-xdist, each a process of its own, see and say what one process does.

One run holds all that goes well, and one all that stops it before a test runs: starting workers
takes ten times as long as their tests. A worker that dies stands in test_destinations.py.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from pytest_modelhealth.bundles.data import read
from tests.plugin.outcomes import OPTIONS, attached, project, properties
from tests.plugin.test_inspections import WARNED
from tests.plugin.test_markers import STALE, WAIVED
from tests.plugin.test_output_files import BROKEN
from tests.plugin.test_own_checks import CONFTEST
from tests.plugin.test_verdict_asked import ASSERTS

# nothing is over the limit but where a test asks for one, and one limit breaks the check
OWN_CHECK = CONFTEST.replace("default=1e-6", "default=1e9").replace(
    "limit.value:", "limit.value + 0 / (limit.value - 77):"
)
TESTED_BY_IT = """
import nets, pytest

@pytest.mark.parametrize("limit", [1e-6, 77], ids=["over", "broken"])
def test_limit(inspector, limit):
    inspector(nets.healthy(), max_peak=limit).run_inspection(nets.BATCH)

@pytest.mark.modelhealth(max_peak=1e-6, severity={"peak": "warn"})
def test_warned(inspector):
    inspector(nets.healthy()).run_inspection(nets.BATCH)
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


def timeless(text: str) -> str:
    """Return a text without the seconds that probes took."""
    return re.sub(r", [\d.e-]+ s\)", ")", text)


def told(folder: Path, lines: list[str]) -> dict[str, object]:
    """What a run says, whoever ran which test and when, by where it says so."""
    out = folder / "out"
    run = json.loads((out / "run.json").read_text())
    for test in run["tests"]:
        del test["seconds"]
    page = (out / "page.html").read_text("ascii")
    report = html.unescape((out / "report.html").read_text("utf-8"))
    summary = (folder.parent / "summary.md").read_text("utf-8").splitlines()
    text = "\n".join(lines)
    blocks = re.findall(r"^_{3,} (.+?) _+\n(.*?)(?=^(?:_{3,}|=+) )", text, re.MULTILINE | re.DOTALL)
    at_the_end = [one for one in lines if one.startswith(("modelhealth: ", "FAILED", "ERROR"))]
    numbers = {path.name: json.loads(path.read_text())[1] for path in folder.glob("[0-7].json")}
    return {
        "numbers": numbers,
        "run": sorted(map(timeless, map(json.dumps, run["tests"]))),
        "notes": (run["notes"], run["exit_status"], run["environment"]),
        "GitLab": sorted(map(json.dumps, json.loads((out / "gitlab.json").read_text()))),
        "GitHub": (
            sorted(map(timeless, summary)),
            sum(one.startswith("::error ") for one in lines),
        ),
        "JUnit": {name: sorted(each) for name, each in properties(out / "junit.xml").items()},
        "Allure": {name: sorted(each) for name, each in attached(out / "allure").items()},
        "page": sorted(set(re.findall(r"test_\w+\.py::[\w:]+", page))),
        "figures in the report": Counter(re.findall(r"data:image/png;base64,[^\"]{80}", report)),
        "files": sorted(str(path.relative_to(out)) for path in out.glob("[ab]*s/**/*")),
        "bundles": sorted(str(read(one)["test"]) for one in (out / "bundles").iterdir()),
        "failures": sorted(
            (title, re.sub(r"(?m)^\[gw\d\] .*\n| at 0x\w+|\d\.\d MB", "", timeless(body)))
            for title, body in blocks
        ),
        # xdist tells of a file that cannot be imported without the reason
        "summary": sorted(
            one.partition(" - ImportError")[0] for one in at_the_end if "run it again: " not in one
        ),
    }


@pytest.mark.slow
def test_two_workers_say_what_one_process_says(
    nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To everyone who is told, word for word, and the same numbers bit for bit."""
    folder = project(nets, monkeypatch)
    nets.runpytest("-k", "drifted", "--snapshot-update").assert_outcomes(passed=1, deselected=31)
    (nets.path / "summary.md").unlink()
    texts = {"conftest": OWN_CHECK, "test_asserts": ASSERTS, "test_own": TESTED_BY_IT}
    texts |= {"test_step": WATCHED, "test_waived": WAIVED, "test_warned": WARNED}
    texts |= {"test_broken": BROKEN, "test_import": "import nothing_there"}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    options = (
        *OPTIONS,
        "--continue-on-collection-errors",
        "--modelhealth-set=waive=nowhere:probe",
        "--modelhealth-replay=out/bundles",
    )
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of this run, by which syrupy is told
    # a process of its own: xdist gives its workers the sys.path that it found when it was loaded
    alone = nets.runpytest_subprocess(*options)
    expected = told(folder, alone.outlines)
    (process,) = {json.loads(one.read_text())[0] for one in folder.glob("[0-7].json")}
    folder.joinpath("out").rename(folder / "alone")
    (nets.path / "summary.md").unlink()

    result = nets.runpytest_subprocess("-n2", *options)
    found = told(folder, result.outlines)
    assert found.keys() == expected.keys()
    for who, said in expected.items():
        assert found[who] == said, who
        assert said
    assert result.parseoutcomes() == alone.parseoutcomes()
    text = result.stdout.str()
    assert "INTERNALERROR" not in text
    processes = {json.loads(one.read_text())[0] for one in folder.glob("[0-7].json")}
    assert process not in processes
    assert {f"[gw{n}]" in text for n in range(2)} == {True}
    result.stdout.fnmatch_lines(STALE)
    assert text.count("\n0 (peak): is over") == text.count("\n3.idle (wiring): ") == 1
    result.stdout.fnmatch_lines(["in tests: * and 3 more"])
    result.stdout.fnmatch_lines(["FAILED *::test_limit[[]over[]] *(peak): *"])
    assert "check peak is broken: it raised ZeroDivisionError: " in text


@pytest.mark.parametrize(
    ("conftest", "option", "message"),
    [
        ("", "--modelhealth-set=max_grad_norm=abc", "--modelhealth-set max_grad_norm: max_grad_"),
        ("def pytest_modelhealth_checks(): return [int]", "-v", "pytest_modelhealth_checks: buil"),
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
