"""Outputs that do not depend on the sample."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import (
    called,
    completed,
    flow_of,
    innermost,
    linear_maps,
    spread_of,
    trainable,
)
from pytest_modelhealth.checks.paths import nearest
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, Flow, LayerRecord, Observation
from pytest_modelhealth.settings import Limit, Settings
from pytest_modelhealth.settings.setting import is_inside
from pytest_modelhealth.statistics import TensorStatistics

COLLAPSE = CHECKS["collapse"]

_RESOLUTION = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}
_COARSEST = 2.0**-7


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield where samples become one."""
    root = observation.layers.get("")
    if root is None or not root.equal_samples or root.equal_input_samples is not False:
        return
    if not _is_compared_with_itself(flow_of(observation), root.activations):
        yield from _equal_outputs(observation, settings["min_collapse_samples"])


def _equal_outputs(observation: Observation, needed: Limit) -> Iterator[Finding]:
    """Yield where the samples of a batch become one, unless a head or gate starts at zero there."""
    flow, layers = flow_of(observation), observation.layers
    culprit, before = _where_samples_became_equal(observation)
    starts_at_zero = any(s.abs_max == 0.0 for n, s in trainable(culprit).items() if "bias" not in n)
    after = flow.reach(culprit.name) & flow.feeding("output") if flow.graph.outputs else ()
    is_head = not any(linear_maps(layers[n]) for n in after if n in layers)
    out = culprit.activations
    is_dead = culprit.activation in having("dying") and out is not None and out.abs_max == 0.0
    if out is None or out.nonfinite_count or is_dead or (starts_at_zero and is_head):
        return  # `finite` or `dead_units` says why
    spread = 1.0 if before is None else spread_of(before.activations)
    dtype = before.activations.dtype if before is not None and before.activations else ""
    message, reason = f"its output is the same for all {observation.samples} samples", ""
    if observation.samples < needed.value * observation.batches:
        reason = f"so few may be; give at least {needed.value} (min_collapse_samples, "
        reason += f"{needed.origin})"
    elif spread < 100.0 * _RESOLUTION.get(dtype, _COARSEST):  # lost to rounding by one more layer
        reason = f"but before it they differ by no more than {spread:.1g} of the largest value"
    if reason:
        yield COLLAPSE.inconclusive(culprit, f"{message}, {reason}")
        return
    cause, sources = _cause(culprit, observation), set[str]()
    if starts_at_zero:
        cause = (
            "its weights start or ended at zero, and nothing that tells samples apart goes "
            "past it: zero suits the last layer of a residual branch, gates and heads only"
        )  # where it is added to latents, which are learnt for all samples alike, it may be meant
        sources = {vertex.name for vertex in flow.graph.vertices if vertex.kind == "parameter"}
    is_meant = sources & (flow.feeding("output") - flow.branch(culprit.name))
    yield COLLAPSE.fault(culprit, message, cause=cause, severity="warn" if is_meant else "fail")


def _where_samples_became_equal(observation: Observation) -> tuple[LayerRecord, LayerRecord | None]:
    """Return the layer past which no differing samples get, and the last where they differ."""
    flow, root = flow_of(observation), observation.layers[""]
    feeding = flow.feeding("output") if flow.graph.outputs else observation.layers.keys()
    inner = [r for r in called(observation) if r.name in feeding]
    differing = {r.name: float(completed(r)) for r in inner if r.equal_samples is False}

    def is_passed_by(record: LayerRecord) -> bool:
        if not flow.is_exact:  # it says too much: the order has to do
            return completed(record) < max(differing.values(), default=-1)

        def pass_on(layer: str, came: bool | None) -> bool | None:
            return layer == root.name or (came if layer not in {record.name, *differing} else None)

        reaching = flow.sweep(pass_on, max, back=True)
        return not differing.keys().isdisjoint(reaching)

    equal = innermost(r for r in inner if r.equal_samples and r.equal_input_samples is False)
    culprit = next((record for record in equal if not is_passed_by(record)), root)
    before = nearest(observation, differing).get(culprit.name)
    return culprit, None if before is None else observation.layers[before[1]]


def _is_compared_with_itself(flow: Flow, out: TensorStatistics | None) -> bool:
    """Whether all that is returned is a difference or ratio of a value and itself without gradient.

    As of a policy and the old one, in the first epoch on a batch: its gradient is what is wanted.
    The old one may be a copy of the model: then the values say so, as they leave 0 or 1.
    """
    graph = flow.graph
    is_even = out is not None and out.min == out.max and out.max in {0.0, 1.0}
    compared = {
        number
        for number, vertex in flow.operation_vertices.items()
        if vertex.has("difference", "quotient") and len(vertex.operands) == 2
        if vertex.passes_gradient(0) != vertex.passes_gradient(1)
        if is_even or flow.is_alike(*vertex.operands)
    }
    returned = set(graph.outputs) - {graph.loss}
    return bool(returned) and compared.issuperset(flow.origins(*returned, others=compared))


def _cause(record: LayerRecord, observation: Observation) -> str:
    out, how = record.activations, "its bias or constant weights drown what it makes of its inputs"
    drops = "it drops its input, takes one sample or a mean over the batch dimension, or"
    if any(is_inside(name, record.name) for name in observation.layers):
        return f"its own forward does it between its submodules: {drops} multiplies by zero"
    if out is not None and out.abs_max == 0.0:
        return "its output is zero for every sample: a dead layer, or a product with zero"
    if not record.parameters:
        how = "what samples differ by before it cancels out in it, or lies where it does not look"
    return f"{drops} {how}"
