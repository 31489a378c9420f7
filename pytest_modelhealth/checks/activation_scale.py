"""Activations that grow or fade on their way through the model, and where that begins."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import flow_of, gain, largest_at, leaves, linear_maps
from pytest_modelhealth.checks.paths import (
    as_given,
    factors,
    is_floating,
    nearest,
    way_to,
    way_to_weights,
)
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, LayerRecord, Observation
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
    grown = list(_grown(observation, settings, inner, bases))
    yield from grown or _stream(observation, settings, inner, bases)
    yield from _faded(observation, settings, inner, bases)


_Records = dict[str, LayerRecord]


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
        base = bases[name]
        growth, limit = scales[name] / base, settings.limit("max_activation_growth", name)
        stays = name in after and after[name][0] * _JUMP > limit.value * base
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
    norms = [r for r in inner.values() if r.type_name in having("normalization")]
    given = {r.name: r.inputs.rms for r in norms if r.inputs and _is_judged(r.inputs)}
    name = max(given, key=lambda layer: given[layer] / bases[layer], default="")
    limit = settings.limit("max_activation_growth", name)
    growth = given.get(name, 0.0) / bases.get(name, 1.0)
    if growth <= limit.value**2:
        return
    way = way_to(name, nearest(observation, given))
    first, *others = (layer for layer in way if given[layer] > _RISEN * bases[name])
    before = flow_of(observation).producers(way[max(way.index(first) - 1, 0)])
    yield ACTIVATION_SCALE.violation(
        inner[first],
        f"what normalisations are given grows from here to {growth:.3g} times the scale of the "
        f"inputs (root mean square {given[name]:.3g} at {inner[name].label!r})",
        value=growth,
        limit=Limit(limit.value**2, limit.origin),
        role="inputs",
        cause="a residual stream that is scaled up in every block, or branches that add far more "
        "than the stream holds: x + branch(norm(x)) adds each once"
        f"{factors(observation, before, first)}",
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
        scale = _rms(row[-1].activations) / bases[name] if len(row) >= _FEWEST_IN_A_ROW else 1.0
        limit = settings.exceeded("min_activation_scale", name, scale)
        if limit is not None:
            explained.update(record.name for record in row)
            yield ACTIVATION_SCALE.violation(
                first,
                f"activations fade to {scale:.2g} of the scale of the inputs over {len(row)} "
                f"layers, at {row[-1].label!r}",
                value=scale,
                limit=limit,
                cause="each layer from here on shrinks what it is given: weights too small, a "
                "factor or a flat activation, and no bias or norm to hold the signal up",
                affected=[r.name for r in row[1:]],
            )


def _shrinking_row(
    observation: Observation, first: LayerRecord, judged: _Records
) -> list[LayerRecord]:
    """Return the layers with weights that feed each other from `first` on, while each shrinks.

    Nothing comes of queries that start at zero, or fades.
    """
    row: list[LayerRecord] = []
    here = first
    while (own := gain(here)) is not None and own < _SHRINKS and here not in row:
        row.append(here)
        path = way_to_weights(observation, here)
        if not path or any(layer.type_name in having("normalization") for layer in path):
            break  # a norm brings the signal back, once it has seen a batch
        here = path[-1]
        if here.name not in judged:
            break
    return row


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
        factor, record = after / max(before, base), way[place]
        if factor > _JUMP:
            sources = [way[place - 1].name] if place else flow_of(observation).inputs
            own = gain(record)
            if own is not None and own < _JUMP / 3.0:
                made = factors(observation, sources, record.name)
                return record, (
                    f"what comes in is {factor:.3g} times larger than what went out before it{made}"
                )
            return record, (
                f"it gives out {own or factor:.3g} times what it takes: weights too large, or it "
                "sums, or a factor is missing or misplaced in its forward"
            )
    risen = len(way) - 1
    while risen > 0 and scales[risen] > _RISEN * base:
        risen -= 1
    weighted = [record for record in way[risen:] if linear_maps(record)]
    return (weighted or way[risen:])[0], (
        "the gains of the layers from here on multiply: weights too large, or a residual stream "
        "that is added to without a normalisation"
    )
