"""What an inspection says of the blind cases, on the ranks of a process group."""

from __future__ import annotations

import traceback
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist

from pytest_modelhealth import Inspector
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Violation
from tests.ranks import blind, blind_again

SHELVES = (blind.FAULTS, blind.HEALTHY, blind_again.FAULTS, blind_again.HEALTHY)

BETWEEN_RANKS = frozenset(
    {
        "averaged_gradients",
        "distinct_data",
        "distinct_dropout",
        "even_weights",
        "replicas_agree",
        "same_path",
        "same_weights",
        "synced_norm",
        "unused_parameters",
    }
)


class Said(NamedTuple):
    """One finding.

    Args:
        check: the check, or the class of what was raised.
        layer: the layer that it names.
        severity: ``"fail"`` or ``"warn"``.
        text: what it says.
    """

    check: str
    layer: str
    severity: str
    text: str


def verdicts(names: list[str]) -> dict[str, list[Said]]:
    """Return what is found in each case, on this rank."""
    warnings.simplefilter("ignore")
    cases = {case.name: case for shelf in SHELVES for case in shelf}
    return {name: _verdict(cases[name]) for name in names}


def _verdict(case: blind.Case) -> list[Said]:
    made = case.make(dist.get_rank())
    torch.manual_seed(made.seed)
    inspector = Inspector(made.model, ranks=made.ranks, rank_timeout=15)
    try:
        with made.within():
            report = inspector.run_inspection(made.inputs, made.target, loss=made.loss)
    except InspectionError as error:
        return [Said("InspectionError", "", "fail", str(error))]
    except Exception as error:  # noqa: BLE001 - it is told, and is no verdict
        return [Said(type(error).__name__, "", "fail", traceback.format_exc()[-1500:])]
    found = [_said(violation, "fail") for violation in report.violations]
    return found + [_said(violation, "warn") for violation in report._judgement.warned]


def _said(violation: Violation, severity: str) -> Said:
    folded = "".join(f" <- {one.check} {one.layer}" for one in violation.folded)
    return Said(violation.check, violation.layer, severity, violation.message + folded)
