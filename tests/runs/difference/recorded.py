"""Runs made of real inspections, recorded as the plugin records them."""

from __future__ import annotations

import json
from typing import Any

import torch

from pytest_modelhealth import Inspector
from pytest_modelhealth.runs.recording import record
from pytest_modelhealth.runs.run import FORMAT, FORMAT_VERSION, Run
from tests.runs.difference.pairs import Side

HEAD = {
    "format": FORMAT,
    "format_version": FORMAT_VERSION,
    "created": "2026-01-01T00:00:00+00:00",
    "environment": {"pytest_modelhealth": "1", "torch": "2", "python": "3", "platform": "x"},
    "exit_status": 0,
    "notes": [],
}


def inspected(side: Side, seed: int = 0) -> dict[str, Any]:
    """Return what the file of a run has of the inspection of a side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(side.threads)
    torch.manual_seed(seed)
    try:
        report = Inspector(side.model).run_inspection(
            side.inputs, target=side.target, loss=side.loss
        )
    finally:
        torch.set_num_threads(threads)
    result: dict[str, Any] = json.loads(json.dumps(record(report, "test_a.py:1"), allow_nan=False))
    return result


def test_of(*results: dict[str, Any], name: str = "test_a.py::test_a") -> dict[str, Any]:
    """Return a test with these results."""
    bad = any(result["verdict"] == "unhealthy" for result in results)
    return {
        "id": name,
        "file": name.partition("::")[0],
        "line": 1,
        "outcome": "failed" if bad else "passed",
        "seconds": 0.1,
        "message": "unhealthy" if bad else "",
        "results": list(results),
    }


def run_of(*tests: dict[str, Any], **head: Any) -> Run:
    """Return a run of these tests."""
    return Run({**HEAD, **head}, list(tests))
