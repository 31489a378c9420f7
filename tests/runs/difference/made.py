"""Runs written by hand, with no model: as small as the format lets them be."""

from __future__ import annotations

import copy
from typing import Any

from pytest_modelhealth.runs.run import FORMAT, FORMAT_VERSION, Run

HEAD = {
    "format": FORMAT,
    "format_version": FORMAT_VERSION,
    "created": "2026-01-01T00:00:00+00:00",
    "environment": {"pytest_modelhealth": "1", "torch": "2", "python": "3", "platform": "x"},
    "exit_status": 0,
    "ran": 1,
    "skipped": {},
    "notes": [],
}
TOTALS = {
    "layers": 3,
    "parameters": 100,
    "trainable": 100,
    "parameter_bytes": 400,
    "activation_bytes": 1000,
    "multiply_adds": 5000,
    "saved_bytes": 800,
    "peak_bytes": 3000,
}


def tensor(role: str = "activations", name: str = "", **other: Any) -> dict[str, Any]:
    """Return a tensor of a layer."""
    return {
        "role": role,
        "name": name,
        "shape": [8, 4],
        "dtype": "float32",
        "count": 32,
        "nan": 0,
        "inf": 0,
        "zeros": 0,
        "dead": 0.0 if role == "activations" else None,
        "mean": 0.5,
        "std": 1.0,
        "min": -2.0,
        "max": 2.5,
        "norm": 6.3,
        "bins": {"lowest": -1, "negative": [2, 8], "positive": [10, 12], "sampled": False},
        **other,
    }


def layer(name: str, type_: str = "Linear", **other: Any) -> dict[str, Any]:
    """Return a layer; its weights differ from layer to layer."""
    number = 1.0 + sum(map(ord, name)) / 1000
    own = [tensor("parameters", "weight", shape=[4, 8], max=number)] if name else []
    return {
        "name": name,
        "label": name or type_,
        "type": type_,
        "status": "observed",
        "reason": "",
        "functional": False,
        "calls": 1,
        "input_shape": [8, 8],
        "shape": [8, 4],
        "dtype": "float32",
        "device": "cpu",
        "parameters": 32 if name else 0,
        "trainable": 32 if name else 0,
        "tied": {},
        "parameter_bytes": 128,
        "activation_bytes": 500,
        "multiply_adds": 2500,
        "saved_bytes": 400,
        "defined_at": "",
        "called_at": "net.py:3",
        "tensors": [tensor("inputs"), tensor(), *own],
        **other,
    }


def finding(check: str = "dead_units", where: str = "fc1", **other: Any) -> dict[str, Any]:
    """Return a finding."""
    return {
        "check": check,
        "layer": where,
        "label": where,
        "role": "activations",
        "tensor": "",
        "value": 1.0,
        "limit": 0.8,
        "origin": "default",
        "message": f"{where} is dead",
        "cause": "",
        "details": [],
        "affected": [],
        "consequences": [],
        "defined_at": "",
        "called_at": "",
        **other,
    }


def inspection(*found: dict[str, Any], **other: Any) -> dict[str, Any]:
    """Return an inspection of a model of two layers, with these violations."""
    return {
        "kind": "inspection",
        "headline": "unhealthy: fc1" if found else "healthy",
        "text": "",
        "place": "test_a.py:3",
        "model": "Net",
        "of": "batch",
        "verdict": "unhealthy" if found else "healthy",
        "loss": 1.0,
        "samples": 8,
        "batches": 1,
        "backward": True,
        "notes": [],
        "violations": list(found),
        "warnings": [],
        "inconclusive": [],
        "waived": [],
        "totals": TOTALS,
        "layers": [layer("", "Net"), layer("fc1"), layer("fc2")],
        "flow": None,
        "course": None,
        **other,
    }


def compared(
    role: str = "activations",
    error: float | None = 3e-7,
    noise: float = 1e-7,
    diverged: bool = False,
    **other: Any,
) -> dict[str, Any]:
    """Return a tensor of a comparison."""
    size = error or 0.0
    return {
        "role": role,
        "name": "",
        "error": error,
        "max_abs": size * 3,
        "noise": noise,
        "ratio": None if error is None else error / noise,
        "limit": 8.0,
        "source": "measured",
        "diverged": diverged,
        "problem": "",
        "reference": 0.83111,
        "found": 0.83111 + size,
        "at": [0, 3, 17],
        **other,
    }


def aligned(name: str, *tensors: dict[str, Any], **other: Any) -> dict[str, Any]:
    """Return a layer that both models have."""
    return {
        "reference": name,
        "candidate": name,
        "label": name,
        "type": "Linear",
        "change": "matched",
        "diverged": any(one["diverged"] for one in tensors),
        "changed_parameters": [],
        "tensors": list(tensors),
        **other,
    }


def comparison(*layers: dict[str, Any], culprit: str = "", **other: Any) -> dict[str, Any]:
    """Return a comparison of two models, in which a layer computes something else."""
    divergence = {
        "layer": culprit,
        "candidate": culprit,
        "label": culprit,
        "kind": "computation",
        "story": f"{culprit} computes something else from the same inputs",
        "cause": "",
        "affected": [],
    }
    differs = f"{culprit} is the first layer whose outputs differ"
    return {
        "kind": "comparison",
        "verdict": "different" if culprit else "equivalent",
        "headline": f"different: {differs}" if culprit else "equivalent",
        "text": f"not equivalent: {differs}\n\n  error 3e-4\n" if culprit else "",
        "place": "test_a.py:3",
        "model": "Net",
        "candidate": "FastNet",
        "divergence": divergence if culprit else None,
        "violations": [finding("comparison", culprit, message=differs)] if culprit else [],
        "losses": [1.386, 1.3862],
        "basis": "16 times the noise of rounding",
        "notes": [],
        "layers": list(layers),
        **other,
    }


def test(*results: dict[str, Any], **other: Any) -> dict[str, Any]:
    """Return a test with these results."""
    good = ("healthy", "equivalent", "unchanged", "recorded")
    bad = any(one["verdict"] not in good for one in results)
    return {
        "id": "test_a.py::test_a",
        "file": "test_a.py",
        "line": 3,
        "outcome": "failed" if bad else "passed",
        "seconds": 0.1,
        "message": "unhealthy: fc1" if bad else "",
        "results": list(results),
        **other,
    }


test.__test__ = False  # type: ignore[attr-defined]


def run(*tests: dict[str, Any], **head: Any) -> Run:
    """Return a run of these tests, whose data is shared with no other."""
    return Run({**HEAD, **head}, copy.deepcopy(list(tests)))


def document(made: Run) -> dict[str, Any]:
    """Return what the file of a run holds."""
    return {**made.head, "tests": list(made.tests)}
