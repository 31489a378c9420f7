"""Who judges a pair: modelhealth in two ways with default settings, and the peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch.export import ExportedProgram

from benchmarks import comparing_peers
from benchmarks.cases.pair import Said, Sides, as_module
from benchmarks.cases.subject import Subject
from pytest_modelhealth import HealthReport, Inspector, compare, snapshot
from pytest_modelhealth.snapshot.drift import DriftReport


@dataclass(frozen=True)
class Comparer:
    """A tool that judges a pair.

    Args:
        judge: what it says.
        asked: what it was asked to do, for people.
        needs: a package that must be there.
    """

    judge: Callable[[Sides], Said]
    asked: str
    needs: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether the package that it needs is there."""
        return not self.needs or find_spec(self.needs) is not None


def by_comparison(sides: Sides) -> Said:
    """Compare the two side by side."""
    subject = sides.reference
    found = compare(
        subject.model, sides.candidate, subject.inputs, subject.target, loss=subject.loss
    ).first_divergence
    if found is None:
        return Said(False)
    text = f"{found.label}: {found.story}"
    return Said(True, (found.layer, found.candidate), f"{text}: {found.cause}".rstrip(": "))


def by_snapshot(sides: Sides) -> Said:
    """Record a snapshot of the reference, and read it with the candidate."""
    candidate = sides.candidate
    model = candidate if isinstance(candidate, ExportedProgram) else as_module(sides)
    recorded = record(sides.reference, sides.reference.model)
    return said_of(recorded, inspect(sides.reference, model))


def inspect(subject: Subject, model: Any, calibrate: bool = False) -> HealthReport:
    """Return the report of a model on a subject's batch, under a seed of its own."""
    torch.manual_seed(0)
    inspector = Inspector(model, calibrate=calibrate)
    return inspector.run_inspection(subject.inputs, subject.target, loss=subject.loss)


def record(subject: Subject, model: Any) -> str:
    """Return the snapshot of a model on a subject's batch, as its file has it."""
    return snapshot.record(inspect(subject, model, calibrate=True))


def said_of(recorded: str, report: HealthReport) -> Said:
    """Return how a report drifts from a snapshot."""
    found = snapshot.check(recorded, report)
    if not found.drifted:
        return Said(False)
    return Said(True, _first(found), str(found).partition("\n")[0])


def _first(found: DriftReport) -> tuple[str, ...]:
    """Return the layers that a reader is pointed at first.

    Where the inputs of a layer drift, that is the layer, and the module with the code before it.
    """
    if found.told:
        label = found.story.partition(":")[0]  # a layer, or a parameter of one
        return tuple(name for name in (label, label.rpartition(".")[0]) if name in found.told)
    if found.drifts:
        layer, role = found.drifts[0].layer, found.drifts[0].role
        return (layer, layer.rpartition(".")[0]) if role == "inputs" else (layer,)
    layers = [change.layer for change in found.failing_changes[:1]]
    return tuple(name for layer in layers for name in (layer, layer.rpartition(".")[0]))


FAVOUR = "what has no counterpart is passed over, both draw the same random numbers"

COMPARERS = {
    "compare": Comparer(
        by_comparison, "compare(reference, candidate, inputs, target, loss=...), with defaults"
    ),
    "snapshot": Comparer(
        by_snapshot, "a snapshot recorded from the reference, read with the candidate"
    ),
    **{
        f"{name}, {label}": Comparer(
            make(tolerance),
            f"{asked}, rtol {tolerance[0]:g} and atol {tolerance[1]:g}",
            needs,
        )
        for name, needs, make, asked in (
            (
                "pytest-torch",
                "pytest_torch",
                comparing_peers.pytest_torch,
                "localize_divergence(..., module_map=modelhealth's alignment, leaf_only=False); "
                + FAVOUR,
            ),
            (
                "TorchLens",
                "torchlens",
                comparing_peers.torchlens,
                "debug.compare_rows of a trace of each; " + FAVOUR,
            ),
        )
        for label, tolerance in (
            ("loose", comparing_peers.LOOSE),
            ("tight", comparing_peers.TIGHT),
        )
    },
}
OURS = ("compare", "snapshot")
