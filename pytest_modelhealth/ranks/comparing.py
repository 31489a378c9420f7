"""In what ranks differ, or do not although they should: a table of what is compared.

Every rank runs it on the same gathered records, so all come to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from pytest_modelhealth.ranks.evidence import Evidence, Key, Name, Seen, combined, of_statistics
from pytest_modelhealth.ranks.layout import NO_ENGINE
from pytest_modelhealth.report import Finding, LayerRecord, LossCall, Observation
from pytest_modelhealth.report.parts import named_ranks
from pytest_modelhealth.settings.setting import is_inside

_TOLERANCE = 1e-3
"""Relative difference of two losses that are the same number, computed in another order."""


@dataclass(frozen=True)
class Gathered:
    """All records, and what this rank has of its own."""

    seen: Mapping[int, Seen]  # what each rank saw and noted, in order of ranks
    own: Evidence  # what this rank noted, by which layers and tensors have their names
    joint: Observation  # what all saw, put together

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return layers once each, in execution order."""
        places = {name: place for place, name in enumerate(self.joint.layers)}
        return tuple(sorted(dict.fromkeys(names), key=lambda name: places.get(name, len(places))))

    def alike(self, numbers: Mapping[int, int]) -> list[str]:
        """Return the names of ranks that see other samples and have the same number, but for 0."""
        each = sorted(_alike({rank: number for rank, number in numbers.items() if number}))
        tensor = {rank: one.place.tensor for rank, one in self.seen.items()}
        return [named_ranks(ranks) for ranks in each if len({tensor[rank] for rank in ranks}) > 1]

    def finding(self, message: str, layers: Iterable[str] = (), **more: Any) -> Finding:
        """Return what ranks disagree in, at a layer: the first of those that show it, if unsaid."""
        first, *others = self.in_order(layers) or ("",)
        layer = more.pop("layer", first)
        shown = tuple(name for name in (first, *others) if name != layer) if layers else ()
        more = {"value": 1.0, **more}
        return Finding("", layer, message=message, affected=shown, between_ranks=True, **more)

    def parameters(self, names: Collection[Name], message: str, **more: Any) -> Finding:
        """Return what is wrong with some parameters, of which the message names the first."""
        layers = self.in_order(layer for layer, _ in names)
        known = [leaf.key for leaf in self.own.wrapped.parameters]
        first = min((name for name in names if name[0] == layers[0]), key=known.index)
        text = message.format(_listed(first, len(names)))
        return self.finding(text, layers, tensor=first[1], value=float(len(names)), **more)


def disagreements(evidence: Evidence, seen: Iterable[Seen], joint: Observation) -> Observation:
    """Return the joint observation with where ranks disagree, the same on every rank."""
    of = Gathered({one.rank: one for one in seen}, evidence, joint)
    found = {
        check: [replace(one, check=check, role=one.role or role) for one in compare(of)]
        for check, role, compare in COMPARED
    }
    is_one_batch = bool(found["distinct_data"]) and len({s.batch for s in of.seen.values()}) == 1
    if evidence.place.engine == NO_ENGINE and found["same_weights"] and is_one_batch:
        # as far as is seen, tensor parallelism by hand
        del found["same_weights"], found["distinct_data"]
    assert joint.ranks is not None
    told = tuple(one for each in found.values() for one in each)
    return replace(joint, ranks=replace(joint.ranks, disagreements=told))


def _weights(of: Gathered) -> Iterator[Finding]:
    """Tensors that differ where ranks hold the same part of them, as one."""
    held: dict[tuple[Key, str], dict[int, int]] = {}
    sure = set()
    for rank, one in of.seen.items():
        for key, (part, bits, is_sure) in one.tensors.items():
            held.setdefault((key, part), {})[rank] = bits
            if is_sure:
                sure.add(key)
    parted = {key: _alike(each) for key, each in held.items() if len({*each.values()}) > 1}
    if not parted:
        return
    differing = list(dict.fromkeys(key for key, _ in parted))
    odd = sorted({rank for _, *others in parted.values() for ranks in others for rank in ranks})
    most = sorted({rank for first, *_ in parted.values() for rank in first} - {*odd})
    layers = of.in_order(layer for layer, _, _ in differing)
    certain = [key for key in differing if key in sure] or differing
    layer, role, name = min(certain, key=lambda key: layers.index(key[0]))
    yield of.finding(
        f"{named_ranks(odd)} {'has' if len(odd) == 1 else 'have'} "
        f"{'other' if most else 'different'} values of "
        + _listed((layer, name), len(differing), "tensor")
        + (f" than {named_ranks(most)}" if most else ""),
        layers,
        layer=layer,
        role=role,
        tensor=name,
        value=float(len(differing)),
        grade="warn" if sure.isdisjoint(differing) else "fail",
    )


def _batches(of: Gathered) -> Iterator[Finding]:
    """The same batch on ranks that share the batch out."""
    same = of.alike({rank: one.batch for rank, one in of.seen.items()})
    if same:
        yield of.finding("; ".join(f"{ranks} got the same batch" for ranks in same))


def _averaging(of: Gathered) -> Iterator[Finding]:
    """Parameters that get gradients on ranks with other samples, and that no wrapper averages."""
    names = {name: sure for one in of.seen.values() for name, sure in one.unaveraged.items()}
    for is_sure in (True, False):
        some = [name for name, sure in names.items() if sure is is_sure]
        if some:
            yield of.parameters(
                some,
                f"the gradients of {{}} are not averaged over {named_ranks(of.seen)}: no wrapper "
                f"that is called holds {'them' if some[1:] else 'it'} as trainable",
                grade="fail" if is_sure else "warn",
            )


def _unused_by_all(of: Gathered) -> frozenset[Name]:
    return frozenset.intersection(*(one.unused for one in of.seen.values()))


def _paths(of: Gathered) -> Iterator[Finding]:
    """Parameters that some ranks use and others do not: these never finish the reduction."""
    differing = {name for one in of.seen.values() for name in one.unused} - _unused_by_all(of)
    if differing:
        gets = "get" if len(differing) > 1 else "gets"
        told = of.parameters(differing, f"{{}} {gets} a gradient on")
        without = [r for r, one in of.seen.items() if (told.layer, told.tensor) in one.unused]
        having = [rank for rank in of.seen if rank not in without]
        yield replace(
            told,
            message=f"{told.message} {named_ranks(having)}, and none on {named_ranks(without)}, "
            "where DDP waits for one",
        )


def _unused(of: Gathered) -> Iterator[Finding]:
    """Parameters that no rank uses: the next step of DDP raises, if it gets other gradients."""
    unused = _unused_by_all(of)
    for held, waited_for in of.own.waiting:
        if waited_for <= unused:
            unused -= held  # as of a teacher: a DDP without any gradient waits for none
    if unused:
        yield of.parameters(
            unused,
            f"{{}} {'get' if len(unused) > 1 else 'gets'} no gradient on {named_ranks(of.seen)}, "
            "and DDP waits for one: its next forward raises",
        )


def _loss_weights(of: Gathered) -> Iterator[Finding]:
    """Samples or tokens that weigh more on one rank than on another.

    The mean over ranks gives each rank the same weight. A loss that is a mean over the rank's own
    targets, or their sum over their own number, thus weighs a target by one over that number. A sum
    over the number of all ranks does not. It is judged where the whole loss is one call of a loss
    function times a number, or the sum of means over the same number.
    """
    known = {rank: _weighed(one.observation) for rank, one in of.seen.items()}
    counts = {rank: count for rank, (count, _) in known.items()}
    weights = [weight for _, weight in known.values()]
    shared = all(len(one.place.data) > 1 for one in of.seen.values())
    fewest, most = min(counts.values()), max(counts.values())
    is_uneven = 0 < fewest < most
    if shared and is_uneven and max(weights) - min(weights) <= _TOLERANCE * max(weights):
        odd = tuple(rank for rank, count in counts.items() if count == fewest)
        light = next(rank for rank, count in counts.items() if count == most)
        yield of.finding(
            f"a target of {named_ranks(odd)} weighs {most / fewest:.3g} times as much as "
            f"one of rank {light}: the loss is a mean over {fewest:,} targets on the one, over "
            f"{most:,} on the other",
            value=most / fewest,
        )


def _weighed(own: Observation) -> tuple[int, float]:
    """Return how many targets a rank learns from, 0 if unknown, and what they weigh together."""
    calls = [call for call in own.loss_calls if call.value is not None]
    counts = {_count(call) for call in calls}
    if len(counts) != 1 or own.loss is None or not math.isfinite(own.loss):
        return 0, 0.0
    (count,) = counts
    means = [call.options.get("reduction", "mean") == "mean" for call in calls]
    values = sum(call.value or 0.0 for call in calls)
    if all(means) and math.isclose(own.loss, values, rel_tol=_TOLERANCE):
        return count, 1.0
    if len(calls) > 1 or not values:
        return 0, 0.0
    return count, own.loss / values * (1 if means[0] else count)


def _count(call: LossCall) -> int:
    """Return of how many targets a call is the mean; 0 where they weigh by themselves."""
    if call.options.get("weight") or call.options.get("reduction") == "none":
        return 0
    if call.targets is not None:
        return call.targets.count - call.targets.ignored
    return 0 if call.target is None else call.target.count


def _norms(of: Gathered) -> Iterator[Finding]:
    """Batch norms of torch's in training that see few samples each: nothing synchronises them."""
    norms, synced = nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm
    alone = [
        named.name
        for named in of.own.wrapped.modules
        if isinstance(named.module, norms) and not isinstance(named.module, synced)
        if named.module.training and named.name in of.joint.layers
        if of.joint.layers[named.name].calls
    ]
    samples = {
        rank: one.observation.samples // max(1, one.observation.batches)
        for rank, one in of.seen.items()
        if len(one.place.data) > 1
    }
    if samples and alone:
        fewest = min(samples.values())
        yield of.finding(
            f"{named_ranks(samples)} normalise each by their own {fewest:,} "
            f"sample{'' if fewest == 1 else 's'} alone",
            alone,
            value=float(fewest),
        )


def _randomness(of: Gathered) -> Iterator[Finding]:
    """Dropouts that drop the same units on ranks with other samples."""
    layers = [
        layer.name
        for layer in of.joint.layers.values()
        if drops(layer, "dropout_") or ("dropout" in layer.type_name.lower() and drops(layer))
    ]
    same = of.alike({rank: one.random for rank, one in of.seen.items()}) if layers else []
    if same:
        yield of.finding(
            f"{' and so do '.join(same)} start from the same random "
            "numbers: the same units are dropped on each",
            layers,
        )


def _replicas(of: Gathered) -> Iterator[Finding]:
    """Layers that get the same on all ranks of a tensor-parallel group, and return other values."""
    groups = sorted({one.place.tensor for one in of.seen.values() if one.place.tensor[1:]})
    parting = {ranks: _parting([of.seen[rank].observation for rank in ranks]) for ranks in groups}
    layers = of.in_order(layer for layer in parting.values() if layer is not None)
    if layers:
        some = [ranks for ranks, layer in parting.items() if layer == layers[0]]
        yield of.finding(
            f"{' and '.join(map(named_ranks, some))}, of one tensor-parallel group, get other "
            "values from it for the same inputs",
            layers[:1],
        )


def _parting(group: Sequence[Observation]) -> str | None:
    """Return the first layer that gets the same on all ranks and returns other values.

    Statistics that are equal to the last bit are taken for those of equal tensors. A layer that has
    parts of a weight may return parts, unless its own forward drops units.
    """

    def is_equal(name: str, read: Callable[[LayerRecord], object]) -> bool:
        return len({read(one.layers[name]) for one in group}) == 1

    called = [
        record
        for name, record in group[0].layers.items()
        if all(name in one.layers for one in group) and record.inputs and record.activations
    ]

    def weights_of(record: LayerRecord) -> int:
        return combined(of_statistics(held) for held in record.parameters.values())

    cut = [r.name for r in called if not is_equal(r.name, weights_of)]
    wrong = []
    for record in called:
        assert record.inputs is not None
        assert record.activations is not None
        placement, name = record.placements.get("activations"), record.name
        has_parts = any(c == name or is_inside(c, name) for c in cut)
        if (
            (placement is None or not placement.is_cut)
            and (not has_parts or drops(record, "dropout_"))
            and is_equal(name, lambda r: of_statistics(r.inputs))
            and not is_equal(name, lambda r: of_statistics(r.activations))
            and record.activations.count * len(group) != record.inputs.count  # it deals them out
        ):
            wrong.append(name)
    return next((n for n in wrong if not any(is_inside(other, n) for other in wrong)), None)


def drops(record: LayerRecord, prefix: str = "") -> bool:
    """Whether a dropout is at work, and drops some units and keeps others.

    Its options begin with `prefix`: ``"dropout_"`` where the own forward of a layer calls it, or
    attention with one.
    """
    is_at_work = record.options.get(f"{prefix}training", True) is True
    rate = record.options.get(f"{prefix}p")
    is_rate = isinstance(rate, float | int) and 0.0 < rate < 1.0
    return record.entered is not None and is_at_work and is_rate


COMPARED: tuple[tuple[str, str, Callable[[Gathered], Iterable[Finding]]], ...] = (
    ("same_weights", "parameters", _weights),
    ("distinct_data", "inputs", _batches),
    ("averaged_gradients", "parameter_gradients", _averaging),
    ("same_path", "parameter_gradients", _paths),
    ("unused_parameters", "parameter_gradients", _unused),
    ("even_weights", "loss", _loss_weights),
    ("replicas_agree", "activations", _replicas),
    ("synced_norm", "activations", _norms),
    ("distinct_dropout", "activations", _randomness),
)
"""The check that judges it, the role where it is no other, and what compares the records for it."""


def _alike(numbers: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Return the ranks with equal numbers together; the most first, of as many the lowest ranks."""
    groups: dict[int, tuple[int, ...]] = {}
    for rank, number in numbers.items():
        groups[number] = (*groups.get(number, ()), rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))


def _listed(name: Name, count: int, what: str = "parameter") -> str:
    """Return ``"'a.weight' and 2 more parameters"``: the first by name, the others by number."""
    first, more = repr(".".join(name).lstrip(".")), count - 1
    return f"{first} and {more:,} more {what}{'' if more == 1 else 's'}" if more else first
