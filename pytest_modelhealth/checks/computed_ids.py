"""Ids that differ in the batch and are one when a table is asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.checks.paths import as_given, is_floating

if TYPE_CHECKING:
    from pytest_modelhealth.report import Flow, LayerRecord, Observation
    from pytest_modelhealth.report.flow import Vertex
    from pytest_modelhealth.statistics import TensorStatistics

FEWEST = 8
"""Rows of a table, and ids, of fewer of which nothing is said: kinds of tokens are few."""

_NOT_LAYERS = frozenset({"input", "constant", "buffer"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "gt", "le", "ge", "isin", "bool", "logical_not"})
_COARSE = frozenset(
    {"and", "bitwise_and", "bitwise_right_shift", "bucketize", "div", "floor_divide", "floordiv"}
    | {"fmod", "mod", "remainder", "rshift", "truediv", "rrshift", "true_divide"}
)
"""Operations that make kinds of ids, of which a batch may well hold one only."""
_FILLING = frozenset({"where", "masked_fill"})
"""Operations that put another id in the place of some, which a mask may choose to be all."""


class Destroyed(NamedTuple):
    """Ids that were computed from others that differ, and are all equal.

    Args:
        record: the table.
        source: the tensor of the batch that they are computed from.
        operations: those that compute them, in order.
        may_be_meant: whether a design computes such ids, and may look the same.
    """

    record: LayerRecord
    source: str
    operations: tuple[Vertex, ...]
    may_be_meant: bool


def destroyed(observation: Observation, flow: Flow) -> Iterator[Destroyed]:
    """Yield the tables that are asked for one row by ids that the model computed from the batch.

    The ids have the shape of ids in the batch that differ, or are positions: without a batch
    dimension, of a table that is as long as the sequence. What layers choose (codes, experts) is
    not judged, nor what the caller gave and the model laid out anew.
    """
    from pytest_modelhealth.report.flow import AS_IT_IS

    if not flow.is_exact:
        return
    for record in observation.layers.values():
        if record.name not in flow or not _is_asked_for_one(record):
            continue
        numbers = [call.inputs[0] for call in flow.calls(record.name) if call.inputs]
        made = [flow.graph.vertices[number] for number in flow.origins(*numbers)]
        if any(str(one.kind) not in _NOT_LAYERS for one in made):
            continue
        sources = list(dict.fromkeys(one.name for one in made if one.kind == "input"))
        source = next((name for name in sources if _differs(as_given(observation, name))), None)
        if source is None or not _is_of_tokens(record, observation, flow):
            continue
        operations = flow.operations(source, record.name)
        functions = {one.function for one in operations}
        if not functions - AS_IT_IS - {"long", "int"}:
            continue
        beside = [
            r for r in observation.layers.values() if r.name != record.name and r.name in flow
        ]
        takers = [r for r in beside if _differs(r.inputs) and source in flow.feeding(r.name)]
        is_second = any("num_embeddings" in taker.options for taker in takers)
        yield Destroyed(record, source, operations, _may_be_meant(record, functions, is_second))


def _is_asked_for_one(record: LayerRecord) -> bool:
    rows, given = record.options.get("num_embeddings"), record.inputs
    if not isinstance(rows, int) or rows < FEWEST or given is None or is_floating(given):
        return False
    return given.count >= FEWEST and given.min == given.max


def _differs(given: TensorStatistics | None) -> bool:
    return given is not None and given.finite_count > 0 and given.min != given.max


def _is_of_tokens(record: LayerRecord, observation: Observation, flow: Flow) -> bool:
    given = record.inputs
    assert given is not None
    whole = (as_given(observation, name) for name in flow.inputs)
    if any(_differs(w) and not is_floating(w) and w.shape == given.shape for w in whole if w):
        return len(given.shape) > 1 and given.shape[-1] > 1
    return _is_positions(record)


def _is_positions(record: LayerRecord) -> bool:
    """Whether a table has a row for each place of a sequence, and no batch dimension is given."""
    shape = () if record.inputs is None else record.inputs.shape
    has_no_batch = len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)
    return has_no_batch and record.options.get("num_embeddings") == shape[-1]


def _may_be_meant(record: LayerRecord, functions: set[str], is_second: bool) -> bool:
    """Whether ids may be kinds (segments, pages of characters) rather than ids or positions.

    Args:
        record: the table.
        functions: what computes its ids.
        is_second: whether another table is asked for several rows by the same values.
    """
    rows, given = record.options["num_embeddings"], record.inputs
    assert given is not None
    if functions & _FILLING:
        return True
    if functions & _COMPARISONS:
        return not isinstance(rows, int) or rows < given.shape[-1]
    return bool(functions & _COARSE) and is_second
