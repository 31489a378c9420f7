"""Healthy training steps of the corpus have no objection, and faulty ones are run to the end.

Of each file the first of each role runs in every run, all of them by ``scripts/test -m corpus``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from corpus import Training, shelves
from pytest_modelhealth import HealthReport, Inspector

FIRST = 1


def sampled(role: str) -> list[Any]:
    """Return the steps of a role, of which all but the first of each file are marked."""
    found = []
    for shelf in shelves("training"):
        seen: dict[str, int] = defaultdict(int)
        for case in shelf.cases:
            if case.role == role:
                seen[role] += 1
                marks = [pytest.mark.corpus] if seen[role] > FIRST else []
                found.append(pytest.param(case, id=case.name, marks=marks))
    return found


def ran(case: Any) -> HealthReport:
    """Run the step of a case a few times."""
    torch.manual_seed(0)
    made: Training = case.build()
    return Inspector(made.model).run_step(
        made.step, made.optimizer, made.batch, restore=made.restore
    )


@pytest.mark.filterwarnings("ignore")  # what torch warns of is part of some cases
@pytest.mark.parametrize("case", sampled("control"))
def test_a_healthy_step_has_no_objection(case: Any) -> None:
    """It may be warned of, where it looks like a fault."""
    report = ran(case)
    assert not report.violations, str(report)


@pytest.mark.filterwarnings("ignore")  # what torch warns of is part of some cases
@pytest.mark.parametrize("case", sampled("fault"))
def test_a_faulty_step_is_run(case: Any) -> None:
    """Whatever it does, a report comes of it, and says what the step is."""
    stepped = ran(case).observation.stepped
    assert stepped is not None
    assert stepped.losses
