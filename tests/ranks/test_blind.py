"""Every fault that takes several ranks is named, and nothing that looks like one is.

Three launches run all cases: one for each number of ranks.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.ranks import blind, blind_again
from tests.ranks.launching import on_ranks
from tests.ranks.verdicts import BETWEEN_RANKS, Said, verdicts

_FAULTS = [*blind.FAULTS, *blind_again.FAULTS]
_HEALTHY = [*blind.HEALTHY, *blind_again.HEALTHY]
_CASES = [*_FAULTS, *_HEALTHY]
_SECONDS = 240.0


@cache
def said(size: int) -> list[dict[str, list[Said]]]:
    """Return what each of so many ranks says of the cases for it."""
    return on_ranks(
        size, verdicts, [case.name for case in _CASES if case.size == size], seconds=_SECONDS
    )


def named(text: str) -> set[int]:
    """Return the ranks that a text names."""
    lists = re.findall(r"ranks? ((?:\d+(?:, | and )?)+)", text)
    return {int(number) for ranks in lists for number in re.findall(r"\d+", ranks)}


@pytest.mark.parametrize("case", _FAULTS, ids=lambda case: case.name)
def test_a_fault_is_named_with_rank_and_layer(case: blind.Case) -> None:
    """The check that must speak does, once, of the right layer and ranks, the same on each."""
    first, *others = [rank[case.name] for rank in said(case.size)]
    assert all(other == first for other in others)
    if case.missed:
        assert first == []
        return
    found = [one for one in first if one.check == case.check]
    assert found, first
    assert {one.check for one in first} == {case.check}
    assert len(found) == 1 or case.check == "finite"
    if case.check == "InspectionError":
        assert f"{case.layer[0]}" in found[0].text
    else:
        assert found[0].layer in case.layer
    assert set(case.ranks) <= named(found[0].text)
    assert found[0].severity == case.severity


@pytest.mark.parametrize("case", _HEALTHY, ids=lambda case: case.name)
def test_what_looks_like_a_fault_is_none(case: blind.Case) -> None:
    """No check that reads ranks speaks, and the inspection ends."""
    first, *others = [rank[case.name] for rank in said(case.size)]
    assert all(other == first for other in others)
    assert [one for one in first if one.check not in case.also] == []
    assert not BETWEEN_RANKS & {one.check for one in first}
