"""In what ranks differ, or do not although they should: the seam that `joint` calls.

Everything here runs on every rank, in the same order, with the same collectives.
"""

from __future__ import annotations

from typing import Any

from pytest_modelhealth.capture import Request
from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.ranks import Disagreement


def collected(company: Company, request: Request) -> Any:
    """Return what this rank notes before the run: no collective here, the model is untouched."""
    return None


def disagreements(
    company: Company, evidence: Any, own: Observation, joint: Observation
) -> tuple[Disagreement, ...]:
    """Return where ranks disagree, the same on every rank, in execution order.

    Args:
        company: `sum`, `smallest`, `largest` and `gather` over the ranks; `place` has the ranks
            that see other samples (`data`) and those that see the same (`tensor`).
        evidence: what `collected` returned on this rank.
        own: what this rank saw.
        joint: what all saw, put together.
    """
    return ()
