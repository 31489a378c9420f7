"""What the probes say of the corpus: leaks, custom backwards, and healthy models that look alike.

Every fifth case runs in every run, all of them by ``scripts/test -m corpus``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.tools import probed
from corpus import cases
from corpus.gradient import blind_own_backwards
from corpus.scoring import judge

MISSED = {
    "decoder given its labels as they are",
    "last sample read for the last step, eight sequences of eight",
    "observations by running figures that move in every mode",
    "scale and shift computed under no_grad",
    "summary of the first batch kept for all that follow",
}
"""Faults that no probe names with its place and cause."""


TELLING = {
    "pixels scaled by the darkest and brightest of the batch",  # every second sample
    "hourglass that merges each word with the next",  # later words, from an odd one on
}
"""Cases that alone show how a probe changes a batch; they run in every run."""


def sampled() -> Iterator[Any]:
    """Yield the cases, of which four in five are marked."""
    every = [*cases(kind="leak"), *blind_own_backwards.SHELF.cases]
    for number, case in enumerate(case for case in every if case.name not in MISSED):
        is_sampled = number % 5 == 0 or case.name in TELLING
        yield pytest.param(case, id=case.name, marks=[] if is_sampled else [pytest.mark.corpus])


@pytest.mark.parametrize("case", list(sampled()))
def test_a_fault_is_named_with_its_place_and_cause_and_no_control_is(case: Any) -> None:
    """A fault that may be a design is warned of; a warning is no false alarm."""
    judged = judge(probed, case)
    assert judged is not None
    assert judged.error == ""
    assert judged.is_right or judged.is_only_warned_of, (judged.objections, judged.warnings)
