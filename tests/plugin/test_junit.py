"""JUnit XML says of every test that inspected a model what became of it, Allure why it failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from junitparser.xunit2 import JUnitXml

SUITE = """
import nets
import pytest
import torch
from torch import nn
from pytest_modelhealth import ModelHealthError

def run(inspector, model):
    return inspector(model).run_inspection(nets.BATCH)

def test_healthy(inspector):
    run(inspector, nets.healthy())

def test_unhealthy(inspector):
    run(inspector, nets.healthy())
    run(inspector, nets.with_dead_relu())

@pytest.mark.modelhealth(min_samples=65)
def test_inconclusive(inspector):
    run(inspector, nets.healthy())
    run(inspector, nets.with_dead_relu())

def test_own_exception(inspector, request):
    request.node.user_properties.append(("verdict", "mine"))
    run(inspector, nets.with_nan())
    assert 1 == 2

def test_looks_on(inspector):
    with pytest.raises(ModelHealthError):
        run(inspector, nets.with_nan()).assert_healthy()

def test_different(inspector):
    inspector.compare(nets.healthy(), nets.with_nan(), nets.BATCH)

def test_equivalent(inspector):
    inspector.compare(nets.healthy(), nets.healthy(), nets.BATCH)

@pytest.fixture
def afterwards(inspector):
    yield
    run(inspector, nets.with_nan())

def test_torn_down(afterwards, inspector):
    run(inspector, nets.healthy())

@pytest.fixture
def before(inspector):
    run(inspector, nets.with_nan()).assert_healthy()

def test_set_up(before):
    pass

def test_hostile(inspector):
    name = '</property>"&\\x1b[31m\\n\\ud800]]>'
    model = nn.Sequential()
    model.add_module(name, nets.with_nan()[2])
    inspector(model).run_inspection(torch.randn(64, 8))

def test_missing(inspector, health_snapshot):
    assert run(inspector, nets.healthy()) == health_snapshot

def test_drifted(inspector, health_snapshot):
    model = nets.healthy()
    if health_snapshot.session.update_snapshots is False:
        model[2].weight.data *= 2
    assert run(inspector, model) == health_snapshot

def test_without():
    pass
"""
TOLD = {
    "test_healthy": {"verdict": "healthy"},
    "test_unhealthy": {"verdict": "unhealthy", "culprit": "1", "check": "dead_units"},
    "test_inconclusive": {"verdict": "inconclusive", "culprit": "1", "check": "dead_units"},
    "test_own_exception": {"verdict": "unhealthy", "culprit": "2", "check": "finite"},
    "test_looks_on": {"verdict": "unhealthy", "culprit": "2", "check": "finite"},
    "test_different": {"verdict": "different", "culprit": "2", "check": "comparison"},
    "test_equivalent": {"verdict": "equivalent"},
    "test_torn_down": {"verdict": "unhealthy", "culprit": "2", "check": "finite"},
    "test_set_up": {"verdict": "unhealthy", "culprit": "2", "check": "finite"},
    "test_hostile": {
        "verdict": "unhealthy",
        "culprit": '</property>"&\\x1b[31m\\n\\ud800]]>',
        "check": "finite",
    },
    "test_missing": {"verdict": "missing", "check": "drift"},
    "test_drifted": {"verdict": "drifted", "culprit": "2", "check": "drift"},
    "test_without": {},
}


def properties(path: str) -> dict[str, list[tuple[str, str]]]:
    """The properties of each test, in order."""
    suites = JUnitXml.fromfile(path)
    found: dict[str, list[tuple[str, str]]] = {}
    for suite in suites:
        for case in suite:
            told = [(one.name, one.value) for one in case.properties()]
            found.setdefault(case.name, []).extend(told)
    return found


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What Allure knows of each test: the content of its attachments by name."""
    found = {}
    for path in folder.glob("*-result.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        attachments = {
            one["name"]: (one["type"], (folder / one["source"]).read_bytes())
            for one in data.get("attachments", [])
        }
        found[data["name"]] = {
            "attachments": attachments,
            "parameters": data.get("parameters", []),
        }
    return found


def test_every_test_says_its_verdict(nets: pytest.Pytester) -> None:
    """The gravest of its results, with culprit and check, whether it failed by it or not.

    In Allure a failing test has what shows why, too.
    """
    nets.makepyfile(SUITE)
    recorded = nets.runpytest("-k", "drifted", "--snapshot-update", "--junitxml=junit.xml")
    recorded.assert_outcomes(passed=1, deselected=12)
    assert properties(str(nets.path / "junit.xml")) == {"test_drifted": [("verdict", "healthy")]}
    result = nets.runpytest("--junitxml=junit.xml", "--alluredir=out", "-W", "default")
    result.assert_outcomes(passed=6, failed=6, errors=2, warnings=1)
    found = properties(str(nets.path / "junit.xml"))
    assert found.pop("test_own_exception") == [
        ("verdict", "mine"),
        *TOLD["test_own_exception"].items(),
    ]
    others = {name: told for name, told in TOLD.items() if name != "test_own_exception"}
    assert {name: dict(told) for name, told in found.items()} == others
    assert all(len(dict(told)) == len(told) for told in found.values())

    allure = results(nets.path / "out")
    for test in ("test_unhealthy", "test_different", "test_hostile"):
        attached = allure[test]["attachments"]
        kind, text = attached["model health"]
        assert kind == "text/plain"
        start = "not equivalent: 2" if test == "test_different" else "unhealthy: "
        assert text.decode().startswith(start)
        kind, data = attached["report.json"]
        assert kind == "application/json"
        assert json.loads(data)["layers"]
        pictures = {name: body for name, (kind, body) in attached.items() if kind == "image/png"}
        assert pictures
        assert all(body.startswith(b"\x89PNG\r\n\x1a\n") for body in pictures.values())
        assert allure[test]["parameters"] == []  # these would make it another test in the history
    attached = allure["test_unhealthy"]["attachments"]
    assert {"culprit", "gradient flow"} <= set(attached)
    assert b"100%" in attached["1 beside 0"][1]
    assert not allure["test_healthy"]["attachments"]
    assert allure["test_without"] == {"attachments": {}, "parameters": []}


def test_it_is_switched_off_by_name(nets: pytest.Pytester) -> None:
    """The file is then pytest's own."""
    nets.makepyfile(SUITE.replace('"verdict", "mine"', '"owner", "me"'))
    options = ("-k", "unhealthy or own_", "--junitxml=junit.xml")
    nets.runpytest(*options, "-p", "no:modelhealth.junit").assert_outcomes(failed=2, deselected=11)
    assert properties(str(nets.path / "junit.xml")) == {
        "test_unhealthy": [],
        "test_own_exception": [("owner", "me")],
    }


def test_a_test_that_runs_twice_says_it_once(nets: pytest.Pytester) -> None:
    """What repeats tests, as rerunfailures does, keeps the properties of the item."""
    nets.makeconftest(
        """
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
    )
    nets.makepyfile(SUITE)
    nets.runpytest("-k", "test_unhealthy", "--junitxml=junit.xml").assert_outcomes(
        failed=1, deselected=12
    )
    told = properties(str(nets.path / "junit.xml"))["test_unhealthy"]
    assert told == list(TOLD["test_unhealthy"].items())


@pytest.mark.parametrize(
    "options",
    [
        ("--alluredir=out", "-p", "no:modelhealth.allure"),
        ("-p", "no:allure_pytest"),
        (),
    ],
    ids=["switched off", "without allure", "not asked for"],
)
def test_without_it_there_is_nothing(nets: pytest.Pytester, options: tuple[str, ...]) -> None:
    """Allure's own results hold nothing of ours, and what is not installed is not needed."""
    nets.makepyfile(SUITE)
    result = nets.runpytest(*options, "-k", "test_unhealthy")
    result.assert_outcomes(failed=1, deselected=12)
    assert "could not be shown" not in result.stdout.str()
    found = results(nets.path / "out")
    assert [one["attachments"] for one in found.values()] == (
        [{}] if "--alluredir=out" in options else []
    )
