"""Rows of zeros in a matrix that get no gradient, so that they stay what they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.check import Check, Finding
from pytest_modelhealth.checks.dead_units import DYING_ACTIVATIONS
from pytest_modelhealth.checks.facts import called, flow_of
from pytest_modelhealth.checks.freshness import seems_trained
from pytest_modelhealth.checks.weights import IN_PROJECTION
from pytest_modelhealth.settings import Settings

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation

FEWEST_ROWS = 4
_PROJECTIONS = ("queries", "keys", "values")
LOOK_UPS = frozenset({"embedding", "embedding_bag", "index", "index_select", "getitem", "gather"})
"""Operations that take some rows of a table, so that the others get no gradient."""


def idle_rows(
    check: type[Check], observation: Observation, settings: Settings
) -> Iterator[Finding]:
    """Yield the matrices of which a part is zero and gets no gradient, while the rest learns.

    What was pruned on purpose looks the same: only a fresh model is judged.
    """
    for record in called(observation):
        for name, slices in record.zero_slices.items():
            if name in record.frozen or _is_table(record, name, observation):
                continue
            sizes = record.parameters[name].shape
            columns = slices.columns if _is_given_what_learns(record, observation) else ()
            kinds = (("rows", slices.rows, sizes[0]), ("columns", columns, sizes[1]))
            what, idle, size = max(kinds, key=lambda kind: len(kind[1]) / kind[2])
            limit = settings.limit("max_idle_rows", record.name)
            if len(idle) < FEWEST_ROWS or len(idle) <= limit.value * size:
                continue
            text = (
                f"{len(idle)} of the {size} {what} of its {name} are zero and get a gradient of "
                f"exactly zero{_which(name, what, idle, size)}"
            )
            if seems_trained(observation):
                doubt = "pruned on purpose they look the same; a freshly made model would tell"
                yield check.inconclusive(record, f"{text}: {doubt}")
                continue
            yield check.violation(
                record,
                text,
                value=len(idle) / size,
                limit=limit,
                tensor=name,
                cause=_cause(record, what, observation),
            )


def _is_table(record: LayerRecord, name: str, observation: Observation) -> bool:
    """Whether rows of a parameter are looked up: those that are not asked for have no gradient."""
    flow, full = flow_of(observation), f"{record.name}.{name}".removeprefix(".")
    if full not in flow:
        return False
    takers = flow.consumers(full)
    taken = {one.function for one in flow.operations(full, *takers)} if takers else set[str]()
    return not taken.isdisjoint(LOOK_UPS)


def _is_given_what_learns(record: LayerRecord, observation: Observation) -> bool:
    """Whether a gradient goes on to what a layer is given.

    Data that are zero in this batch (words that are not in it) leave no gradient, and wait for
    nothing.
    """
    flow = flow_of(observation)
    calls = flow.calls(record.name) if record.name in flow else ()
    given = [flow.graph.vertices[number] for call in calls for number in call.inputs]
    return not given or any(vertex.live for vertex in given)


def _which(name: str, what: str, idle: Collection[int], size: int) -> str:
    """Return which they are, in brackets, where that can be said in a few words."""
    if name == IN_PROJECTION and what == "rows":
        third = size // len(_PROJECTIONS)
        parts = {place // third for place in idle}
        if len(parts) * third == len(idle):
            return f" (those of {' and '.join(_PROJECTIONS[part] for part in sorted(parts))})"
    is_one_range = max(idle) - min(idle) + 1 == len(idle)
    return f" ({min(idle)} to {max(idle)})" if is_one_range else ""


def _cause(record: LayerRecord, what: str, observation: Observation) -> str:
    flow = flow_of(observation)
    if what == "columns":
        return (
            "the weights from these units are zero, and so is what the units give: neither can "
            "begin; initialise one of the two at random"
        )
    takers = [observation.layers.get(n) for n in flow.consumers(record.name, as_it_is=True)]
    dying = [r for r in takers if r is not None and r.activation in DYING_ACTIVATIONS]
    if dying:
        return (
            f"filters that start at zero give {dying[0].label!r} nothing above zero, which passes "
            "no gradient back: they are dead from the start; initialise them at random"
        )
    return (
        "what these rows give is multiplied by something of the same matrix or another that is "
        "zero too (queries by keys, a value by its gate), so that neither gets a gradient and both "
        "stay zero: initialise one of them at random"
    )
