"""A suite with every kind of outcome, run once with every destination on.

`ROWS` says what becomes of each test, who is told and where.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

MODELS = """
import torch
from torch import nn

class Scale(nn.Module):  # line: class
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), float("nan")))

    def forward(self, x):
        return x * self.weight

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.scale = Scale()

    def forward(self, x):
        return self.scale(self.first(x))  # line: call
"""
SUITE = """
import unittest

import nets
import pytest
import torch
from models import Net, Scale
from pytest_modelhealth import ModelHealthError, Verdict
from torch import nn

def run(inspector, model, batch=nets.BATCH):
    return inspector(model).run_inspection(batch)  # line: run

def test_called(inspector):
    run(inspector, Net())

def test_class(inspector):
    run(inspector, Scale(), nets.BATCH.repeat(1, 2))

def test_dead(inspector):
    inspector(nn.Sequential(*nets.with_dead_relu())).run_inspection(nets.BATCH)  # line: dead

def test_different(inspector):
    inspector.compare(nets.healthy(), nets.with_nan(), nets.BATCH)  # line: compare

@pytest.mark.modelhealth(min_samples=65, inconclusive="fail")
def test_too_few(inspector):
    run(inspector, nets.with_dead_relu())

@pytest.mark.parametrize("name", ["a,b:c%0A::error::x"])
def test_hostile(inspector, name):
    model = nn.Sequential()
    model.add_module('@octocat <b>|`*\\n::error::x\\n#1 50%"&\\x1b[31m\\ud800]]>\\u202e', Scale())
    run(inspector, model, nets.BATCH.repeat(1, 2))

def test_missing(inspector, health_snapshot):
    assert run(inspector, nets.healthy()) == health_snapshot  # line: missing

def test_drifted(inspector, health_snapshot):
    model = nets.healthy()
    if health_snapshot.session.update_snapshots is False:
        model[2].weight.data *= 2
    assert run(inspector, model) == health_snapshot  # line: drifted

def test_asserts(inspector):
    report = run(inspector, nets.with_nan())
    report.assert_healthy()  # line: asserts

def test_three(inspector):
    run(inspector, nets.healthy())
    run(inspector, nets.with_nan())
    inspector(nets.with_dead_relu()).run_inspection(nets.BATCH)  # line: third

@pytest.mark.modelhealth(max_grad_norm=1e-9)
def test_marked(inspector):
    run(inspector, nets.healthy())

def test_limit_of_a_call(inspector):
    inspector(nets.healthy(), max_grad_norm=1e-9).run_inspection(nets.BATCH)  # line: limit

def test_own_exception(inspector, request):
    request.node.user_properties.append(("verdict", "mine"))
    run(inspector, nets.with_nan())
    assert 1 == 2, "my own"

@pytest.mark.parametrize("path", ["a/b", "a:b"])
def test_parameter(inspector, path):
    run(inspector, nets.with_nan())

@pytest.fixture
def inspected(inspector):
    run(inspector, nets.with_nan())

def test_by_a_fixture(inspected):
    pass

@pytest.fixture
def asserted(inspector):
    run(inspector, nets.with_nan()).assert_healthy()

def test_set_up(asserted):
    pass

@pytest.fixture
def afterwards(inspector):
    yield
    run(inspector, nets.with_nan())

def test_torn_down(afterwards, inspector):
    run(inspector, nets.healthy())

def test_no_such_layer(inspector):
    inspector(nets.healthy(), layers="encoder.*").run_inspection(nets.BATCH)

class TestUnit(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def bind(self, inspector):
        self.inspector = inspector

    def test_unasked(self):
        run(self.inspector, nets.with_nan())

    def test_own_exception(self):
        run(self.inspector, nets.with_nan())
        self.assertEqual(1, 2)

    def test_skips(self):
        run(self.inspector, nets.with_nan())
        self.skipTest("not today")

class TestOther:
    @pytest.mark.xfail(raises=ModelHealthError, strict=True)
    def test_xfails(self, inspector):
        run(inspector, nets.with_nan())

    def test_skips(self, inspector):
        run(inspector, nets.with_nan())
        pytest.skip("not today")

    def test_fails_by_pytest(self, inspector):
        run(inspector, nets.healthy())
        pytest.fail("by hand")

class TestPasses:
    def test_healthy(self, inspector):
        run(inspector, nets.healthy())

    def test_equivalent(self, inspector):
        inspector.compare(nets.healthy(), nets.healthy(), nets.BATCH)

    def test_asked(self, inspector):
        report = run(inspector, nets.with_nan())
        assert report.verdict is Verdict.UNHEALTHY
        assert inspector.reports == [report]

    def test_raises(self, inspector):
        with pytest.raises(ModelHealthError, match="unhealthy"):
            run(inspector, nets.with_nan()).assert_healthy()

    @pytest.mark.modelhealth(min_samples=65)
    def test_inconclusive(self, inspector):
        run(inspector, nets.healthy())
        run(inspector, nets.with_dead_relu())

    @pytest.mark.modelhealth(severity="warn")
    def test_warned(self, inspector):
        run(inspector, nets.with_dead_relu())

    def test_without(self):
        pass
"""


class Row(NamedTuple):
    """What becomes of a test: how its line in the summary begins, and what destinations say."""

    summary: str = ""
    verdict: str = ""
    culprit: str = ""
    check: str = ""
    line: str = "run"
    """The mark of the line that is at fault."""


SICK = Row("unhealthy: 2 (finite): ", "unhealthy", "2", "finite")
LIMIT = Row("unhealthy: 0 (grad_norm): ", "unhealthy", "0", "grad_norm")
HOSTILE = r'@octocat <b>|`*\n::error::x\n#1 50%"&\x1b[31m\ud800]]>\u202e'
FAILED = {
    "test_called": Row("unhealthy: scale (finite): ", "unhealthy", "scale", "finite", "call"),
    "test_class": Row("unhealthy: Scale (finite): ", "unhealthy", "Scale", "finite", "class"),
    "test_dead": Row("unhealthy: 1 (dead_units): ", "unhealthy", "1", "dead_units", "dead"),
    "test_different": Row("not equivalent: 2: ", "different", "2", "comparison", "compare"),
    "test_too_few": Row("inconclusive: 1 (dead_units)", "inconclusive", "1", "dead_units"),
    "test_hostile[a,b:c%0A::error::x]": Row(
        "unhealthy: @octocat ", "unhealthy", HOSTILE, "finite", "class"
    ),
    "test_missing": Row("there is no snapshot", "missing", "", "drift", "missing"),
    "test_drifted": Row("drift in 2.weight ", "drifted", "2", "drift", "drifted"),
    "test_asserts": SICK,
    "test_three": SICK,
    "test_marked": LIMIT,
    "test_limit_of_a_call": LIMIT._replace(line="limit"),
    "test_own_exception": SICK._replace(summary="AssertionError: my own"),
    "test_parameter[a/b]": SICK,
    "test_parameter[a:b]": SICK,
    "test_by_a_fixture": SICK,
    "test_no_such_layer": Row("layers='encoder.*' (argument"),
    "TestUnit::test_unasked": SICK,
    "TestUnit::test_own_exception": SICK._replace(summary="AssertionError: 1 != 2"),
    "TestOther::test_fails_by_pytest": Row("Failed: by hand", "healthy"),
    "test_set_up": SICK,
    "test_torn_down": SICK,
}
"""Those that fail; the last two are errors."""
OTHERS = {
    "TestUnit::test_skips": SICK,
    "TestOther::test_xfails": SICK,
    "TestOther::test_skips": SICK,
    "TestPasses::test_healthy": Row(verdict="healthy"),
    "TestPasses::test_equivalent": Row(verdict="equivalent"),
    "TestPasses::test_asked": SICK,
    "TestPasses::test_raises": SICK,
    "TestPasses::test_inconclusive": Row("", "inconclusive", "1", "dead_units"),
    "TestPasses::test_warned": Row(verdict="healthy"),
    "TestPasses::test_without": Row(),
}
"""Those that pass, are skipped or are expected to fail."""
OPTIONS = shlex.split("""
-p no:cacheprovider -W default -rA --modelhealth-artifacts=out/artifacts --html=out/report.html
--self-contained-html --junitxml=out/junit.xml --alluredir=out/allure
--modelhealth-json=out/run.json --modelhealth-html=out/page.html
--modelhealth-codequality=out/gitlab.json
""")
"""Every destination; what a run under GitHub's variables says comes by itself."""


def place(mark: str) -> tuple[str, int]:
    """Return the file and the number of the line with a mark."""
    for file, text in (("models.py", MODELS), ("test_every.py", SUITE)):
        lines = [n for n, one in enumerate(text.splitlines(), 1) if one.endswith(f"# line: {mark}")]
        if lines:
            return file, lines[0]
    raise KeyError(mark)


@dataclass(frozen=True)
class Run:
    """What a run of `SUITE` gave."""

    folder: Path
    result: pytest.RunResult

    @property
    def text(self) -> str:
        """What stood in the terminal."""
        return self.result.stdout.str()

    @property
    def out(self) -> Path:
        """The folder of all destinations."""
        return self.folder / "out"

    @property
    def run(self) -> dict[str, Any]:
        """The run as data, with its tests by name."""
        data = json.loads(self.out.joinpath("run.json").read_text(), parse_constant=pytest.fail)
        tests = {test["id"].partition("::")[2]: test for test in data["tests"]}
        return data | {"tests": tests}

    def block(self, title: str) -> str:
        """What stands below one test's title in the section of failures or errors."""
        pattern = rf"^_+ {re.escape(title)} _+\n(.*?)(?=^(_+|=+) )"
        found = re.search(pattern, self.text, re.MULTILINE | re.DOTALL)
        assert found, f"no {title!r} in:\n{self.text}"
        return found[1]


def project(nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder of the suite below a checkout of GitHub and GitLab, and enter it."""
    folder = nets.mkdir("project")
    texts = {"models": MODELS, "test_every": SUITE, "nets": (nets.path / "nets.py").read_text()}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    nets.syspathinsert(folder)
    monkeypatch.chdir(folder)
    variables = {"GITHUB_WORKSPACE": nets.path, "GITHUB_STEP_SUMMARY": nets.path / "summary.md"}
    for name, value in (
        {"GITHUB_ACTIONS": "true", "CI_PROJECT_DIR": nets.path} | variables
    ).items():
        monkeypatch.setenv(name, str(value))
    return folder


def properties(path: Path) -> dict[str, list[tuple[str, str]]]:
    """The properties of each test in JUnit's XML, in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        inside = case.get("classname", "").rpartition(".")[2]
        name = f"{inside}::{case.get('name')}" if inside.startswith("Test") else case.get("name")
        pairs = [(one.get("name", ""), one.get("value", "")) for one in case.iter("property")]
        found.setdefault(name or "", []).extend(pairs)
    return found


def attached(folder: Path) -> dict[str, dict[str, tuple[str, bytes]]]:
    """What Allure has of each test: type and content of its attachments by name."""
    found = {}
    for path in folder.glob("*-result.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        # of ours it has none: they would make it another test in the history
        assert not [one for one in data.get("parameters", []) if one["name"] in Row._fields]
        classes = re.findall(r"\.(Test\w+)", data["fullName"])
        found["::".join([*classes, data["name"]])] = {
            one["name"]: (one["type"], (folder / one["source"]).read_bytes())
            for one in data.get("attachments", [])
        }
    return found
