"""Which operation of a layer's own code is new, or gone, between two models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_modelhealth.report import Flow, Observation
from pytest_modelhealth.report.flow import PRODUCTS, SUMS, Operation

MOST = 2
"""So many operations that are new or gone are named; more are a rewrite."""

_SAME = {"iadd": "add", "radd": "add", "imul": "mul", "rmul": "mul", "multiply": "mul"} | {
    "isub": "sub",
    "subtract": "sub",
    "truediv": "div",
    "true_divide": "div",
    "matmul": "mm",
    "bmm": "mm",
}
"""Spellings of one operation: by an operator, in place, batched or not."""


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

    @classmethod
    def of(cls, a: Observation, b: Observation, names: Mapping[str, str]) -> Operations:
        """Return the operations of two runs."""
        return cls(a.flow, b.flow, names)

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
        before = [_spelt(one) for one in self.reference.own_operations(ours)]
        now = [_spelt(self._renamed(one)) for one in self.candidate.own_operations(theirs)]
        if backward:
            before, now = ([one for one in side if one.cuts] for side in (before, now))
        gone, new = _without(before, now), _without(now, before)
        if not gone and not new:
            return _rewired(before, now, label)
        if len(gone) > MOST or len(new) > MOST:
            return ""
        told = [f"{_phrase(one, label)} is gone" for one in gone]
        told += [f"{_phrase(one, label)} is new{_at(one.line)}" for one in new]
        return ", ".join(told)

    def _renamed(self, one: Operation) -> Operation:
        return replace(one, operands=tuple(self.names.get(name, name) for name in one.operands))


def _spelt(one: Operation) -> Operation:
    return replace(one, name=_SAME.get(one.name, one.name))


def _without(some: list[Operation], others: list[Operation]) -> list[Operation]:
    """Return the operations of one side that the other has fewer of, by their functions.

    Of several of one function, those whose operands the other side's have not.
    """
    left = Counter(one.name for one in some)
    left.subtract(Counter(one.name for one in others))
    known = Counter((one.name, one.operands) for one in others)

    def is_known(one: Operation) -> bool:
        return known[one.name, one.operands] > 0

    found = []
    for one in sorted(some, key=is_known):
        if left[one.name] > 0:
            left[one.name] -= 1
            found.append(one)
    return [one for one in some if one in found]


def _rewired(before: list[Operation], now: list[Operation], label: str) -> str:
    """Return which operation takes something else, where that is one."""
    pairs = zip(before, now, strict=False)
    other = [(x, y) for x, y in pairs if x.name == y.name and x.operands != y.operands]
    if len(before) != len(now) or len(other) != 1:
        return ""
    ((x, y),) = other
    was = [_named(name, label) for name in x.operands if name not in y.operands]
    takes = [_named(name, label) for name in y.operands if name not in x.operands]
    if not was or not takes:
        return ""
    return f"{_function(y)} takes {' and '.join(takes)}, was {' and '.join(was)}{_at(y.line)}"


def _phrase(one: Operation, label: str) -> str:
    named = [_named(name, label) for name in dict.fromkeys(one.operands)]
    if "input" in one.operands and len(named) > 1:
        return f"{_function(one)} with {_named('input', label)}"
    if len(named) == 1 and one.name in SUMS | PRODUCTS:
        return f"{_function(one)} of {named[0]} and a number"
    return f"{_function(one)} of {' and '.join(named)}" if named else _function(one)


def _function(one: Operation) -> str:
    if one.name in SUMS:
        return "the sum"
    return "the product" if one.name in PRODUCTS else f"`{one.name}`"


def _named(operand: str, label: str) -> str:
    if operand == "input":
        return f"`{label}`'s input"
    if not operand.startswith("`"):
        return f"`{operand}`"
    function = operand.strip("`")
    if function in SUMS | PRODUCTS:
        return "an earlier sum" if function in SUMS else "a product"
    return operand


def _at(line: str) -> str:
    path, _, number = line.rpartition(":")
    return f" ({Path(path).name}:{number})" if path else ""
