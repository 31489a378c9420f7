"""Activations that grow or fade on their way through the model, and where that begins."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.facts import flow_of, gain, largest_at, leaves, linear_maps
from pytest_modelhealth.checks.paths import (
    NORMALIZATIONS,
    as_given,
    factors,
    is_floating,
    nearest,
    way_to,
    way_to_weights,
)
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.settings import Limit, Settings
from pytest_modelhealth.statistics import TensorStatistics

ACTIVATION_SCALE = CHECKS["activation_scale"]


_JUMP = 10.0
_RISEN = 3.0
_MASK = 1e8
_SHRINKS = 0.2
_FEWEST_IN_A_ROW = 3


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the layers where activations begin to grow too large, or fade, if they do."""
    inner = {r.name: r for r in leaves(observation) if _is_judged(r.activations)}
    bases = _bases(observation, inner)
    found = list(_grown(observation, settings, inner, bases))
    yield from found or _stream(observation, settings, inner, bases)
    yield from _faded(observation, settings, inner, bases)


_Records = dict[str, "LayerRecord"]


def _bases(observation: Observation, inner: _Records) -> dict[str, float]:
    """Return what each layer's scale is compared with: the inputs it is made of, at least 1.

    Of what is made of ids or constants alone, it is the least scale of the first layers.
    """
    flow, root = flow_of(observation), observation.layers.get("")
    whole, given = None if root is None else root.inputs, {}
    for name in ("", *flow.inputs):
        tensor = whole if not name else as_given(observation, name) or whole
        if tensor is not None and is_floating(tensor) and _is_judged(tensor):
            given[name] = (1, tensor.rms)

    def pass_on(layer: str, came: tuple[int, float] | None) -> tuple[int, float] | None:
        if came is None and layer in inner:
            first = (0, -_rms(inner[layer].activations))
            return first if flow.is_exact else given.get("", first)
        return given.get(layer, came) if layer else came

    came = flow.sweep(pass_on, max)
    own = {name: (0, _rms(record.activations)) for name, record in inner.items()}
    return {name: max(abs(scale), 1.0) for name, (_, scale) in {**own, **came}.items()}


def _grown(
    observation: Observation, settings: Settings, inner: _Records, bases: dict[str, float]
) -> Iterator[Finding]:
    """Yield where growths begin, if other weights come after and what is next does not end them."""
    scales = {name: _rms(record.activations) for name, record in inner.items()}
    before, after = nearest(observation, scales), nearest(observation, scales, back=True)
    weighted = {name: 1.0 for name, record in inner.items() if linear_maps(record)}
    before_weights = nearest(observation, weighted, back=True)
    explained: set[str] = set()
    for name, record in inner.items():
        limit, base = settings.limit("max_activation_growth", name), bases[name]
        stays = name in after and after[name][0] * _JUMP > limit.value * base
        growth = scales[name] / base
        if growth <= limit.value or not stays or name not in before_weights or name in explained:
            continue
        culprit, cause = _origin(observation, [inner[n] for n in way_to(name, before)], base)
        message = (
            f"activations grow to {growth:.3g} times the scale of the inputs "
            f"(root mean square {scales[name]:.3g} at {record.label!r})"
        )
        reached = flow_of(observation).reach(culprit.name)
        explained |= {name, *reached}
        yield ACTIVATION_SCALE.violation(
            culprit,
            message,
            value=growth,
            limit=limit,
            cause=cause,
            affected=[layer for layer in inner if layer in reached],
            seen_in=() if record is culprit else (name,),
            details=largest_at(record, "activations"),
        )


def _stream(
    observation: Observation, settings: Settings, inner: _Records, bases: dict[str, float]
) -> Iterator[Finding]:
    """Yield where a residual stream begins to grow that normalisations hide."""
    given = {
        name: _rms(record.inputs)
        for name, record in inner.items()
        if record.type_name in NORMALIZATIONS and _is_judged(record.inputs)
    }
    if not given:
        return
    name = max(given, key=lambda layer: given[layer] / bases[layer])
    limit, growth = settings.limit("max_activation_growth", name), given[name] / bases[name]
    if growth <= limit.value**2:
        return
    way = way_to(name, nearest(observation, given))
    first, *others = (layer for layer in way if given[layer] > _RISEN * bases[name])
    message = (
        f"what normalisations are given grows from here to {growth:.3g} times the scale of the "
        f"inputs (root mean square {given[name]:.3g} at {inner[name].label!r})"
    )
    before = way[max(way.index(first) - 1, 0)]
    made = factors(observation, flow_of(observation).producers(before), first)
    yield ACTIVATION_SCALE.violation(
        inner[first],
        message,
        value=growth,
        limit=Limit(limit.value**2, limit.origin),
        role="inputs",
        cause="a residual stream that is scaled up in every block, or branches that add far more "
        f"than the stream holds: x + branch(norm(x)) adds each once{made}",
        affected=others,
        details=largest_at(inner[first], "activations"),
    )


def _faded(
    observation: Observation, settings: Settings, inner: _Records, bases: dict[str, float]
) -> Iterator[Finding]:
    """Yield the first of several layers in a row that each shrink what they are given."""
    explained: set[str] = set()
    for name, first in inner.items():
        if name in explained or not linear_maps(first):
            continue
        row = _shrinking_row(observation, first, inner)
        if len(row) < _FEWEST_IN_A_ROW:
            continue
        scale = _rms(row[-1].activations) / bases[name]
        limit = settings.limit("min_activation_scale", row[-1].name)
        if scale < limit.value:
            explained.update(record.name for record in row)
            small = [r for r in row if all(m.scale < 2.0 * _SHRINKS for m in linear_maps(r))]
            why = "a factor or a flat activation between them, and no normalisation"
            if 2 * len(small) > len(row):
                why = "weights too small, without biases or normalisation to hold the signal up"
            message = (
                f"activations fade to {scale:.2g} of the scale of the inputs over "
                f"{len(row)} layers, at {row[-1].label!r}"
            )
            yield ACTIVATION_SCALE.violation(
                first,
                message,
                value=scale,
                limit=limit,
                cause=f"each layer from here on shrinks what it is given: {why}",
                affected=[r.name for r in row[1:]],
            )


def _shrinking_row(
    observation: Observation, first: LayerRecord, judged: _Records
) -> list[LayerRecord]:
    """Return the layers with weights that feed each other from `first` on, while each shrinks.

    Nothing comes of queries that start at zero, or fades.
    """

    def shrinks(record: LayerRecord) -> bool:
        found = gain(record)
        return found is not None and found < _SHRINKS

    row = [first]
    while shrinks(row[-1]):
        path = way_to_weights(observation, row[-1])
        if any(layer.type_name in NORMALIZATIONS for layer in path):
            break  # it brings the signal back, once it has seen a batch
        if not path or path[-1] in row or path[-1].name not in judged:
            break
        row.append(path[-1])
    return row if shrinks(row[-1]) else row[:-1]


def _is_judged(statistics: TensorStatistics | None) -> bool:
    """Leave out what `finite` judges, masks, and layers that show no numbers."""
    return (
        statistics is not None
        and statistics.count > 0
        and not statistics.nonfinite_count
        and not statistics.min < -_MASK
    )


def _rms(statistics: TensorStatistics | None) -> float:
    return 0.0 if statistics is None else statistics.rms


def _origin(
    observation: Observation, way: list[LayerRecord], base: float
) -> tuple[LayerRecord, str]:
    """Return the layer where the growth along a way begins, and its likely cause."""
    scales = [base, *(_rms(record.activations) for record in way)]
    for place, (before, after) in enumerate(pairwise(scales)):
        if after > _JUMP * max(before, base):
            sources = [way[place - 1].name] if place else flow_of(observation).inputs
            made = factors(observation, sources, way[place].name)
            return way[place], _jump_cause(way[place], after / max(before, base), made)
    risen = len(way) - 1
    while risen > 0 and scales[risen] > _RISEN * base:
        risen -= 1
    weighted = [record for record in way[risen:] if linear_maps(record)]
    large = [r for r in weighted if max(m.scale for m in linear_maps(r)) > _LARGE]
    why = "a residual stream that is added to without a normalisation, or a factor in the forward"
    if 2 * len(large) > len(weighted):
        why = "weights too large"
    return (weighted or way[risen:])[0], f"the gains of the layers from here on multiply: {why}"


_LARGE = 1.7
"""He et al. (2015) start at 1.41, which keeps the scale behind a ReLU."""


def _jump_cause(record: LayerRecord, factor: float, made: str) -> str:
    given, own = record.inputs, gain(record)
    if own is not None:
        if own < _JUMP / 3.0:
            return f"what comes in is {factor:.3g} times larger than what went out before it{made}"
        factor = own
    gains = {found.tensor: found.scale for found in linear_maps(record)}
    for name, values in record.parameters.items():
        reach = gains.get(name, values.abs_max)
        reach *= 1.0 if "bias" in name or given is None else given.rms
        if 2.0 * reach >= _rms(record.activations):
            return f"it magnifies by {factor:.3g}: its {name} reaches {values.abs_max:.3g}"
    return (
        f"it gives out {factor:.3g} times what it takes: it sums, takes the largest, or a factor "
        "is missing or misplaced in its forward"
    )
