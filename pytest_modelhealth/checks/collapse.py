"""Outputs that do not depend on the sample, and layers whose units all compute the same."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.dead_units import DYING_ACTIVATIONS
from pytest_modelhealth.checks.facts import (
    FEWEST_UNITS,
    HEALTHY_SPREAD,
    called,
    completed,
    flow_of,
    innermost,
    leaves,
    linear_maps,
    spread_of,
    trainable,
    units_of,
)
from pytest_modelhealth.checks.paths import QUOTIENTS, nearest
from pytest_modelhealth.report import Flow, LayerRecord, Observation, Violation
from pytest_modelhealth.settings import Limit, Settings
from pytest_modelhealth.settings.setting import is_inside

COLLAPSE = CHECKS["collapse"]


_SAME_RANGE = 1e-4
_RESOLUTION = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}
_COARSEST = 2.0**-7
_FEWEST_PREDICTIONS = 3
_DROWNED = 10.0
"""The range of a unit over the samples is up to ten times its root mean square."""
_COMPARISONS = frozenset({"sub", "subtract", "rsub", "isub"}) | QUOTIENTS


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield where samples become one, and layers whose units are one."""
    needed, root = settings["min_collapse_samples"], observation.layers.get("")
    is_enough = observation.samples >= needed.value * observation.batches
    outputs: list[Finding] = []
    if root is not None and root.equal_input_samples is False:
        outputs = list(_equal_outputs(root, observation, None if is_enough else needed))
    yield from outputs
    if is_enough and not outputs:
        yield from _dropped_inputs(observation)
    if is_enough and root is not None and root.equal_input_samples is False:
        yield from _lost_spread(observation, settings)
    symmetric = list(_equal_units(observation))
    yield from symmetric
    if not (outputs or symmetric):
        yield from _equal_predictions(observation)
    yield from _equal_tokens(observation)


def _equal_outputs(
    root: LayerRecord, observation: Observation, needed: Limit | None
) -> Iterator[Finding]:
    """Yield where the samples of a batch become one; too few where more are `needed`."""
    if not root.equal_samples or _is_compared_with_itself(flow_of(observation)):
        return
    flow, layers = flow_of(observation), observation.layers
    culprit, before = _where_samples_became_equal(observation)
    starts_at_zero = _starts_at_zero(culprit)
    after = flow.reach(culprit.name) & flow.feeding("output") if flow.graph.outputs else ()
    is_head = not any(linear_maps(layers[n]) for n in after if n in layers)
    if _is_another_checks(culprit) or (starts_at_zero and is_head):
        return
    if needed is not None:
        reason = (
            f"its output is equal for all {observation.samples} samples, which so few may be; give "
            f"at least {needed.value} (min_collapse_samples, {needed.origin})"
        )
        yield COLLAPSE.inconclusive(culprit, reason)
        return
    if before is not None:
        seen, spread = before.activations, spread_of(before.activations)
        dtype = "" if seen is None else seen.dtype
        if spread < 100.0 * _RESOLUTION.get(dtype, _COARSEST):  # lost to rounding by one more layer
            reason = (
                f"its output is equal for all samples, but before it they differ by no more than "
                f"{spread:.1g} of the largest value: deep layers made them alike little by little"
            )
            yield COLLAPSE.inconclusive(culprit, reason)
            return
    message = f"its output is the same for all {observation.samples} samples"
    cause, severity = _cause(culprit, observation), "fail"
    if starts_at_zero:
        cause = (
            "its weights start or ended at zero, and nothing that tells samples apart goes "
            "past it: zero suits the last layer of a residual branch, gates and heads only"
        )
        # parameters that no batch asks for get to the output past it, as latents do
        beside = flow.feeding("output") - flow.branch(culprit.name) - flow.reach(culprit.name)
        sources = {vertex.name for vertex in flow.graph.vertices if vertex.kind == "parameter"}
        if any(n in sources or (n in layers and trainable(layers[n])) for n in beside):
            severity = "warn"
            cause += "; where it is added to what is learnt for all samples alike, it may be meant"
    yield COLLAPSE.fault(culprit, message, cause=cause, severity=severity)


def _dropped_inputs(observation: Observation) -> Iterator[Violation]:
    """Yield the first layer with weights that gives one output for samples that differ.

    The output of the model may still differ, by another way through it.
    """
    for record in leaves(observation):
        maps = linear_maps(record)
        if not maps or not record.equal_samples or record.equal_input_samples is not False:
            continue
        if _starts_at_zero(record) or any(m.weights.std == 0.0 for m in maps):
            continue
        before, given = _source(record, observation), record.inputs
        if before is not None:  # samples differ by more than rounding
            differ = spread_of(before.activations) >= HEALTHY_SPREAD
        else:
            differ = given is not None and given.std >= HEALTHY_SPREAD * given.abs_max > 0.0
        if differ and not _is_another_checks(record):
            message = f"its output is the same for all {observation.samples} samples, its inputs "
            yield COLLAPSE.fault(record, f"{message}differ", cause=_cause(record, observation))
            return


def _source(record: LayerRecord, observation: Observation) -> LayerRecord | None:
    """Return the layer whose output alone a layer takes, as it is, if there is one."""
    sources = flow_of(observation).producers(record.name, as_it_is=True)
    return observation.layers.get(sources[0]) if len(sources) == 1 else None


def _where_samples_became_equal(
    observation: Observation,
) -> tuple[LayerRecord, LayerRecord | None]:
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


def _is_compared_with_itself(flow: Flow) -> bool:
    """Whether all that is returned is a difference or ratio of a value and itself without gradient.

    As of a policy and the old one, in the first epoch on a batch: its gradient is what is wanted.
    """
    graph = flow.graph
    compared = {
        number
        for number, vertex in enumerate(graph.vertices)
        if vertex.function in _COMPARISONS and len(vertex.operands) == 2
        if vertex.passes_gradient(0) != vertex.passes_gradient(1)
        if flow.is_alike(*vertex.operands)
    }
    returned = set(graph.outputs) - {graph.loss}
    return bool(returned) and compared.issuperset(flow.origins(*returned, others=compared))


def _starts_at_zero(record: LayerRecord) -> bool:
    """Whether a head or a gate that starts at zero makes a layer's output constant."""
    return any(s.abs_max == 0.0 for n, s in trainable(record).items() if "bias" not in n)


def _is_another_checks(record: LayerRecord) -> bool:
    """Whether `finite` or `dead_units` says why all samples are equal."""
    out = record.activations
    is_dead = record.activation in DYING_ACTIVATIONS and out is not None and out.abs_max == 0.0
    return out is None or out.nonfinite_count > 0 or is_dead


def _cause(record: LayerRecord, observation: Observation) -> str:
    out = record.activations
    if any(is_inside(name, record.name) for name in observation.layers):
        return (
            "its own forward does it between its submodules: it drops its input, takes one sample "
            "or a mean over the batch dimension, or multiplies by zero"
        )
    if out is not None and out.abs_max == 0.0:
        return "its output is zero for every sample: a dead layer, or a product with zero"
    for name, values in record.parameters.items():
        if len(values.shape) > 1 and values.std == 0.0:
            return f"its {name} is constant ({values.mean:.3g}): it tells its inputs apart no more"
    if not record.parameters:
        return (
            "it has no parameters: what samples differ by before it cancels out in it, or lies "
            "where it does not look (a mean, a maximum, a slice, one sample)"
        )
    bias = record.parameters.get("bias")
    if bias is not None and out is not None and bias.abs_max > 0.5 * out.abs_max:
        return f"its bias (up to {bias.abs_max:.3g}) drowns what it computes from its inputs"
    return (
        "it drops its input, takes one sample or a mean over the batch dimension, or its weights "
        "are far too small for what it adds"
    )


def _lost_spread(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the layer that takes a healthy spread away at once, never to come back."""
    seen = [r for r in leaves(observation) if units_of(r.activations) is not None]
    spreads = {record.name: spread_of(record.activations) for record in seen}
    limits = {name: settings.limit("min_sample_spread", name) for name in spreads}
    flow, layers = flow_of(observation), observation.layers
    healthy = {name: 1.0 for name, s in spreads.items() if s >= limits[name].value}
    after = nearest(observation, healthy, back=True)
    asked = [c.target.rms for c in observation.loss_calls if not c.classes and c.target is not None]
    for name, spread in spreads.items():
        culprit, before = layers[name], _source(layers[name], observation)
        if name in healthy or name in after or spread == 0.0:
            continue  # where all are equal, gates are left out
        if before is None or not before.name:
            yield from _drowned_inputs(observation, spread, culprit, limits[name])
            continue
        # a dropout alone may tell samples apart, or the bias be where targets are: years
        makers = [layers[n] for n in flow.producers(before.name) if n in layers]
        is_same = not makers or any(r.equal_samples for r in makers)
        bias = culprit.parameters.get("bias")
        is_last = "output" in flow.consumers(name, as_it_is=True)
        is_meant = ("Dropout" in before.type_name and is_same) or (
            is_last and bias is not None and any(rms > 0.5 * bias.abs_max for rms in asked)
        )
        if spread_of(before.activations) >= HEALTHY_SPREAD and not is_meant:
            yield COLLAPSE.violation(
                culprit,
                f"over the samples its units vary by only {spread:.2g} of its largest value, those "
                f"of {before.label!r} before it by {spread_of(before.activations):.2g}",
                value=spread,
                limit=limits[name],
                cause=_cause(culprit, observation),
            )


def _drowned_inputs(
    observation: Observation, spread: float, record: LayerRecord, limit: Limit
) -> Iterator[Finding]:
    """Yield the first layer where its bias leaves nothing of a batch in too large a unit.

    Samples may differ by little on purpose; here all that the inputs make of the output is little.
    """
    given, out = record.inputs, record.activations
    bias, maps, flow = record.parameters.get("bias"), linear_maps(record), flow_of(observation)
    if given is None or out is None or bias is None or not maps:
        return
    if set(flow.inputs).isdisjoint(flow.producers(record.name, as_it_is=True)):
        return
    signal = maps[0].scale * given.rms
    if bias.abs_max > 0.5 * out.abs_max and signal < _DROWNED * limit.value * out.abs_max:
        message = (
            f"over the samples its units vary by only {spread:.2g} of its largest value: its "
            f"inputs have a root mean square of {given.rms:.2g}"
        )
        cause = (
            f"the batch is so small that the bias (up to {bias.abs_max:.3g}) drowns it: another "
            "unit, or scaled twice; normalise it to mean 0 and variance 1"
        )
        yield COLLAPSE.violation(record, message, value=spread, limit=limit, cause=cause)


def _equal_units(observation: Observation) -> Iterator[Violation]:
    for record in called(observation):
        is_recurrent = record.options.get("hidden_size") is not None  # saturates at the same ends
        if linear_maps(record) and not is_recurrent and (count := _symmetric_units(record)):
            message = f"all {count} units have the same range over the samples: they are one unit"
            cause = (
                "symmetric weights: each unit starts with the same ones, gets the same gradient "
                "and stays the same; initialise at random"
            )
            yield COLLAPSE.fault(record, message, value=1.0, cause=cause)


def _equal_predictions(observation: Observation) -> Iterator[Violation]:
    """Yield the model if it predicts one value a sample, again and again, for several targets.

    Predictions that all end at the same whole numbers are bounded, or rounded.
    """
    for call in observation.loss_calls:
        made, asked, units = call.input, call.target, units_of(call.input)
        if made is None or asked is None or units is None or call.classes:
            continue
        count, ends = len(units.alive), {*units.minimum.tolist(), *units.maximum.tolist()}
        is_one = len(ends) == 2 and not all(map(float.is_integer, ends))
        if asked.shape != made.shape or count < _FEWEST_PREDICTIONS or not is_one:
            continue
        yield COLLAPSE.fault(
            observation.layers[""],
            f"its {count} predictions a sample have the same range over the samples: they are the "
            "same one",
            value=1.0,
            cause="each step begins at the same state again, or the last one is repeated for all; "
            "one level for all targets may be meant, too",
            severity="warn",
        )
        return


def _equal_tokens(observation: Observation) -> Iterator[Violation]:
    """Yield the first attention that tells no tokens apart although one before it does.

    Scores of zero, from queries or keys that start there, are uniform on purpose; others are only
    where the keys of all tokens are equal.
    """
    told_apart: set[int] = set()
    for record in called(observation):
        given, out = record.inputs, record.activations
        if record.activation != "softmax" or given is None or out is None or not out.shape:
            continue
        choices = out.shape[-1]
        if out.nonfinite_count or len(out.shape) < 3 or choices < FEWEST_UNITS:
            continue
        unevenness = (out.max - out.min) * choices
        if unevenness > HEALTHY_SPREAD:
            told_apart.add(choices)
        elif choices in told_apart and unevenness < _SAME_RANGE and given.rms > HEALTHY_SPREAD:
            message = (
                f"it weighs all {choices} tokens alike, up to {unevenness:.1g}, though its scores "
                f"are about {given.rms:.2g}: their keys have become equal"
            )
            cause = (
                "blocks before it average tokens until none differs, as attention without residual "
                "connections does: add the input of each block to its output (x + branch(x))"
            )
            yield COLLAPSE.violation(record, message, value=unevenness, cause=cause)
            return


def _symmetric_units(record: LayerRecord) -> int:
    """Return how many units a layer has if all of them span the same range, else 0.

    Units with equal weights differ by their bias alone, so that their ranges are equal.
    """
    out, units = record.activations, units_of(record.activations)
    if out is None or units is None:
        return 0
    ranges = units.maximum - units.minimum
    largest = float(ranges.max())
    rounding = 8.0 * _RESOLUTION.get(out.dtype, _COARSEST) * out.abs_max
    if len(ranges) < FEWEST_UNITS or largest <= HEALTHY_SPREAD * out.abs_max:
        return 0
    is_one = largest - float(ranges.min()) <= max(_SAME_RANGE * largest, rounding)
    return len(ranges) if is_one and largest > 4.0 * rounding else 0
