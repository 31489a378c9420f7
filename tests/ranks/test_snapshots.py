"""A snapshot and a comparison know no difference between one process and several."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from corpus.ranks.spread import batch, distributed, loss, net, share, sharing
from pytest_modelhealth import HealthReport, Inspector, compare
from pytest_modelhealth.snapshot.drift import detect_drift
from pytest_modelhealth.snapshot.file_format import dump, load
from pytest_modelhealth.snapshot.snapshot import Snapshot, from_observation
from tests.ranks.engines import inspected
from tests.ranks.launching import on_ranks

ENGINES = ("ddp", "fsdp", "fsdp+tp")


def scaled(factor: float = 1.0) -> nn.Module:
    """Return the model with one layer scaled."""
    model = net()
    with torch.no_grad():
        model.second.weight.mul_(factor)
    return model


def calibrated(model: nn.Module, engine: str = "") -> HealthReport:
    """Return a report with its noise measured."""
    size = dist.get_world_size() if engine else 1
    shares = sharing(engine, size) if engine else 1
    rank = dist.get_rank() * shares // size if engine else 0
    x, y = share(batch(), rank, shares)
    return Inspector(model, calibrate=True).run_inspection(x, y, loss=loss)


def read() -> dict[str, Any]:
    """Return what this rank sees of the model under each engine, and of one that has drifted."""
    found: dict[str, Any] = {e: pickle.dumps((inspected(e, 8, 0), None)) for e in ENGINES}
    for name, factor in (("calibrated", 1.0), ("drifted", 1.001)):
        report = calibrated(distributed(scaled(factor), "ddp"), "ddp")
        found[name] = pickle.dumps((report.observation, report._noise))
        found[f"{name} noise"] = report._noise
    return found


def snapshot(observation: Any, noise: Any) -> Snapshot:
    """Return what is read back of a snapshot's file."""
    return load(dump(from_observation(observation, noise)))


def test_a_snapshot_of_one_process_is_read_on_four_ranks() -> None:
    """Nothing has drifted under any engine; a layer scaled by 1.001 has."""
    ranks = on_ranks(4, read)
    plain = calibrated(net())
    before = snapshot(plain.observation, plain._noise)
    seen = {name: pickle.loads(ranks[0][name]) for name in (*ENGINES, "calibrated", "drifted")}
    for name in (*ENGINES, "calibrated"):
        report = detect_drift(before, from_observation(*seen[name]))
        assert not report.drifts, (name, report.drifts[:3])
    drifts = detect_drift(before, from_observation(*seen["drifted"])).drifts
    assert "second" in {drift.label for drift in drifts}
    assert "first" not in {d.label for d in drifts if d.role == "activations"}
    again = detect_drift(snapshot(*seen["calibrated"]), from_observation(plain.observation, None))
    assert not again.drifts
    assert all(rank["calibrated noise"] == ranks[0]["calibrated noise"] for rank in ranks)


def compared() -> list[tuple[bool, str]]:
    """Return the verdicts of this rank on the plain model and others."""
    x, y = batch()
    found = []
    for engine in ("ddp", "fsdp", "tp"):
        for factor in (1.0, 1.01):
            other = distributed(scaled(factor), engine)
            result = compare(net(), other, x, y, loss=loss)
            found.append((result.equivalent, str(result).splitlines()[0]))
    return found


def test_a_distributed_model_is_compared_with_the_plain_one() -> None:
    """It is equivalent, and is not where a layer is scaled; the same on all ranks."""
    first, second = on_ranks(2, compared)
    assert first == second
    assert [verdict for verdict, _ in first] == [True, False] * 3, first
    assert all("second" in text for verdict, text in first if not verdict), first
