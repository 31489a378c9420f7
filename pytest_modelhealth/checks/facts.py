"""Facts about layers that several checks ask for: what ran, in which order, what lies in what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.settings.layer_names import parent

if TYPE_CHECKING:
    from pytest_modelhealth.report import Flow, LayerRecord, Observation
    from pytest_modelhealth.statistics import TensorStatistics


def called(observation: Observation) -> list[LayerRecord]:
    """Return the layers that ran, in the order in which they were entered."""
    return [record for record in observation.layers.values() if record.entered is not None]


def place(observation: Observation, layer: str = "") -> LayerRecord:
    """Return the record of a layer, or of the model where it has none of its own."""
    return observation.layers.get(layer, observation.layers[""])


def flow_of(observation: Observation) -> Flow:
    """Return who feeds whom; of observations that no verdict is made of, inferred at each call."""
    flow = observation.flow
    if flow is None:
        # which loads the report, as no check may when pytest prints its help
        from pytest_modelhealth.report.flow.inferred import with_flow

        flow = with_flow(observation).flow
    assert flow is not None
    return flow


def largest_at(record: LayerRecord, role: str) -> tuple[str, ...]:
    """Return in which batch and sample the largest value of a layer stood, a sentence, if known."""
    found = record.largest.get(role)
    if found is None:
        return ()
    what = role.removesuffix("s")
    return (f"the largest {what} of {record.label!r}, {found.value:.4g}, was in {found}",)


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


def at(line: str) -> str:
    """Return where in the user's code something is, as a phrase; ``""`` if that is not known."""
    return f" at {line}" if line else ""


def enclosing(layer: str) -> Iterator[str]:
    """Yield a layer and the modules that it lies in, but the model itself."""
    while layer:
        yield layer
        layer = parent(layer)


def gives_nothing(record: LayerRecord) -> bool:
    """Whether what a layer returned is empty, or holds no tensor that could pass a gradient."""
    out = record.activations
    return record.status == "unsupported" if out is None else out.count == 0


def is_in_an_empty_part(record: LayerRecord, observation: Observation) -> bool:
    """Whether it or a module around it returned nothing that could pass a gradient back.

    What summarises windows of tokens returns an empty tensor where a sequence is shorter than a
    window. An indexer returns the places of tokens, and learns from a loss of its own.
    """
    modules = (observation.layers.get(name) for name in enclosing(record.name))
    return any(r is not None and r.entered is not None and gives_nothing(r) for r in modules)


def innermost(records: Iterable[LayerRecord]) -> list[LayerRecord]:
    """Return the records that contain no other of them, in the order of completion."""
    records = list(records)
    around = {parent(layer) for record in records for layer in enclosing(record.name)}
    return sorted((r for r in records if r.name not in around), key=completed)


def leaves(observation: Observation) -> list[LayerRecord]:
    """Return the layers that ran and contain no other that ran, in the order of completion."""
    return innermost(called(observation))


def completed(record: LayerRecord) -> int:
    """Return when a layer last returned; a layer that raised never did."""
    return -1 if record.completed is None else record.completed


def trainable(record: LayerRecord) -> dict[str, TensorStatistics]:
    """Return the layer's own parameters that require gradients."""
    return {name: s for name, s in record.parameters.items() if name not in record.frozen}


def gain(record: LayerRecord) -> float | None:
    """Return the root mean square of a layer's output relative to that of its inputs, if known."""
    given, returned = record.inputs, record.activations
    if given is None or returned is None or not given.finite_count or not given.rms:
        return None
    return returned.rms / given.rms
