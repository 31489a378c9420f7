"""An inspection on several ranks leaves everything as it was: now, and in the steps to come."""

from __future__ import annotations

from corpus.ranks.engines import chosen_cases
from tests.capture.parallel.comparing import differences
from tests.ranks.launching import on_ranks


def test_every_engine_goes_on_as_its_twin_that_nobody_inspected() -> None:
    """Gradients, parameters, buffers, the hook's state and three more steps, bit for bit."""
    cases = chosen_cases()
    found = on_ranks(2, differences, cases, seconds=240)
    assert [{case: said for case, said in one.items() if said} for one in found] == [{}, {}]
    assert len(found[0]) == len(cases) > 80


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
