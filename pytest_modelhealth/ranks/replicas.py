"""What ranks with the same samples disagree in: tensor parallelism, by torch or by hand.

Statistics that are equal to the last bit are taken for those of equal tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pytest_modelhealth.ranks.evidence import Seen, combined, of_statistics
from pytest_modelhealth.ranks.layout import NO_ENGINE, Place
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.report.flow.inferred import with_flow
from pytest_modelhealth.report.ranks import Disagreement, named_ranks
from pytest_modelhealth.settings.setting import is_inside


class _Same(NamedTuple):
    """Whether all ranks give a layer, hold in it and get from it the same."""

    inputs: bool
    weights: bool
    outputs: bool


def _equal(group: Iterable[Seen]) -> dict[str, _Same]:
    """Compare what ranks saw of the layers that all of them called."""
    each = [
        {
            r.name: (
                of_statistics(r.inputs),
                combined(of_statistics(held) for held in r.parameters.values()),
                of_statistics(r.activations),
            )
            for r in one.observation.layers.values()
            if r.inputs and r.activations
        }
        for one in group
    ]
    return {
        name: _Same(*(len({*role}) == 1 for role in zip(*(one[name] for one in each), strict=True)))
        for name in each[0]
        if all(name in one for one in each)
    }


def _whole(equal: Mapping[str, _Same]) -> list[str]:
    """Return the layers that hold the same on all ranks, with all inside them."""
    cut = [name for name, same in equal.items() if not same.weights]
    return [name for name in equal if not any(c == name or is_inside(c, name) for c in cut)]


def unequal(group: Sequence[Seen]) -> str | None:
    """Return the first layer without shards that gets the same on all ranks and returns other."""
    one, equal = group[0], _equal(group)
    wrong = []
    for name in _whole(equal):
        record = one.observation.layers[name]
        assert record.inputs is not None
        assert record.activations is not None
        is_piece = record.activations.count * len(group) == record.inputs.count
        if equal[name].inputs and not equal[name].outputs and not is_piece:
            wrong.append(name)
    innermost = (n for n in wrong if not any(is_inside(other, n) for other in wrong))
    found = next(innermost, None)
    return found if found is not None else _forward_that_drops(one.observation, equal)


def _forward_that_drops(own: Observation, equal: Mapping[str, _Same]) -> str | None:
    """Return the layer whose own forward drops, where that parts what another is given."""
    dropping = [r.name for r in own.layers.values() if drops(r, "dropout_")]
    flow = with_flow(own).flow if dropping else None
    for name, same in equal.items():
        if flow is None or same.inputs or name not in flow:
            continue
        sources = [source for source in flow.producers(name) if source in own.layers]
        around = [layer for layer in dropping if is_inside(name, layer)]
        if sources and around and all(s in equal and equal[s].outputs for s in sources):
            return max(around, key=len)
    return None


def drops(record: LayerRecord, prefix: str = "") -> bool:
    """Whether a dropout is at work, and drops some units and keeps others.

    Its options begin with `prefix`: ``"dropout_"`` where the own forward of a layer calls it, or
    attention with one.
    """
    is_at_work = record.options.get(f"{prefix}training", True) is True
    rate = record.options.get(f"{prefix}p")
    is_rate = isinstance(rate, float | int) and 0.0 < rate < 1.0
    return record.entered is not None and is_at_work and is_rate


def told_as_parts(
    place: Place, seen: Mapping[int, Seen], joint: Observation, found: Sequence[Disagreement]
) -> tuple[Disagreement, ...]:
    """Return disagreements, told anew where ranks with one batch hold other weights in some layers.

    That is tensor parallelism by hand. Equal outputs, bit for bit, are computed together: each rank
    has a part, and nothing is wrong. Else what should have made them equal is missing, or weights
    differ that should not. Where all layers differ nothing speaks for parts.
    """
    kinds = {one.kind: one for one in found}
    weights, batch = kinds.get("same_weights"), kinds.get("distinct_data")
    if place.engine != NO_ENGINE or weights is None or batch is None or batch.others:
        return tuple(found)
    equal = _equal(seen.values())
    layers, whole = [name for name in joint.layers if name in equal], {*_whole(equal)}
    replicas = [name for name in layers if joint.layers[name].parameters and name in whole]
    if not any(_is_drawn(joint.layers[name]) for name in replicas):
        return tuple(found)
    others = tuple(one for one in found if one not in (weights, batch))
    if all(equal[name].outputs for name in ("", layers[-1]) if name in equal):
        return others
    first = next((name for name in replicas if not equal[name].inputs), "")
    what = f"{first!r}, with the same weights on each, is given" if first else "they return"
    text = f"{named_ranks(seen)} got the same batch, and {what} other values: {weights.message}"
    return (replace(weights, message=text, layer=first or weights.layer), *others)


def _is_drawn(record: LayerRecord) -> bool:
    """Whether a layer has a matrix that was not filled with one number."""
    return any(len(one.shape or ()) > 1 and bool(one.std) for one in record.parameters.values())
