"""What an observation is without its numbers: equal on all ranks, or else sent once a kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_modelhealth.ranks.company import Company, digest
from pytest_modelhealth.ranks.placing import Key
from pytest_modelhealth.report import UNCALLED, LayerRecord, Observation
from pytest_modelhealth.report.flow import Flow
from pytest_modelhealth.report.flow.graph import Graph
from pytest_modelhealth.report.observation import FULLNESS, MEASURED


@dataclass(frozen=True)
class Skeleton:
    """What ranks saw, without numbers.

    Args:
        observation: the layers of all ranks and what they agree on. Numbers in it are not of all
            ranks.
        keys: the tensors of all ranks, in order.
        layouts: the ranks that saw the same, of each different layout.
    """

    observation: Observation
    keys: tuple[Key, ...]
    layouts: tuple[tuple[int, ...], ...]


def told(own: Observation, keys: Sequence[Key]) -> tuple[str, str]:
    """Return what tells apart what ranks saw, without numbers: the layers, and the flow."""
    described = [_described(record) for record in own.layers.values()]
    graph = None if own.flow is None else own.flow.graph
    return digest(repr((described, keys, _rest(_bare(own))))), digest(_told(graph))


def agreed(
    company: Company,
    own: Observation,
    keys: Sequence[Key],
    layouts: Sequence[str],
    flows: Sequence[str],
) -> Skeleton:
    """Return what the ranks saw, the same on each; nothing is sent where it is equal anyway.

    Args:
        company: the ranks.
        own: what this one saw.
        keys: the tensors of this one.
        layouts, flows: what `told` returned on each rank.
    """
    flow = _agreed_flow(company, own.flow, flows)
    if len(set(layouts)) == 1:
        return Skeleton(replace(_bare(own), flow=flow), tuple(keys), (company.ranks,))
    layers = {name: _bare_record(record) for name, record in own.layers.items()}
    bare = replace(_bare(own), layers=layers)
    found = company.each((bare, keys), layouts)
    merged = found[0][1][0]
    union: dict[Key, None] = dict.fromkeys(map(tuple, found[0][1][1]))
    for _, (other, theirs) in found[1:]:
        merged = _merged(merged, other)
        union.update(dict.fromkeys(map(tuple, theirs)))
    return Skeleton(replace(merged, flow=flow), tuple(union), tuple(ranks for ranks, _ in found))


def _bare(own: Observation) -> Observation:
    return replace(
        own,
        flow=None,
        loss=None,
        samples=0,
        sample_deviation=None,
        loss_calls=tuple(
            replace(call, input=None, target=None, value=None, log_normalizer=None, targets=None)
            for call in own.loss_calls
        ),
        tasks=(),
        unregistered=tuple(replace(one, gradient=None) for one in own.unregistered),
        notes=(),
        errors=(),
        loss_path=own.loss_path and replace(own.loss_path, widened=None),
        given=(),
    )


def _bare_record(record: LayerRecord) -> LayerRecord:
    return replace(
        record,
        inputs=None,
        activations=None,
        gradients=None,
        parameters={},
        parameter_gradients={},
        buffers={},
        nonfinite_calls={},
        equal_samples=None,
        equal_input_samples=None,
        zero_slices={},
        largest={},
        nonfinite={},
        placements={},
        options={k: v for k, v in record.options.items() if k not in MEASURED},
    )


def _described(record: LayerRecord) -> tuple[Any, ...]:
    """Return what tells records apart, in an order that does not depend on hashes."""
    return (
        *(record.name, record.type_name, record.status.value, record.reason, record.functional),
        *(record.activation, record.entered, record.completed, record.calls, record.aliases),
        *(sorted(record.frozen), sorted(record.unreached), sorted(record.read_in_vain)),
        *(sorted(record.tied.items()), record.grad_off, sorted(record.watched), record.source),
        sorted((k, v) for k, v in record.options.items() if k not in MEASURED),
    )


def _rest(bare: Observation) -> tuple[Any, ...]:
    return (
        *(bare.model_type, bare.backward, bare.no_gradients, bare.batches, bare.own_functions),
        *(bare.unlisted, bare.loss_path, bare.unregistered),
        *((call.function, call.layer, sorted(call.options)) for call in bare.loss_calls),
    )


def _merged(one: Observation, other: Observation) -> Observation:
    """Return the layers of both; what is no layer is that of the first."""
    layers = dict(one.layers)
    for name, record in other.layers.items():
        layers[name] = _merged_record(layers[name], record) if name in layers else record
    ordered = sorted(layers.values(), key=_order)
    return replace(
        one,
        layers={record.name: record for record in ordered},
        backward=one.backward or other.backward,
        no_gradients=one.no_gradients if other.no_gradients else "",
        own_functions=one.own_functions or other.own_functions,
        unregistered=one.unregistered or other.unregistered,
    )


def _order(record: LayerRecord) -> tuple[bool, int]:
    return record.status in UNCALLED, 0  # a stable sort keeps the order of the ranks


def _merged_record(one: LayerRecord, other: LayerRecord) -> LayerRecord:
    fuller = one if FULLNESS.index(one.status) <= FULLNESS.index(other.status) else other
    return replace(
        fuller,
        calls=max(one.calls, other.calls),
        entered=one.entered if one.entered is not None else other.entered,
        completed=one.completed if one.completed is not None else other.completed,
        unreached=one.unreached & other.unreached,
        read_in_vain=one.read_in_vain & other.read_in_vain,
        frozen=one.frozen & other.frozen,
        grad_off=one.grad_off or other.grad_off,
    )


def _agreed_flow(company: Company, flow: Flow | None, flows: Sequence[str]) -> Flow | None:
    """Return the flow of the first rank, which nearly always is that of all."""
    graph = None if flow is None else flow.graph
    found = company.each(graph, flows)
    if len(found) == 1:
        return flow
    first: Graph | None = next((graph for _, graph in found if graph is not None), None)
    return None if first is None else Flow(lambda: first)


def _told(graph: Graph | None) -> str:
    if graph is None:
        return ""
    vertices = [
        (v.kind.value, v.name, v.operands, sorted(v.cuts), v.call, v.live, v.line)
        for v in graph.vertices
    ]
    return repr((vertices, graph.calls, graph.outputs, graph.loss, graph.notes))
