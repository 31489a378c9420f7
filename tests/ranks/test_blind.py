"""Every fault that takes several ranks is named, and nothing that looks like one is.

Three launches run all cases of `corpus.ranks`: one for each number of ranks.
"""

from __future__ import annotations

import re
import traceback
import warnings
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from corpus.ranks import FAULTS, HEALTHY, Case
from pytest_modelhealth import Inspector
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Finding
from tests.ranks.launching import on_ranks


class Said(NamedTuple):
    """A finding: its check, or the class of what was raised; its layer, severity and text."""

    check: str
    layer: str
    severity: str
    text: str


def verdicts(size: int) -> dict[str, list[Said]]:
    """Return what is found in each case for so many ranks, on this rank."""
    warnings.simplefilter("ignore")
    return {case.name: _verdict(case) for case in (*FAULTS, *HEALTHY) if case.size == size}


def _verdict(case: Case) -> list[Said]:
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


def _said(violation: Finding, severity: str) -> Said:
    folded = "".join(f" <- {one.check} {one.layer}" for one in violation.folded)
    return Said(violation.check, violation.layer, severity, violation.message + folded)


@cache
def said(size: int) -> list[dict[str, list[Said]]]:
    """Return what each of so many ranks says of the cases for it."""
    return on_ranks(size, verdicts, size, seconds=240.0)


@pytest.mark.parametrize("case", [*FAULTS, *HEALTHY], ids=lambda case: case.name)
def test_a_fault_alone_is_named_with_rank_and_layer(case: Case) -> None:
    """The check that must speak does, once, of the right layer and ranks, the same on each."""
    first, *others = [rank[case.name] for rank in said(case.size)]
    assert all(other == first for other in others)
    if case.missed or not case.check:
        assert [one for one in first if one.check not in case.also] == []
        return
    assert {one.check for one in first} == {case.check}
    assert len(first) == 1 or case.check == "finite"
    found = first[0]
    if case.check == "InspectionError":
        assert f"{case.layer[0]}" in found.text
    else:
        assert found.layer in case.layer
    lists = re.findall(r"ranks? ((?:\d+(?:, | and )?)+)", found.text)
    assert {str(rank) for rank in case.ranks} <= set(re.findall(r"\d+", " ".join(lists)))
    assert found.severity == case.severity
