"""Allure's results hold the evidence of a failing test, read back from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SUITE = """
import nets
import torch
from torch import nn

def run(inspector, model, batch=nets.BATCH):
    return inspector(model).run_inspection(batch)

def test_healthy(inspector):
    run(inspector, nets.healthy())

def test_unhealthy(inspector):
    run(inspector, nets.with_dead_relu())

def test_different(inspector):
    inspector.compare(nets.healthy(), nets.with_nan(), nets.BATCH)

def test_hostile(inspector):
    model = nn.Sequential()
    model.add_module('<img src=x>"\\n\\ud800', nets.with_nan()[2])
    run(inspector, model, torch.randn(64, 8))

def test_without():
    assert 1 == 2
"""
OURS = ("verdict", "culprit", "check")
PNG = b"\x89PNG\r\n\x1a\n"


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What Allure knows of each test: our labels, and the content of its attachments by name."""
    found = {}
    for path in folder.glob("*-result.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        labels = [(label["name"], label["value"]) for label in data["labels"]]
        attachments = {
            one["name"]: (one["type"], (folder / one["source"]).read_bytes())
            for one in data.get("attachments", [])
        }
        found[data["name"]] = {
            "labels": [label for label in labels if label[0] in OURS],
            "attachments": attachments,
            "parameters": data.get("parameters", []),
        }
    return found


def test_a_failing_test_has_text_figures_and_data(nets: pytest.Pytester) -> None:
    """Each test that inspected has its verdict as a label, and a failing one what shows why."""
    nets.makepyfile(SUITE)
    nets.runpytest_inprocess("--alluredir=out").assert_outcomes(passed=1, failed=4)
    found = results(nets.path / "out")
    assert found["test_healthy"]["labels"] == [("verdict", "healthy")]
    assert found["test_unhealthy"]["labels"] == list(
        zip(OURS, ("unhealthy", "1", "dead_units"), strict=True)
    )
    assert found["test_different"]["labels"] == list(
        zip(OURS, ("different", "2", "comparison"), strict=True)
    )
    assert found["test_hostile"]["labels"][1] == ("culprit", '<img src=x>"\\n\\ud800')
    assert found["test_without"] == {"labels": [], "attachments": {}, "parameters": []}
    for test in ("test_unhealthy", "test_different", "test_hostile"):
        attached = found[test]["attachments"]
        kind, text = attached["model health"]
        assert kind == "text/plain"
        assert (
            text.decode()
            .splitlines()[0]
            .startswith("not equivalent: 2" if test == "test_different" else "unhealthy: ")
        )
        kind, data = attached["report.json"]
        assert kind == "application/json"
        assert json.loads(data)["layers"]
        pictures = {name: body for name, (kind, body) in attached.items() if kind == "image/png"}
        assert pictures
        assert all(body.startswith(PNG) for body in pictures.values())
        assert found[test]["parameters"] == []  # these would make it another test in the history
    assert {"culprit", "predecessor", "gradient flow"} <= set(
        found["test_unhealthy"]["attachments"]
    )
    assert b"100%" in found["test_unhealthy"]["attachments"]["1 beside 0"][1]
    assert not found["test_healthy"]["attachments"]


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
    result.assert_outcomes(failed=1, deselected=4)
    assert "could not be shown" not in result.stdout.str()
    found = results(nets.path / "out")
    assert [(one["labels"], one["attachments"]) for one in found.values()] == (
        [([], {})] if "--alluredir=out" in options else []
    )
