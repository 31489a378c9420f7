"""States that are detached at each step of a recurrence, so that nothing learns over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.check import ALWAYS, Check, Finding
from pytest_modelhealth.checks.facts import flow_of, learns
from pytest_modelhealth.settings.layer_names import is_inside

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation
    from pytest_modelhealth.report.flow import Recurrence

_FEWEST = 2
_DETACHES = frozenset({"detach", "data"})
"""What is written to stop a gradient; a sample, a choice or ``no_grad`` stops it besides."""


def detached_states(check: Check, observation: Observation) -> Iterator[Finding]:
    """Yield, as findings of a check, the layers whose own state comes to them detached each time.

    Where each call takes one step of a sequence, gradients go back a single step. Pieces of several
    steps are truncated backpropagation. Where each call takes the same again, as in the search for
    a fixed point, the gradient of the last alone may be meant.
    """
    from pytest_modelhealth.report.flow import near

    layers = observation.layers
    if not any(record.calls > _FEWEST and learns(record) for record in layers.values()):
        return
    by_line: dict[str, tuple[Recurrence, list[str]]] = {}
    for found in flow_of(observation).cut_recurrences():
        if _is_detached(found) and _learns(found.layer, observation):
            by_line.setdefault(found.cuts[0].line, (found, []))[1].append(found.layer)
    for found, names in by_line.values():
        record, sizes = layers[found.layer], _sizes(layers[found.layer])
        if found.takes_more and sizes == _STEPS_AND_WIDTH:
            continue
        yield check.violation(
            record,
            f"its state is detached before each of its {found.calls} calls, so that no gradient "
            f"goes back further than one: {near(str(found.cuts[0]))}",
            value=float(found.calls),
            limit=ALWAYS,
            cause="the state is cut off at every step, and nothing learns over several: detach it "
            "before the first step only, or every so many (truncated backpropagation)",
            affected=names[1:],
            independent=True,
            severity="fail" if found.takes_more and sizes == 1 else "warn",
        )


def _is_detached(found: Recurrence) -> bool:
    return {cut.operation for cut in found.cuts} <= _DETACHES


def _learns(layer: str, observation: Observation) -> bool:
    inside = (r for r in observation.layers.values() if r.name == layer or is_inside(r.name, layer))
    return any(map(learns, inside))


_STEPS_AND_WIDTH = 2


def _sizes(record: LayerRecord) -> int:
    """Return in how many dimensions what it takes of a sample extends."""
    shape = () if record.inputs is None else record.inputs.shape
    return sum(size > 1 for size in shape[1:])
