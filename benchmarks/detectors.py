"""Who judges a case: modelhealth with default settings, and the peers at their most favourable."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks import peers
from benchmarks.cases.subject import Subject
from benchmarks.finding import Finding
from pytest_modelhealth import InspectionError, Inspector


@dataclass(frozen=True)
class Detector:
    """A tool that judges a subject.

    Args:
        judge: returns what it objects to, the gravest first.
        asked: what it was asked to do, for people.
        needs: a package that must be there.
    """

    judge: Callable[[Subject], list[Finding]]
    asked: str
    needs: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether the package that it needs is there."""
        return not self.needs or find_spec(self.needs) is not None


def modelhealth(subject: Subject) -> list[Finding]:
    inspector = Inspector(subject.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some of the faults
        try:
            report = inspector.run_inspection(subject.inputs, subject.target, loss=subject.loss)
        except InspectionError as error:
            return [Finding("", "inspection", str(error))]
    return [
        Finding(found.layer, found.check, f"{found.message} {found.cause}", warns=warns)
        for found_by, warns in ((report.violations, False), (report.warnings, True))
        for found in found_by
    ]


DETECTORS = {
    "modelhealth": Detector(modelhealth, "one run_inspection with default settings"),
    "pytest-torch": Detector(
        peers.pytest_torch,
        "assert_gradients_finite and assert_all_params_receive_grad; in evaluation mode also "
        "check_inference_contract for mode, finite outputs and determinism",
        "pytest_torch",
    ),
    "pytest-torch, 20 steps": Detector(
        peers.pytest_torch_trained,
        "the same, and assert_loss_decreases over its 20 steps of Adam",
        "pytest_torch",
    ),
    "torcheck": Detector(
        peers.torcheck,
        "every trainable parameter changes in a step of Adam; no NaN or infinity in any parameter "
        "or leaf module's output",
        "torcheck",
    ),
    "TorchLens": Detector(
        peers.torchlens,
        "a trace with gradients, its dtype_range_audit and gradient_flow_audit, activations of "
        "which dead_neurons finds over half dead, audit_params on matrices, and a step of SGD "
        "under ChecksSession's change and non-finite checks; warnings count, remarks do not",
        "torchlens",
    ),
    "TorchLens, critical": Detector(
        peers.torchlens_critical,
        "the same, but only what it calls critical, and parameters without a gradient",
        "torchlens",
    ),
}
