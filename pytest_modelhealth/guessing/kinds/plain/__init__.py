"""Any module: the signature of forward, the layers that inputs reach, and what a failure says.

`slots` are arguments that are still to be settled, `starts` says what to begin with, `failures`
where a forward failed and on what, and `repairs` what to try next.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pytest_modelhealth.guessing.drawing import Candidate
from pytest_modelhealth.guessing.kinds.kind import Kind
from pytest_modelhealth.guessing.kinds.plain.repairs import repaired
from pytest_modelhealth.guessing.kinds.plain.slots import Slots
from pytest_modelhealth.guessing.kinds.plain.starts import starts
from pytest_modelhealth.guessing.trying import Trial

_TRIES_A_START = 60


class PlainModel(Kind):
    """Any module."""

    precedence = 0

    def recognises(self, model: nn.Module) -> bool:
        """Whether it is a module: all are."""
        return True

    def candidates(self, model: nn.Module, trial: Trial) -> Iterator[Candidate]:
        """Yield what the signature suggests, and after each failure what would have fitted."""
        known: set[Slots] = set()
        for start in starts(model):
            waiting, tries = [start], 0
            while waiting and tries < _TRIES_A_START and not trial.is_over:
                slots = waiting.pop()
                if slots in known:
                    continue
                known.add(slots)
                outcome = trial.run(slots.candidate(model))
                if outcome.error is None:
                    yield slots.candidate(model)
                    return
                tries += 1
                waiting += reversed(list(repaired(slots, outcome, model)))
