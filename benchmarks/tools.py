"""Who judges the corpus: modelhealth with default settings, and peers at their most favourable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch.export import ExportedProgram

from benchmarks import comparing_peers, peers
from corpus import Finding, Sides, Subject, Tool, Training
from corpus.pair import as_module
from pytest_modelhealth import HealthReport, InspectionError, Inspector, compare
from pytest_modelhealth.snapshot.drift import DriftReport, detect_drift
from pytest_modelhealth.snapshot.file_format import dump, load
from pytest_modelhealth.snapshot.snapshot import of_report


@dataclass(frozen=True)
class Entrant:
    """A tool, and what it was asked.

    Args:
        judge: returns what it objects to, the gravest first.
        asked: what it was asked to do, for people.
        needs: a package that must be there.
    """

    judge: Tool
    asked: str
    needs: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether the package that it needs is there."""
        return not self.needs or find_spec(self.needs) is not None


# ---- modelhealth --------------------------------------------------------------------------------


def modelhealth(made: Subject | Training | Sides) -> list[Finding]:
    """Inspect a subject once, run a training step, or compare the sides of a pair."""
    if isinstance(made, Training):
        return by_monitor(made) if made.steps else by_step(made)
    return by_comparison(made) if isinstance(made, Sides) else by_inspection(made)


def probed(made: Subject | Training | Sides) -> list[Finding]:
    """Inspect a subject once, and run every probe."""
    if not isinstance(made, Subject):
        raise NotImplementedError
    return by_inspection(made, probes=True)


def fixture(made: Subject | Training | Sides) -> list[Finding]:
    """Inspect a subject once as the fixture of a test does, with the probes that apply."""
    if not isinstance(made, Subject):
        raise NotImplementedError
    return by_inspection(made, probes="applicable")


def by_inspection(subject: Subject, *, probes: bool | str | None = None) -> list[Finding]:
    inspector = Inspector(subject.model)
    try:
        report = inspector.run_inspection(
            subject.inputs, subject.target, loss=subject.loss, probes=probes
        )
    except InspectionError as error:
        return [Finding("", "inspection", str(error))]
    return _findings(report)


def by_step(training: Training) -> list[Finding]:
    """Run the user's own training step a few times."""
    report = Inspector(training.model).run_step(
        training.step, training.optimizer, training.batch, restore=training.restore
    )
    return _findings(report)


def by_monitor(training: Training) -> list[Finding]:
    """Watch a whole training."""
    scaler = next((one for one in training.restore if isinstance(one, torch.amp.GradScaler)), None)
    with Inspector(training.model).monitor(scaler=scaler) as monitor:
        for number in range(training.steps):
            batch = training.batches(number)
            loss = training.step(training.model, training.optimizer, batch)
            monitor.step_end(number, loss=loss)
    return _findings(monitor.report_of_training())


def _findings(report: HealthReport) -> list[Finding]:
    return [
        Finding(found.layer, found.check, f"{found.message} {found.cause}", warns=warns)
        for found_by, warns in ((report.violations, False), (report.warnings, True))
        for found in found_by
    ]


def by_comparison(sides: Sides) -> list[Finding]:
    """Compare the two side by side."""
    subject = sides.reference
    found = compare(
        subject.model, sides.candidate, subject.inputs, subject.target, loss=subject.loss
    ).first_divergence
    if found is None:
        return []
    text = f"{found.label}: {found.story}: {found.cause}".rstrip(": ")
    return [Finding(found.layer, text=text, also=(found.candidate,))]


def by_snapshot(sides: Sides) -> list[Finding]:
    """Record a snapshot of the reference, and read it with the candidate."""
    candidate = sides.candidate
    model = candidate if isinstance(candidate, ExportedProgram) else as_module(sides)
    recorded = record(sides.reference, sides.reference.model)
    return drift_of(recorded, inspect(sides.reference, model))


def inspect(subject: Subject, model: Any, calibrate: bool = False) -> HealthReport:
    """Return the report of a model on a subject's batch, under a seed of its own."""
    torch.manual_seed(0)
    inspector = Inspector(model, calibrate=calibrate)
    return inspector.run_inspection(subject.inputs, subject.target, loss=subject.loss)


def record(subject: Subject, model: Any) -> str:
    """Return the snapshot of a model on a subject's batch, as its file has it."""
    return dump(of_report(inspect(subject, model, calibrate=True)))


def drift_of(recorded: str, report: HealthReport) -> list[Finding]:
    """Return how a report drifts from a snapshot, if it does."""
    found = detect_drift(load(recorded), of_report(report))
    if not found.drifted:
        return []
    layer, *also = _first(found) or (None,)
    return [Finding(layer, text=str(found).partition("\n")[0], also=tuple(also))]


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


# ---- who takes part -----------------------------------------------------------------------------

DETECTORS = {
    "modelhealth": Entrant(by_inspection, "one run_inspection with default settings"),
    "pytest-torch": Entrant(
        peers.pytest_torch,
        "assert_gradients_finite and assert_all_params_receive_grad; in evaluation mode also "
        "check_inference_contract for mode, finite outputs and determinism",
        "pytest_torch",
    ),
    "pytest-torch, 20 steps": Entrant(
        peers.pytest_torch_trained,
        "the same, and assert_loss_decreases over its 20 steps of Adam",
        "pytest_torch",
    ),
    "torcheck": Entrant(
        peers.torcheck,
        "every trainable parameter changes in a step of Adam; no NaN or infinity in any parameter "
        "or leaf module's output",
        "torcheck",
    ),
    "TorchLens": Entrant(
        peers.torchlens,
        "a trace with gradients, its dtype_range_audit and gradient_flow_audit, activations of "
        "which dead_neurons finds over half dead, audit_params on matrices, and a step of SGD "
        "under ChecksSession's change and non-finite checks; warnings count, remarks do not",
        "torchlens",
    ),
    "TorchLens, critical": Entrant(
        peers.torchlens_critical,
        "the same, but only what it calls critical, and parameters without a gradient",
        "torchlens",
    ),
}
"""Tools that judge one model."""

FAVOUR = "what has no counterpart is passed over, both draw the same random numbers"


def _comparing(
    name: str,
    needs: str,
    make: Callable[[comparing_peers.Tolerance], Tool],
    asked: str,
) -> dict[str, Entrant]:
    """Return a peer with a loose and with a tight tolerance."""
    return {
        f"{name}, {label}": Entrant(
            make(tolerance),
            f"{asked}, rtol {tolerance[0]:g} and atol {tolerance[1]:g}; {FAVOUR}",
            needs,
        )
        for label, tolerance in (
            ("loose", comparing_peers.LOOSE),
            ("tight", comparing_peers.TIGHT),
        )
    }


COMPARERS = {
    "compare": Entrant(
        by_comparison, "compare(reference, candidate, inputs, target, loss=...), with defaults"
    ),
    "snapshot": Entrant(
        by_snapshot, "a snapshot recorded from the reference, read with the candidate"
    ),
    **_comparing(
        "pytest-torch",
        "pytest_torch",
        comparing_peers.pytest_torch,
        "localize_divergence(..., module_map=modelhealth's alignment, leaf_only=False)",
    ),
    **_comparing(
        "TorchLens",
        "torchlens",
        comparing_peers.torchlens,
        "debug.compare_rows of a trace of each",
    ),
}
"""Tools that judge the two models of a pair."""
OURS = ("compare", "snapshot")
