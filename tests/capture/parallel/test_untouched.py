"""An inspection on several ranks leaves everything as it was: now, and in the steps to come."""

from __future__ import annotations

import pytest

from corpus.ranks.engines import ENGINES, Case, chosen_cases
from tests.capture.parallel.comparing import differences
from tests.ranks.launching import on_ranks


def one_way_each() -> list[Case]:
    """Return each engine in one of its ways, the next in the next."""
    cases, ways = chosen_cases(), len(chosen_cases()) // len(ENGINES)
    return [cases[ways * place + place % ways] for place in range(len(ENGINES))]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(one_way_each(), id="one way each"),
        pytest.param(chosen_cases(), id="all ways", marks=pytest.mark.slow),
    ],
)
def test_every_engine_goes_on_as_its_twin_that_nobody_inspected(cases: list[Case]) -> None:
    """Gradients, parameters, buffers, the hook's state and three more steps, bit for bit."""
    found = on_ranks(2, differences, cases, seconds=240)
    assert [{case: said for case, said in one.items() if said} for one in found] == [{}, {}]
    assert len(found[0]) == len(cases) >= len(ENGINES) > 16


def test_three_ranks() -> None:
    """Sums of three are in another order where buckets were cut anew; 3 rows leave some with 1."""
    cases = [
        ("DDP", 0, "whole"),
        ("DDP", 1, "loss raises"),
        ("DDP, static_graph", 1, "whole"),
        ("FSDP2", 0, "forward alone"),
        ("FSDP2", 2, "whole"),
    ]
    found = on_ranks(3, differences, cases, seconds=120)
    assert [{case: said for case, said in one.items() if said} for one in found] == [{}, {}, {}]
