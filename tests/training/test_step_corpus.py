"""Steps of the corpus: a pair of each check, and healthy ones.

Of each file the first healthy one runs in every run, all of them by ``scripts/test -m corpus``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from corpus import Training, shelves
from corpus.checks.steps import PAIRS, Pair, Stepping
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.training.catalogue import STEP


def controls() -> Iterator[Any]:
    """Yield the healthy steps, of which all but the first of each file are marked."""
    for shelf in shelves("training"):
        healthy = [case for case in shelf.cases if case.role == "control"]
        for number, case in enumerate(healthy):
            yield pytest.param(case, id=case.name, marks=[pytest.mark.corpus] if number else [])


@pytest.mark.filterwarnings("ignore")  # what torch warns of is part of some cases
@pytest.mark.parametrize("case", list(controls()))
def test_a_healthy_step_has_no_objection(case: Any) -> None:
    """It may be warned of, where it looks like a fault."""
    torch.manual_seed(0)
    made: Training = case.build()
    report = Inspector(made.model).run_step(
        made.step, made.optimizer, made.batch, restore=made.restore
    )
    assert not report.violations, str(report)


def run(made: Stepping) -> HealthReport:
    """Run a step of a pair."""
    return Inspector(made.model).run_step(made.step, made.optimizer, made.batch, **made.arguments)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.check}-{pair.name}")
def test_a_fault_is_named_and_its_neighbour_passes(pair: Pair) -> None:
    """The check names the place, the numbers and the cause; the neighbour has no objection at all.

    Other checks may object to the fault as well.
    """
    report = run(pair.faulty())
    found = [v for v in (*report.violations, *report.warnings) if v.check == pair.check]
    assert len(found) == 1, str(report)
    text = f"{found[0].message} {found[0].cause}"
    assert [part for part in pair.says if part not in text] == [], text
    assert found[0].layer == pair.layer
    assert found[0].grade == ("warn" if pair.warns else "fail")
    healthy = run(pair.healthy())
    assert healthy.healthy, str(healthy)
    assert not healthy.warnings, str(healthy)


def test_every_check_of_the_shelf_has_a_pair() -> None:
    """What is added to the shelf needs a line in the table."""
    assert {check.name for check in STEP.values()} == {pair.check for pair in PAIRS}
    assert all(check.judges_steps for check in STEP.values())
