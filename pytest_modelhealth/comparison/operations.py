"""Which operation of a layer's own code is new, or gone, between two models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pytest_modelhealth.report import Flow
from pytest_modelhealth.report.flow import Operation
from pytest_modelhealth.report.flow.differences import (
    function,
    near_line,
    phrase,
    rewired,
    spelt,
    taken,
    without,
)

MOST = 2
"""So many operations that are new or gone are named; more are a rewrite."""


@dataclass(frozen=True)
class Operations:
    """The operations of both models, layer by layer.

    Args:
        reference: the flow of the reference; ``None`` where none was recorded.
        candidate: that of the candidate.
        names: the name in the reference of each aligned layer of the candidate.
    """

    reference: Flow | None
    candidate: Flow | None
    names: Mapping[str, str]

    def change(self, ours: str, theirs: str, label: str, *, backward: bool = False) -> str:
        """Return what became of the operations of a layer's own code, ``""`` where nothing did.

        Args:
            ours: name of the layer in the reference.
            theirs: name of the layer in the candidate.
            label: what to call it.
            backward: whether only what passes no gradient is of interest.
        """
        if self.reference is None or self.candidate is None:
            return ""
        if ours not in self.reference or theirs not in self.candidate:
            return ""
        whose = f"`{label}`'s"
        before = [spelt(one) for one in self.reference.own_operations(ours)]
        now = [spelt(self._renamed(one)) for one in self.candidate.own_operations(theirs)]
        if backward:
            before, now = ([one for one in side if one.cuts] for side in (before, now))
        gone, new = without(before, now), without(now, before)
        if not gone and not new:
            return _rewired(before, now, whose)
        if len(gone) > MOST or len(new) > MOST:
            return ""
        changes = [f"{phrase(one, whose)} is gone" for one in gone]
        changes += [f"{phrase(one, whose)} is new{near_line(one.line)}" for one in new]
        return ", ".join(changes)

    def _renamed(self, one: Operation) -> Operation:
        return replace(one, operands=tuple(self.names.get(name, name) for name in one.operands))


def _rewired(before: list[Operation], now: list[Operation], whose: str) -> str:
    """Return which operation takes something else, where that is one."""
    pair = rewired(before, now)
    if not pair:
        return ""
    was, is_ = pair
    takes = f"takes {taken(is_, was, whose)}, was {taken(was, is_, whose)}"
    return f"{function(is_)} {takes}{near_line(is_.line)}"
