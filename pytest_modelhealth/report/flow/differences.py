"""What one code does otherwise than another, by the operations of both, and words for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_modelhealth.report.flow.graph import PRODUCTS, SAME, SUMS, Operation


def spelt(one: Operation) -> Operation:
    """Return an operation under one name, whether by an operator, in place, batched or not."""
    return replace(one, name=SAME.get(one.name, one.name))


def without(some: Sequence[Operation], others: Sequence[Operation]) -> list[Operation]:
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


def rewired(before: Sequence[Operation], now: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return the operation of both sides that alone takes something else, as each has it."""
    pairs = zip(before, now, strict=False)
    other = [(x, y) for x, y in pairs if x.name == y.name and x.operands != y.operands]
    if len(before) != len(now) or len(other) != 1:
        return ()
    ((x, y),) = other
    return (x, y) if set(x.operands) - set(y.operands) and set(y.operands) - set(x.operands) else ()


def taken(one: Operation, other: Operation, whose: str) -> str:
    """Return what one operation takes and the other does not."""
    only = [name for name in one.operands if name not in other.operands]
    return " and ".join(named(name, whose) for name in only)


def phrase(one: Operation, whose: str) -> str:
    """Return an operation with what it takes; `whose` says whose input ``"input"`` is."""
    shown = [named(name, whose) for name in dict.fromkeys(one.operands)]
    if "input" in one.operands and len(shown) > 1:
        return f"{function(one)} with {named('input', whose)}"
    if len(shown) == 1 and one.name in SUMS | PRODUCTS:
        return f"{function(one)} of {shown[0]} and a number"
    return f"{function(one)} of {' and '.join(shown)}" if shown else function(one)


def function(one: Operation) -> str:
    """Return what to call the operation itself."""
    if one.name in SUMS:
        return "the sum"
    return "the product" if one.name in PRODUCTS else f"`{one.name}`"


def named(operand: str, whose: str) -> str:
    """Return what to call an operand."""
    if operand == "input":
        return f"{whose} input"
    if not operand.startswith("`"):
        return f"`{operand}`"
    made = operand.strip("`")
    if made in SUMS | PRODUCTS:
        return "an earlier sum" if made in SUMS else "a product"
    return operand


def near_line(line: str) -> str:
    """Return a line in brackets, by its file's name alone."""
    path, _, number = line.rpartition(":")
    return f" ({Path(path).name}:{number})" if path else ""
