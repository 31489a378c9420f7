"""What the own code of one layer does otherwise than that of its siblings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pytest_modelhealth.report import Flow, LayerRecord, Observation
    from pytest_modelhealth.report.flow import Operation

_MASKS = frozenset({"masked_fill", "where"})
_REDUCTIONS = frozenset({"mean", "sum", "amax", "amin", "max", "min", "median", "logsumexp"})
_FIRST_INPUT = frozenset({"input", "`add`"})


class Difference(NamedTuple):
    """What one of several blocks does otherwise than all others.

    Args:
        block: the one.
        inner: what its name goes on with, of the layer inside whose code it is; ``""`` for its own.
        said: what to say.
        at_an_end: whether it can be meant of the first or the last block: what they alone scale, or
            give in, is theirs.
        is_constant: whether a constant stands there, which nothing that the block reads explains.
    """

    block: str
    inner: str
    said: str
    at_an_end: bool = False
    is_constant: bool = False


def differences(
    observation: Observation, flow: Flow, group: list[str], inside: list[str]
) -> Iterator[Difference]:
    """Yield what the code of one block of a group does, or that of a layer inside it.

    All others have one code, by the operations of their first call. What changes the shape in one
    alone has no residual there.

    Args:
        group: names of blocks of one class and shape, in the order of the calls.
        inside: what their names go on with, of the layers inside them, ``""`` for their own.
    """
    for inner in inside:
        names = [block + inner for block in group]
        if not all(name in flow for name in names):
            continue
        if len({keeps_shape(observation.layers[name]) for name in names}) > 1:
            continue
        codes = {block: _code(flow, block, block + inner) for block in group}
        keys = {block: _key(code) for block, code in codes.items()}
        usual = group[0] if keys[group[0]] in (keys[group[1]], keys[group[2]]) else group[1]
        odd = [block for block in group if keys[block] != keys[usual]]
        if len(odd) == 1:
            found = list(_compared(flow, odd[0], inner, codes[usual], codes[odd[0]]))
            is_end = odd[0] in (group[0], group[-1])
            if not is_end or not any(one.at_an_end for one in found):
                yield from found


def keeps_shape(record: LayerRecord) -> bool:
    """Whether a layer returned what has the shape of its input."""
    given, returned = record.inputs, record.activations
    return given is not None and returned is not None and given.shape == returned.shape


def _code(flow: Flow, block: str, layer: str) -> list[Operation]:
    """Return the operations of a layer's own code, what they take named as seen from its block."""
    from dataclasses import replace

    from pytest_modelhealth.report.flow.differences import spelt

    return [
        replace(spelt(one), operands=tuple(o.removeprefix(f"{block}.") for o in one.operands))
        for one in flow.own_operations(layer)
    ]


def _key(code: list[Operation]) -> list[tuple[str, list[str]]]:
    return [(one.name, sorted(one.operands)) for one in code]


def _is_left_out(flow: Flow, block: str, operand: str) -> bool:
    """Whether an operand is a layer of the block that is not called, or returns what it is given.

    So are parts of a layer that is left out for a step, or for good in the first of several.
    """
    if operand == "input" or operand.startswith("`"):
        return False
    name = f"{block}.{operand}"
    if name not in flow:
        return operand not in flow
    return any(set(call.outputs) <= set(call.inputs) for call in flow.calls(name))


def _compared(
    flow: Flow, block: str, inner: str, usual: list[Operation], now: list[Operation]
) -> Iterator[Difference]:
    from pytest_modelhealth.report.flow import SUMS
    from pytest_modelhealth.report.flow.differences import (
        function,
        near_line,
        phrase,
        rewired,
        taken,
        without,
    )

    gone, new = without(usual, now), without(now, usual)
    for one in gone:
        if not any(_is_left_out(flow, block, name) for name in one.operands):
            residual = one.name in SUMS and not _FIRST_INPUT.isdisjoint(one.operands)
            is_anywhere = residual or one.name in _MASKS
            said = f"{phrase(one, 'its')} is missing"
            said += ", a residual" if residual else ""
            yield Difference(block, inner, said, at_an_end=not is_anywhere)
    for one in new:
        said = f"{phrase(one, 'its')} is in it alone{near_line(one.line)}"
        yield Difference(block, inner, said, at_an_end=one.name not in _REDUCTIONS)
    if not gone and not new and (taken_for_it := _without_residual(flow, block, usual, now)):
        said = f"{taken_for_it}, a residual"
        yield Difference(block, inner, said, is_constant=True)
    elif not gone and not new and (pair := rewired(usual, now)):
        was, is_ = pair
        if not any(_is_left_out(flow, block, name) for name in was.operands):
            said = f"{function(is_)} takes {taken(is_, was, 'its')}{near_line(is_.line)}, theirs "
            yield Difference(block, inner, said + taken(was, is_, "their"))


def _without_residual(flow: Flow, block: str, usual: list[Operation], now: list[Operation]) -> str:
    """Return where a sum takes a number, a constant or a buffer in place of the block's input."""
    from pytest_modelhealth.report.flow import SUMS
    from pytest_modelhealth.report.flow.differences import near_line

    fixed = {v.name.removeprefix(f"{block}.") for v in flow.graph.vertices if v.kind in _FIXED}
    for was, is_ in zip(usual, now, strict=False):
        residual, others = _FIRST_INPUT.difference(is_.operands), set(is_.operands)
        if was.name != is_.name or was.name not in SUMS or residual.isdisjoint(was.operands):
            continue
        others -= set(was.operands)
        if others <= fixed:
            named = " and ".join(f"`{name}`" for name in sorted(others)) or "a number"
            return f"the sum takes {named}{near_line(is_.line)} in place of its input"
    return ""


_FIXED = frozenset({"constant", "buffer"})
