"""Who judges a case: modelhealth with default settings, and the peers at their most favourable."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.cases.subject import Subject
from pytest_modelhealth import InspectionError, Inspector


@dataclass(frozen=True)
class Finding:
    """One objection.

    Args:
        layer: the layer that it names.
        check: the check or function that raised it.
        text: its sentences, with the cause where one is given.
    """

    layer: str
    check: str
    text: str


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
        Finding(found.layer, found.check, f"{found.message} {found.cause}")
        for found in report.violations
    ]


DETECTORS = {
    "modelhealth": Detector(modelhealth, "one run_inspection with default settings"),
}
