"""Who is told of a run, and what: files, pytest-html, JUnit, Allure, GitLab, GitHub, a conftest.py.

`outcomes` has the suite that all are told of in one run.
"""

from __future__ import annotations

import base64
import html
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch

from pytest_modelhealth.plugin import recording
from tests.plugin.outcomes import (
    FAILED,
    OTHERS,
    SUITE,
    Run,
    attached,
    place,
    project,
    properties,
)
from tests.plugin.test_github import Page, commands

UNHEALTHY = "def test_it(inspector): inspector(nets.with_nan()).run_inspection(nets.BATCH)\n"
PNG = b"\x89PNG\r\n\x1a\n"
PICTURED = {name: row for name, row in FAILED.items() if row.check not in ("", "drift")}
"""Those that fail with an unhealthy or inconclusive report, or a comparison."""


def test_each_failing_test_has_a_folder(everything: Run) -> None:
    """Of figures, the text as it was shown, and all numbers as strict JSON.

    Ids that differ in a forbidden character only do not share one; passing tests have none.
    """
    root = everything.out / "artifacts"
    folders = {
        re.sub(r"^test_every.py-|-[0-9a-f]{8}$", "", one.name): one for one in root.iterdir()
    }
    names = [re.sub(r"[^\w.]+", "-", name).strip("-") for name in PICTURED if "too_few" not in name]
    assert folders.keys() == {*names}
    assert len([*root.iterdir()]) == len(names) == 17
    assert f"modelhealth: figures of 17 tests in {root}" in everything.text.splitlines()
    for name, folder in folders.items():
        pictures = {path.name: path.read_bytes() for path in folder.glob("*.png")}
        wanted = {"error_depth.png"} if name == "test_different" else {"culprit.png"}
        assert wanted <= pictures.keys(), name
        assert all(picture.startswith(PNG) for picture in pictures.values())
        data = json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)
        assert data["layers"]
    shown = [
        one[4:] for one in everything.block("test_dead").splitlines() if one.startswith("E   ")
    ]
    text = folders["test_dead"].joinpath("failure.txt").read_text(encoding="utf-8")
    assert shown[:5] == [one for one in text.splitlines() if one][:5]
    assert "█" in text
    data = json.loads(folders["test_dead"].joinpath("report.json").read_text())
    violation = data["violations"][0]
    assert violation["defined_at"].partition(":")[0] == inspect.getsourcefile(torch.nn.ReLU)
    assert violation["called_at"] == ""  # by the inspection
    compared = json.loads(folders["test_different"].joinpath("report.json").read_text())
    assert compared["divergence"]["layer"] == "2"
    assert any(one["ratio"] is None for one in compared["layers"][-1]["tensors"])  # infinite


def test_the_html_report_shows_the_same_pictures(everything: Run) -> None:
    """pytest-html embeds each figure that was written, and no other."""
    text = html.unescape((everything.out / "report.html").read_text())
    embedded = {base64.b64decode(data) for data in re.findall(r"image/png;base64,([^\"]+)", text)}
    assert embedded == {path.read_bytes() for path in everything.out.glob("artifacts/*/*.png")}


def test_junit_says_of_every_test_its_verdict(everything: Run) -> None:
    """The gravest of its results, with culprit and check, whether it failed by it or not.

    What a CI server lists for a failed test is the headline, and the details are its text.
    """
    path = everything.out / "junit.xml"
    told = properties(path)
    assert told["test_own_exception"].pop(0) == ("verdict", "mine")
    expected = {
        name: [(key, getattr(row, key)) for key in ("verdict", "culprit", "check")]
        for name, row in (FAILED | OTHERS).items()
    }
    assert told == {name: [p for p in pairs if p[1]] for name, pairs in expected.items()}
    message = re.search(
        r'name="test_asserts".*?<failure message="(.*?)">(.*?)<', path.read_text("utf-8"), re.DOTALL
    )
    assert message is not None
    assert message[1].startswith(FAILED["test_asserts"].summary)
    assert "likely cause" in message[2]


def test_allure_has_text_figures_and_numbers(everything: Run) -> None:
    """Of failing tests alone."""
    allure = attached(everything.out / "allure")
    for name in ("test_dead", "test_different", "test_hostile[a,b:c%0A::error::x]"):
        kind, text = allure[name]["model health"]
        assert kind == "text/plain"
        assert text.decode().startswith(("unhealthy: ", "not equivalent: 2"))
        kind, data = allure[name]["report.json"]
        assert kind == "application/json"
        assert json.loads(data)["layers"]
        pictures = [body for kind, body in allure[name].values() if kind == "image/png"]
        assert pictures
        assert all(body.startswith(PNG) for body in pictures)
    assert {"culprit", "gradient flow"} <= allure["test_dead"].keys()
    assert b"100%" in allure["test_dead"]["1 beside 0"][1]
    assert allure["TestPasses::test_healthy"] == allure["TestPasses::test_without"] == {}


# https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["description", "check_name", "fingerprint", "severity", "location"],
        "properties": {
            **{key: {"minLength": 1} for key in ("description", "check_name", "fingerprint")},
            "severity": {"enum": ["info", "minor", "major", "critical", "blocker"]},
            "location": {
                "type": "object",
                "required": ["path", "lines"],
                "properties": {
                    "path": {"type": "string", "pattern": r"^(?!\.?/)(?!\.\.)[^\\]+$"},
                    "lines": {
                        "required": ["begin"],
                        "properties": {"begin": {"type": "integer", "minimum": 1}},
                    },
                },
            },
        },
    },
}


def issues(path: Path) -> dict[str, tuple[str, str, str, str, int]]:
    """What the file holds, by fingerprint: test, check, severity, path, line."""
    found = json.loads(path.read_bytes())
    jsonschema.validate(found, SCHEMA)
    assert all(one["description"].isprintable() for one in found)
    told = {}
    for one in found:
        test = one["description"].rpartition(" [test_every.py::")[2].removesuffix("]")
        check, where = one["check_name"].removeprefix("modelhealth."), one["location"]
        told[one["fingerprint"]] = (
            test,
            check,
            one["severity"],
            where["path"],
            where["lines"]["begin"],
        )
    assert len(told) == len(found)
    return told


def test_gitlab_gets_an_issue_for_every_fault(everything: Run) -> None:
    """Those of failing tests, and what only warns in a passing one, below the checkout's folder."""
    found = {*issues(everything.out / "gitlab.json").values()}
    file, line = place("run")
    assert ("TestPasses::test_warned", "dead_units", "minor", f"project/{file}", line) in found
    for name, row in FAILED.items():
        file, line = place(row.line)
        if row.check:
            assert (name, row.check, "major", f"project/{file}", line) in found
    assert {one[0] for one in found} == {"TestPasses::test_warned", *FAILED}
    by_itself = [name for name, row in FAILED.items() if not row.check]
    assert by_itself == [one[0] for one in sorted(found, reverse=True) if one[1] == "exception"]


def test_github_annotates_the_first_and_sums_up_all(everything: Run) -> None:
    """Once each, at the call, the class or the inspection; no name is obeyed."""
    faulty = {name: row for name, row in FAILED.items() if row.check}
    annotated = commands(everything.text)
    assert [one.name for one in annotated] == ["error"] * 10
    for (name, row), (_, said, message) in zip(faulty.items(), annotated, strict=False):
        file, line = place(row.line)
        assert (said["file"], said["line"]) == (f"project/{file}", str(line)), name
        culprit = f"{row.culprit} ({row.check})" if row.culprit else row.check
        assert said["title"] == f"test_every.py::{name}: {culprit}"
        assert message.startswith(f"{row.verdict}: {culprit}: ")
    assert "\nlikely cause: " in annotated[2].message

    page = Page.of((everything.folder.parent / "summary.md").read_text(encoding="utf-8"))
    told = "22 tests failed, 30 of 32 tests inspected a model, exit status 1"
    assert page.heading == f"Model health: {told}"
    assert page.summaries == [row[0] for row in page.rows if row[3] != "exception"]
    rows = {row[0].partition("::")[2]: tuple(row[1:4]) for row in page.rows}
    by_itself = dict.fromkeys(FAILED.keys() - faulty, ("failed", "", "exception"))
    assert rows == by_itself | {name: row[1:4] for name, row in faulty.items()}
    assert page.strange == set()


def test_a_run_is_data_and_a_page(everything: Run) -> None:
    """What inspected or failed is there, with outcome, verdicts and the lines that made them."""
    run = everything.run
    assert run["tests"].keys() == (FAILED | OTHERS).keys() - {"TestPasses::test_without"}
    assert run["ran"] == len(FAILED | OTHERS)
    crash = run["tests"]["test_no_such_layer"]
    assert (crash["results"], crash["message"][:18]) == ([], "layers='encoder.*'")
    outcomes = {name: test["outcome"] for name, test in run["tests"].items()}
    assert {name for name, outcome in outcomes.items() if outcome in ("failed", "error")} == {
        *FAILED
    }
    assert [outcomes[name] for name in ("test_set_up", "test_torn_down")] == ["error", "error"]
    assert outcomes["TestOther::test_xfails"] == "xfailed"
    assert outcomes["TestOther::test_skips"] == "skipped"
    verdicts = {n: [one["verdict"] for one in test["results"]] for n, test in run["tests"].items()}
    assert verdicts["test_three"] == ["healthy", "unhealthy", "unhealthy"]
    assert verdicts["test_drifted"] == ["healthy", "drifted"]
    assert run["tests"]["test_own_exception"]["message"] == "my own"
    lines = SUITE.splitlines()
    for name, mark in (("test_dead", "dead"), ("test_missing", "missing")):
        test = run["tests"][name]
        assert test["results"][-1]["place"] == f"test_every.py:{place(mark)[1]}"
        assert lines[test["line"] - 1].startswith(f"def {name}(")
    assert (run["format_version"], run["exit_status"]) == (2, 1)
    assert all(run["environment"].values())

    page = (everything.out / "page.html").read_text(encoding="ascii")
    assert page.endswith("</html>\n")
    assert page.index("test_class") < page.index("TestPasses::test_healthy")
    assert {*re.findall(r"test_every\.py::([\w:]+)", page)} >= {
        "test_dead",
        "TestPasses::test_asked",
    }
    held = " ".join(re.findall('data-of="([^"]*)', page)).split()
    assert len([name for name in held if ":" not in name]) >= len(run["tests"])


def test_a_finding_keeps_its_fingerprint_where_lines_move(
    nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GitLab tells by it what is new and what was settled, which an empty list is too.

    What repeats tests keeps the properties of the item: JUnit has each once.
    """
    folder = project(nets, monkeypatch)
    (folder / "conftest.py").write_text(TWICE)
    options = ("--modelhealth-codequality=gl.json", "--junitxml=junit.xml", "-k", "dead or three")
    prints = []
    for text in (SUITE, SUITE.replace("def test_dead", "\n\n\ndef test_dead")):
        (folder / "test_every.py").write_text(text)
        nets.runpytest(*options)
        prints.append({key: one[-1] for key, one in issues(folder / "gl.json").items()})
    assert prints[0].keys() == prints[1].keys()
    assert prints[0] != prints[1]
    assert [key for key, _ in properties(folder / "junit.xml")["test_dead"]] == [
        "verdict", "culprit", "check"
    ]  # fmt: skip
    nets.runpytest(*options[:2], "-k", "without")
    assert issues(folder / "gl.json") == {}


TWICE = """
import pytest
from _pytest.runner import runtestprotocol

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=nextitem, log=False)
    runtestprotocol(item, nextitem=nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""
ELSEWHERE = ("github", "junit", "allure", "html", "terminal")


def test_each_is_switched_off_by_name(
    nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure stands, and what others write is their own; no file is asked for any more.

    Elsewhere than on GitHub, or on GitLab without the option, nothing is written.
    """
    folder = project(nets, monkeypatch)
    switches = [word for name in ELSEWHERE for word in ("-p", f"no:modelhealth.{name}")]
    others = ("--junitxml=junit.xml", "--alluredir=out", "--html=page.html")
    result = nets.runpytest(*switches, *others, "-k", "own_ or dead")
    result.assert_outcomes(failed=3, deselected=29)
    assert commands(result.stdout.str()) == []
    assert not (nets.path / "summary.md").exists()
    assert "- modelhealth" not in result.stdout.str()
    told = properties(folder / "junit.xml")
    assert (told["test_dead"], told["test_own_exception"]) == ([], [("verdict", "mine")])
    assert [*attached(folder / "out").values()] == [{}, {}, {}]
    assert "image/png" not in (folder / "page.html").read_text()
    before = {*folder.iterdir()}
    monkeypatch.setenv("GITHUB_ACTIONS", "false")
    monkeypatch.setenv("GITLAB_CI", "true")
    elsewhere = nets.runpytest("-k", "dead", "-p", "no:allure_pytest")  # which is not needed
    elsewhere.assert_outcomes(failed=1, deselected=31)
    assert commands(elsewhere.stdout.str()) == []
    assert {*folder.iterdir()} == before
    off = nets.runpytest("-p", "no:modelhealth.gitlab", "--modelhealth-codequality=gl.json")
    assert "unrecognized arguments: --modelhealth-codequality" in off.stderr.str()


SUBTESTS = """
import unittest
import nets
import pytest

def test_sub(inspector, subtests):
    for make in (nets.with_nan, nets.healthy, nets.with_dead_relu):
        with subtests.test(make=make.__name__):
            inspector(make()).run_inspection(nets.BATCH).assert_healthy()

def test_other_reason(inspector, subtests):
    with subtests.test("unhealthy"):
        inspector(nets.with_nan()).run_inspection(nets.BATCH).assert_healthy()
    with subtests.test("by itself"):
        assert 1 == 2, "my own"

class TestUnit(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def bind(self, inspector):
        self.inspector = inspector

    def test_unit(self):
        for make in (nets.with_nan, nets.with_dead_relu):
            with self.subTest(make=make.__name__):
                self.inspector(make()).run_inspection(nets.BATCH).assert_healthy()
"""


@pytest.mark.skipif(pytest.version_tuple < (9, 0), reason="pytest has subtests from 9.0 on")
def test_each_failing_subtest_keeps_what_is_its_own(nets: pytest.Pytester) -> None:
    """A folder each, and a section below its own failure."""
    nets.makepyfile(SUBTESTS)
    result = nets.runpytest("--modelhealth-artifacts=out")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    figures = {
        re.sub(r"^.*py-|-[0-9a-f]{8}", "", folder.name): (folder / "culprit.png").read_bytes()
        for folder in nets.path.joinpath("out").iterdir()
    }
    names = ["TestUnit-test_unit", "TestUnit-test_unit-2", "test_other_reason"]
    assert sorted(figures) == [*names, "test_sub", "test_sub-2"]
    assert figures["test_sub"] == figures["TestUnit-test_unit"] != figures["test_sub-2"]
    assert f"modelhealth: figures of 3 tests in {nets.path / 'out'}" in result.outlines
    assert result.stdout.str().count("modelhealth: 2 beside 0") == 3  # "my own" has none


OWN = """
import json

def pytest_modelhealth_attach(item, report, evidence):
    text = f"{item.name} {evidence.report.verdict} {sorted(evidence.figures)}"
    report.sections.append(("mine", text))
    if "burns" in item.name:
        raise OSError("the disk is on fire")

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
"""A conftest.py with destinations, of which some raise."""


def test_a_conftest_can_add_a_destination(nets: pytest.Pytester) -> None:
    """It gets the report, the text, the figures, and the run as a whole.

    What raises costs a line, and neither a failure nor another destination.
    """
    nets.makeconftest(OWN)
    nets.makepyfile(f"import nets\n{UNHEALTHY}{UNHEALTHY.replace('_it', '_burns')}")
    result = nets.runpytest("-W", "error")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines("test_it unhealthy [[]'culprit', *")
    result.stdout.fnmatch_lines(
        [
            "E   unhealthy: 2 (finite)*",
            "the evidence could not be shown: OSError: the disk is on fire",
            "modelhealth: broken_destination failed: OSError*No space left*",
        ]
    )
    assert len(json.loads((nets.path / "run.json").read_text())["tests"]) == 2


def test_what_cannot_be_written_costs_a_line(
    nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost directory, a full disk, a summary that is a folder: each test fails as it would."""
    folder = project(nets, monkeypatch)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder))  # root may write any file
    first, _, rest = SUITE.partition("def test_parameter(inspector, path):\n")
    lost = f"{first}def test_lost(inspector, path):\n{LOST}{rest}"
    (folder / "test_every.py").write_text(lost)
    options = ("--modelhealth-artifacts=out", "-k", "lost")
    for filters, warned in (("default", 1), ("error", 0)):
        result = nets.runpytest(*options, "-W", filters)
        result.assert_outcomes(failed=2, warnings=warned, deselected=30)
        assert ("figures could not be written" in result.stdout.str()) == bool(warned)
        assert "modelhealth: figures of" not in result.stdout.str()
        assert len(commands(result.stdout.str())) == 2
        result.stdout.fnmatch_lines("modelhealth: the summary for GitHub could not be written: *")
        (folder / "out").unlink()

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording, "json", SimpleNamespace(dump=full))
    result = nets.runpytest("-k", "test_healthy")
    result.assert_outcomes(passed=1, deselected=31)
    result.stdout.fnmatch_lines("modelhealth: *test_healthy could not be recorded: *No space left*")


LOST = """    import shutil
    shutil.rmtree("out", ignore_errors=True)
    open("out", "w").close()
"""


@pytest.mark.slow
def test_what_a_test_destroys_is_named(
    nets: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deleted folder and a dead worker cost their own tests, each by its name, and no other."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
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
            for folder in pathlib.Path(tempfile.gettempdir()).glob(".modelhealth-*"):
                shutil.rmtree(folder)

        def test_dies(inspector):
            run(inspector)
            os._exit(1)

        def test_after(inspector):
            run(inspector)
        """
    )
    options = ("-n1", "-p", "no:cacheprovider", "--modelhealth-json=run.json")
    result = nets.runpytest_subprocess(*options)
    result.assert_outcomes(passed=3, failed=1)
    run = json.loads((nets.path / "run.json").read_text())
    ids = [test["id"].partition("::")[2] for test in run["tests"]]
    assert ids == ["test_deletes", "test_dies", "test_after"]
    dead, deleted = run["notes"]
    assert dead == "test_it.py::test_dies ended its process: what it inspected is lost"
    assert deleted.startswith("test_it.py::test_before is missing: ")
    result.stdout.fnmatch_lines([f"modelhealth: {dead}", f"modelhealth: {deleted}"])
    assert not list(tmp_path.glob(".modelhealth-*"))
