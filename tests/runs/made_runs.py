"""Runs by the keys of docs/reference/run-format.md, of any size, without a model."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from pytest_modelhealth.runs.run import Run
from tests.runs.difference import made

BLOCK = ("norm1", "attention", "attention.query", "attention.key", "attention.value",
         "attention.out", "norm2", "mlp", "mlp.fc1", "mlp.gelu", "mlp.fc2")  # fmt: skip
TYPES = {"norm": "LayerNorm", "atte": "Attention", "mlp": "Mlp", "gelu": "GELU"}


def run_of(*tests: dict[str, Any]) -> Run:
    """A run of these tests."""
    environment = {"torch": "2.13.0", "python": "3.11.2", "platform": "Linux-6.1-x86_64"}
    head = {
        **made.HEAD,
        "created": "2026-11-22T20:15:00+00:00",
        "environment": {"pytest_modelhealth": "0.1.0", **environment},
        "exit_status": 1,
    }
    return Run(head, list(tests))


def made_test(name: str, *results: dict[str, Any], outcome: str = "passed") -> dict[str, Any]:
    """A test of these results."""
    return {
        "id": f"tests/test_models.py::{name}",
        "file": "tests/test_models.py",
        "line": 12,
        "outcome": outcome,
        "seconds": 0.318,
        "message": results[0]["headline"] if outcome == "failed" else "",
        "results": list(results),
    }


def names_of(layers: int) -> list[str]:
    """Names of about so many layers: a stack of blocks, in execution order."""
    names = ["embed"]
    for block in range(max(1, (layers - 4) // (len(BLOCK) + 1))):
        names += [f"blocks.{block}", *(f"blocks.{block}.{own}" for own in BLOCK)]
    return ["", *names[: layers - 3], "norm", "head"]


def inspection(
    names: list[str], culprit: str | None = None, *, seed: int = 0, **others: Any
) -> dict[str, Any]:
    """An inspection of layers of these names; the culprit's units are dead."""
    chance = random.Random(seed)
    layers = [_layer(name, chance, is_dead=name == culprit) for name in names]
    leaves = [n for n in names if n and not any(o.startswith(f"{n}.") for o in names)]
    way = ["input 0", *leaves, "loss"]
    at = way.index(culprit) if culprit in way else 0
    told: dict[str, Any] = {"headline": "healthy: no check objects to Encoder"}
    message = "64 of 64 units are dead: inactive for all 32 samples"
    if culprit is not None:
        line = f"unhealthy: {culprit} (dead_units): {message}"
        cause = "its bias (mean -10) holds them on the flat side"
        evidence = [{"label": culprit, **layers[-1]["tensors"][1]}]
        told = {"headline": line, "text": f"{line}\n\nlikely cause: {cause}\n"}
        told |= {"evidence": evidence}
    found = [made.finding(where=culprit, message=message)] if culprit is not None else []
    sizes = ("parameters", "trainable", "activation_bytes", "multiply_adds", "saved_bytes")
    totals = {size: sum(layer[size] for layer in layers) for size in sizes}
    return made.inspection(
        *found,
        place="tests/test_models.py:15",
        model="Encoder",
        samples=32,
        totals={**made.TOTALS, **totals, "layers": len(names)},
        layers=layers,
        flow={
            "edges": [[a, b, True, []] for a, b in pairwise(way)],
            "joins": [],
            "way": way[max(0, at - 3) : at + 3] if at else [],
            "exact": True,
        },
        **told,
        **others,
    )


def _type(name: str) -> str:
    own = name.rpartition(".")[2]
    if not own or own.isdigit():
        return "Block" if own else "Encoder"
    return next((kind for start, kind in TYPES.items() if own.startswith(start)), "Linear")


def _layer(name: str, chance: random.Random, *, is_dead: bool) -> dict[str, Any]:
    tensors = [_tensor("inputs", chance), _tensor("activations", chance, is_dead=is_dead)]
    tensors.append(_tensor("gradients", chance))
    owns = _type(name) in ("Linear", "LayerNorm")
    for own in ("weight", "bias") if owns else ():
        tensors += [_tensor(role, chance, own) for role in ("parameters", "parameter_gradients")]
    sizes = {"parameters": 4160, "trainable": 4160, "parameter_bytes": 16640}
    return made.layer(
        name,
        _type(name),
        label=name or "Encoder",
        tensors=tensors,
        called_at="model.py:21",
        **{size: count * owns for size, count in sizes.items()},
    )


def _tensor(
    role: str, chance: random.Random, name: str = "", *, is_dead: bool = False
) -> dict[str, Any]:
    count = 32768
    std = 0.0 if is_dead else chance.lognormvariate(0, 0.3)
    mean = 0.0 if is_dead else chance.gauss(0, 0.1)
    bins = [int(count / 2 ** (abs(i - 17) + 2) * chance.uniform(0.6, 1)) for i in range(20)]
    sides = {"negative": [] if is_dead else bins, "positive": [] if is_dead else [*bins[1:], 3]}
    return made.tensor(
        role,
        name,
        shape=[32, 16, 64],
        count=count,
        mean=mean,
        std=std,
        min=mean - 4 * std,
        max=mean + 4 * std,
        norm=std * count**0.5,
        zeros=count if is_dead else chance.randrange(4),
        dead=float(is_dead) if role == "activations" else None,
        bins={"lowest": -17, **sides, "sampled": True},
    )


def comparison(names: list[str], culprit: str, seed: int = 0) -> dict[str, Any]:
    """A comparison in which one layer computes something else, and what follows shows it."""
    chance = random.Random(seed)
    after = False
    layers = []
    for name in names:
        after = after or name == culprit
        error = (3e-4 if after else 2e-7) * chance.lognormvariate(0, 0.2)
        tensor = made.compared("activations", error, 2.2e-7, after, limit=16.0)
        layers.append(made.aligned(name, tensor, label=name or "Encoder", type=_type(name)))
    return made.comparison(
        *layers,
        culprit=culprit,
        violations=[made.finding("comparison", culprit)] * after,
        place="tests/test_models.py:31",
        model="Encoder",
        candidate="FastEncoder",
    )


def drift(names: list[str], culprit: str) -> dict[str, Any]:
    """A snapshot check in which one layer's output moved."""
    return {
        "kind": "drift",
        "verdict": "drifted",
        "headline": f"drifted: 1 of {len(names)} tensors: {culprit} computes something else",
        "text": f"drifted: {culprit}\n\n  mean  0.1 -> 0.25\n",
        "place": "tests/test_models.py:44",
        "model": "Encoder",
        "violations": [
            made.finding(check="drift", where=culprit, message="computes something else")
        ],
        "snapshot": "tests/__snapshots__/test_models/test_no_drift.health",
        "tensors": len(names),
        "story": f"{culprit} computes something else",
        "drifts": [
            {
                "layer": culprit,
                "label": culprit,
                "role": "activations",
                "statistic": "mean",
                "before": "0.1",
                "now": "0.25",
                "moved": "0.15 of its scale",
                "distance": 125000.0,
                "allowed": 32.0,
            }
        ],
        "changes": [],
    }
