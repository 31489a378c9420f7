"""What checks ask of an observation: who feeds whom, what lies inside what, in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_modelhealth.report import Flow, LayerRecord, Observation
    from pytest_modelhealth.statistics import TensorStatistics


def called(observation: Observation) -> list[LayerRecord]:
    """Return the layers that ran, in the order in which they were entered."""
    return [record for record in observation.layers.values() if record.entered is not None]


def flow_of(observation: Observation) -> Flow:
    """Return who feeds whom; of observations that no verdict is made of, inferred at each call."""
    flow = observation.flow
    if flow is None:
        from pytest_modelhealth.checks.judging.inferred import (
            with_flow,  # with the report, unlike checks
        )

        flow = with_flow(observation).flow
    assert flow is not None
    return flow


def is_inside(layer: str, container: str) -> bool:
    """Whether `layer` lies below `container` in the tree of modules."""
    return layer != container and (not container or layer.startswith(f"{container}."))


def parent(layer: str) -> str:
    """Return the name of the module that `layer` lies in; of the model itself, ``""``."""
    return layer.rpartition(".")[0]


def learns(record: LayerRecord) -> bool:
    """Whether a parameter of a layer gets a gradient that is not zero throughout."""
    return any(s.abs_max > 0.0 for s in record.parameter_gradients.values())


def is_closed(record: LayerRecord) -> bool:
    """Whether a layer multiplies by parameters of zero, and learns; a bias is only added.

    What is frozen or gets no gradient never opens: queries and keys that are both zero.
    """
    return learns(record) and any(
        s.abs_max == 0.0 and not name.rpartition(".")[2].startswith(("bias", "beta", "shift"))
        for name, s in record.parameters.items()
    )


def innermost(records: Iterable[LayerRecord]) -> list[LayerRecord]:
    """Return the records that contain no other of them, in the order of completion."""
    records = list(records)
    around = {container for record in records for container in _containers(record.name)}
    return sorted((r for r in records if r.name not in around), key=completed)


def _containers(layer: str) -> Iterator[str]:
    """Yield the names of all modules that `layer` lies in, the nearest first."""
    while layer:
        layer = parent(layer)
        yield layer


def leaves(observation: Observation) -> list[LayerRecord]:
    """Return the layers that ran and contain no other that ran, in the order of completion."""
    return innermost(called(observation))


def completed(record: LayerRecord) -> int:
    """Return when a layer last returned; a layer that raised never did."""
    return -1 if record.completed is None else record.completed


def producer(observation: Observation, record: LayerRecord) -> LayerRecord | None:
    """Return the innermost layer whose activations are the inputs of `record`, if there is one.

    Layers are matched by their numbers, which survive ``detach``, copies and reshapes.
    """
    if record.inputs is None or record.entered is None:
        return None
    entered = record.entered
    earlier = [
        other
        for other in called(observation)
        if completed(other) < entered and same_values(other.activations, record.inputs)
    ]
    return innermost(earlier)[-1] if earlier else None


def consumers(observation: Observation, record: LayerRecord) -> list[LayerRecord]:
    """Return the layers that take the activations of `record` as they are."""
    return [
        other
        for other in called(observation)
        if (other.entered or 0) > completed(record)
        and same_values(record.activations, other.inputs)
    ]


def same_values(a: TensorStatistics | None, b: TensorStatistics | None) -> bool:
    """Whether two tensors hold the same numbers, as far as their statistics tell."""
    if a is None or b is None or a.count != b.count:
        return False
    if a.min != b.min and not math.isnan(a.min):  # which tells most apart, and is at hand
        return False
    if a.finite_count != b.finite_count:
        return False
    if a.finite_count == 0:
        return a.shape == b.shape
    return (a.min, a.max, a.zero_count) == (b.min, b.max, b.zero_count) and _close(a, b)


def _close(a: TensorStatistics, b: TensorStatistics) -> bool:
    """Allow for the order of summation, which a reshape changes."""
    return abs(a.mean - b.mean) <= 1e-9 * a.rms and abs(a.rms - b.rms) <= 1e-9 * a.rms


def trainable(record: LayerRecord) -> dict[str, TensorStatistics]:
    """Return the layer's own parameters that require gradients."""
    return {name: s for name, s in record.parameters.items() if name not in record.frozen}
