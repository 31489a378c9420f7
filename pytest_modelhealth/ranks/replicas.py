"""What ranks with the same samples disagree in: tensor parallelism, by torch or by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from pytest_modelhealth.ranks.evidence import combined, of_statistics
from pytest_modelhealth.ranks.layout import NO_ENGINE
from pytest_modelhealth.ranks.placing import Gathered, Seen
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.report.flow.inferred import with_flow
from pytest_modelhealth.report.ranks import Disagreement, named_ranks
from pytest_modelhealth.settings.setting import is_inside


def replicas(of: Gathered) -> Iterator[Disagreement]:
    """Layers that hold no shards, and return other values for the same inputs within a group.

    Statistics that are equal to the last bit are taken for those of equal tensors.
    """
    first: dict[tuple[int, ...], str] = {}
    for among in sorted({one.place.tensor for one in of.seen.values() if one.place.tensor[1:]}):
        each = [_numbers_of(of.seen[rank].observation) for rank in among]
        for layer in (_disagreeing(of.seen[rank], each) for rank in among):
            if layer is not None:
                first.setdefault(among, layer)
    if not first:
        return
    layer = of.in_order(first.values())[0]
    groups = " and ".join(named_ranks(among) for among in [*first][:3] if first[among] == layer)
    yield Disagreement(
        layer=layer,
        role="activations",
        ranks=tuple(sorted({rank for among in first for rank in among})),
        message=f"{groups}, of one tensor-parallel group, get other values from it for the same "
        "inputs",
    )


def _disagreeing(one: Seen, each: list[dict[str, tuple[int, int, int]]]) -> str | None:
    """Return the first layer in which a rank's group disagrees, as that rank sees it."""
    own = one.observation
    records = [own.layers[name] for name in each[0] if all(name in other for other in each)]
    equal = {
        r.name: [len({numbers[r.name][which] for numbers in each}) == 1 for which in range(3)]
        for r in records
    }
    cut = one.record.cut | {name for name, (_, held, _) in equal.items() if not held}
    wrong = [
        record.name
        for record in records
        if equal[record.name][0]
        and not equal[record.name][2]
        and _may_be_judged(record, cut, len(each))
    ]
    innermost = (n for n in wrong if not any(is_inside(other, n) for other in wrong))
    found = next(innermost, None)
    return found if found is not None else _forward_that_drops(own, records, equal)


def _forward_that_drops(
    own: Observation, records: list[LayerRecord], equal: Mapping[str, list[bool]]
) -> str | None:
    """Return the layer whose own forward drops, where that parts what another is given."""
    dropping = [r.name for r in own.layers.values() if drops_in_forward(r)]
    flow = with_flow(own).flow if dropping else None
    for record in records if flow is not None else ():
        if flow is None or equal[record.name][0] or record.name not in flow:
            continue
        sources = [name for name in flow.producers(record.name) if name in own.layers]
        around = [name for name in dropping if is_inside(record.name, name)]
        if sources and around and all(name in equal and equal[name][2] for name in sources):
            return max(around, key=len)
    return None


def _numbers_of(own: Observation) -> dict[str, tuple[int, int, int]]:
    """Return numbers of what each layer is given, holds and returns."""
    return {
        r.name: (
            of_statistics(r.inputs),
            combined(of_statistics(held) for held in r.parameters.values()),
            of_statistics(r.activations),
        )
        for r in own.layers.values()
        if r.inputs and r.activations
    }


def _may_be_judged(record: LayerRecord, cut: Iterable[str], size: int) -> bool:
    """Whether a layer holds no shards, and returns no piece of what it is given."""
    assert record.inputs is not None
    assert record.activations is not None
    is_piece = record.activations.count * size == record.inputs.count
    return not is_piece and not any(
        layer == record.name or is_inside(layer, record.name) for layer in cut
    )


def drops_in_forward(record: LayerRecord) -> bool:
    """Whether the own forward of a layer calls a dropout, or attention with one, at work."""
    options = record.options
    is_at_work = record.entered is not None and options.get("dropout_training", True) is True
    return is_at_work and is_rate(options.get("dropout_p"))


def is_rate(value: object) -> bool:
    """Whether a dropout of this rate drops some units and keeps others."""
    return isinstance(value, float | int) and 0.0 < value < 1.0


def with_parts(of: Gathered, found: tuple[Disagreement, ...]) -> tuple[Disagreement, ...]:
    """Return disagreements, told anew where ranks with one batch hold other weights in some layers.

    That is tensor parallelism by hand. Equal outputs, bit for bit, are computed together: each rank
    has a part, and nothing is wrong. Else what should have made them equal is missing, or weights
    differ that should not. Where all layers differ nothing speaks for parts.
    """
    kinds = {one.kind: one for one in found}
    weights, batch = kinds.get("same_weights"), kinds.get("distinct_data")
    if of.own.company.place.engine != NO_ENGINE or weights is None or batch is None:
        return found
    if batch.ranks != tuple(of.seen):
        return found
    each = [_numbers_of(one.observation) for one in of.seen.values()]
    layers = [name for name in of.joint.layers if all(name in one for one in each)]
    given, held, returned = (
        {name for name in layers if len({one[name][which] for one in each}) > 1}
        for which in range(3)
    )
    replicas = [
        name
        for name in layers
        if of.joint.layers[name].parameters
        and not any(other == name or is_inside(other, name) for other in held)
    ]
    if not any(_is_drawn(of.joint.layers[name]) for name in replicas):
        return found
    others = tuple(one for one in found if one not in (weights, batch))
    if not any(name in returned for name in ("", layers[-1])):
        return others
    first = next((name for name in replicas if name in given), "")
    what = f"{first!r}, with the same weights on each, is given" if first else "they return"
    ranks = named_ranks(of.seen)
    text = f"{ranks} got the same batch, and {what} other values: {weights.message}"
    return (replace(weights, message=text, layer=first or weights.layer), *others)


def _is_drawn(record: LayerRecord) -> bool:
    """Whether a layer has a matrix that was not filled with one number."""
    return any(len(one.shape or ()) > 1 and bool(one.std) for one in record.parameters.values())
