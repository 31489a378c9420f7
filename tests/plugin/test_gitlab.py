"""The code-quality file, by the rules of GitLab's documentation."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest

# https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["description", "check_name", "fingerprint", "severity", "location"],
        "properties": {
            "description": {"type": "string", "minLength": 1},
            "check_name": {"type": "string", "minLength": 1},
            "fingerprint": {"type": "string", "minLength": 1},
            "severity": {"enum": ["info", "minor", "major", "critical", "blocker"]},
            "location": {
                "type": "object",
                "required": ["path", "lines"],
                "properties": {
                    "path": {"type": "string", "pattern": r"^(?!\.?/)(?!\.\.)[^\\]+$"},
                    "lines": {
                        "type": "object",
                        "required": ["begin"],
                        "properties": {"begin": {"type": "integer", "minimum": 1}},
                    },
                },
            },
        },
    },
}

SUITE = """
import nets, pytest, torch
from torch import nn

class Scale(nn.Module):  # the class
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), float("nan")))

    def forward(self, x):
        return x * self.weight

def run(inspector, model):
    return inspector(model).run_inspection(nets.BATCH)  # the inspection

def test_healthy(inspector):
    run(inspector, nets.healthy())

def test_unhealthy(inspector):
    run(inspector, Scale())

def test_twice(inspector):
    run(inspector, nets.with_dead_relu())
    run(inspector, nets.with_dead_relu())

@pytest.mark.modelhealth(severity="warn")
def test_warned(inspector):
    run(inspector, nets.with_dead_relu())

def test_drift(inspector, health_snapshot):
    assert run(inspector, nets.healthy()) == health_snapshot  # the drift

def test_hostile(inspector):
    model = nn.Sequential()
    model.add_module("\\u202e</b>\\n\\ud800", Scale())
    run(inspector, model)

@pytest.mark.xfail
def test_expected(inspector):
    run(inspector, nets.with_nan())
"""
THE_LINE = {
    mark: next(n for n, one in enumerate(SUITE.splitlines(), 1) if one.endswith(f"# {mark}"))
    for mark in ("the class", "the inspection", "the drift")
}


def issues(path: Path) -> list[dict[str, Any]]:
    """What the file holds, which is as GitLab wants it."""
    found: list[dict[str, Any]] = json.loads(path.read_bytes())
    jsonschema.validate(found, SCHEMA)
    prints = [issue["fingerprint"] for issue in found]
    assert len(set(prints)) == len(prints)
    return found


def shown(issue: dict[str, Any]) -> tuple[str, str, str, int]:
    """Which check found it in which file and line, and how severe it is."""
    where = issue["location"]
    return issue["check_name"], issue["severity"], where["path"], where["lines"]["begin"]


def test_every_fault_is_an_issue(nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of failing tests, and what only warns in a passing one, below the checkout's folder."""
    monkeypatch.setenv("CI_PROJECT_DIR", str(nets.path.parent))
    nets.path.joinpath("test_suite.py").write_text(SUITE)
    result = nets.runpytest_inprocess("--modelhealth-codequality=new/gl.json", "-W", "default")
    result.assert_outcomes(passed=2, failed=4, xfailed=1, warnings=1)
    path = str(PurePosixPath(nets.path.name, "test_suite.py"))
    here, defined = THE_LINE["the inspection"], THE_LINE["the class"]
    found = issues(nets.path / "new" / "gl.json")
    assert sorted(shown(issue) for issue in found) == [
        ("modelhealth.dead_units", "major", path, here),
        ("modelhealth.dead_units", "major", path, here),
        ("modelhealth.dead_units", "minor", path, here),
        ("modelhealth.drift", "major", path, THE_LINE["the drift"]),
        ("modelhealth.finite", "major", path, defined),
        ("modelhealth.finite", "major", path, defined),
    ]
    told = [issue["description"] for issue in found]
    assert all(text.isprintable() for text in told)
    assert "[test_suite.py::test_hostile]" in next(text for text in told if "</b>" in text)


def test_a_finding_keeps_its_fingerprint_where_lines_move(nets: pytest.Pytester) -> None:
    """GitLab tells by it what is new and what was settled, which an empty list is too."""
    path = nets.path / "gl.json"
    options = ("--modelhealth-codequality=gl.json", "-k", "unhealthy or twice")
    prints = []
    for text in (SUITE, SUITE.replace("(4,)", "(1, 4)").replace("class Sc", "\n\n\nclass Sc")):
        nets.path.joinpath("test_suite.py").write_text(text)
        nets.runpytest(*options)
        prints.append({issue["fingerprint"]: shown(issue)[3] for issue in issues(path)})
    assert prints[0].keys() == prints[1].keys()
    assert prints[0] != prints[1]
    nets.runpytest(*options[:1], "-k", "inspects_nothing")
    assert issues(path) == []


@pytest.mark.parametrize("off", [False, True], ids=["not asked for", "switched off"])
def test_otherwise_there_is_no_file(
    nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, off: bool
) -> None:
    """Running under GitLab is not to ask for it, and it is switched off by name."""
    monkeypatch.setenv("GITLAB_CI", "true")
    nets.path.joinpath("test_suite.py").write_text(SUITE)
    options = ("-p", "no:modelhealth.gitlab", "--modelhealth-codequality=gl.json") if off else ()
    result = nets.runpytest("-k", "healthy", *options)
    assert not nets.path.joinpath("gl.json").exists()
    if off:
        assert "unrecognized arguments: --modelhealth-codequality" in result.stderr.str()
    else:
        result.assert_outcomes(passed=1, failed=1, deselected=5)
