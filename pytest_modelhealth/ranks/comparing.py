"""In what ranks differ, or do not although they should: a table of what is compared.

Every rank runs it on the same gathered records, so all come to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from torch import nn

from pytest_modelhealth.ranks.evidence import (
    BY_HAND,
    BYPASSED,
    LEFT_OUT,
    Evidence,
    Key,
    Name,
    Seen,
    combined,
    of_statistics,
)
from pytest_modelhealth.ranks.layout import NO_ENGINE
from pytest_modelhealth.report import LayerRecord, LossCall, Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks
from pytest_modelhealth.settings.setting import is_inside

_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Gathered:
    """All records, and what this rank has of its own.

    Args:
        seen: what each rank saw and noted, in order of ranks.
        own: what this rank noted, by which layers and tensors have their names.
        joint: what all saw, put together.
    """

    seen: Mapping[int, Seen]
    own: Evidence
    joint: Observation

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return layers once each, in execution order."""
        places = {name: place for place, name in enumerate(self.joint.layers)}
        return tuple(sorted(dict.fromkeys(names), key=lambda name: places.get(name, len(places))))

    def same(
        self, numbers: Mapping[int, int], say: Callable[[list[str]], str]
    ) -> Iterator[Disagreement]:
        """Yield that ranks which see other samples have the same number, 0 for none.

        Args:
            numbers: by rank.
            say: returns what is wrong, of the ranks with one number and those with another.
        """
        same = sorted(
            ranks
            for ranks in _alike({rank: number for rank, number in numbers.items() if number})
            if len({self.seen[rank].place.tensor for rank in ranks}) > 1
        )
        ranks = tuple(sorted(chain(*same)))
        if ranks:
            text = say([named_ranks(some) for some in same])
            yield Disagreement(ranks=ranks, message=text, value=float(len(ranks)))


def disagreements(
    evidence: Evidence, seen: Iterable[Seen], joint: Observation
) -> tuple[Disagreement, ...]:
    """Return where ranks disagree, the same on every rank.

    Args:
        evidence: what this rank noted.
        seen: what each rank saw and noted.
        joint: what all saw, put together.
    """
    of = Gathered({one.rank: one for one in seen}, evidence, joint)
    found = []
    for check, usual, compare in COMPARED:
        for one in compare(of):
            ranks = one.ranks or tuple(of.seen)
            others = one.others or tuple(rank for rank in of.seen if rank not in ranks)
            layer, role = one.layer or next(iter(one.layers), ""), one.role or usual
            found.append(
                replace(one, kind=check, layer=layer, role=role, ranks=ranks, others=others)
            )
    kinds = {one.kind for one in found}
    same_batch = [one for one in found if one.kind == "distinct_data" and not one.others]
    if evidence.group.place.engine == NO_ENGINE and "same_weights" in kinds and same_batch:
        # all got one batch and hold other weights: tensor parallelism by hand, as far as is seen
        found = [one for one in found if one.kind not in ("same_weights", "distinct_data")]
    return tuple(found)


def _nonfinite(of: Gathered) -> Iterator[Disagreement]:
    """Losses that are not finite, and weights that are not where the joint report hides it.

    Of replicas the report has one.
    """
    ill: dict[Key, dict[int, tuple[str, int]]] = {}
    for rank, one in of.seen.items():
        loss = one.observation.loss
        if loss is not None and not math.isfinite(loss):
            ill.setdefault(("", "loss", ""), {})[rank] = (f"the loss is {loss}", 1)
        for record in one.observation.layers.values():
            joint = of.joint.layers[record.name].parameters
            for name, held in record.parameters.items():
                count = held.nonfinite_count
                if count and not (name in joint and joint[name].nonfinite_count):
                    kind = "NaN" if held.nan_count else "inf"
                    text = f"{count} {kind} of {held.count} values in its parameter {name!r}"
                    ill.setdefault((record.name, "parameters", name), {})[rank] = (text, count)
    for (layer, role, name), having in ill.items():
        text, count = next(iter(having.values()))
        yield Disagreement(
            layer=layer,
            role=role,
            tensor=name,
            ranks=tuple(having),
            message=f"{text} on {named_ranks(having)}",
            value=float(count),
        )


def _weights(of: Gathered) -> Iterator[Disagreement]:
    """Tensors that differ where ranks hold the same part of them, as one."""
    held: dict[tuple[Key, str], dict[int, int]] = {}
    sure = set()
    for rank, one in of.seen.items():
        for key, tensor in one.tensors.items():
            held.setdefault((key, tensor.part), {})[rank] = tensor.bits
            if tensor.is_sure:
                sure.add(key)
    odd, most = set[int](), set[int]()
    differing: dict[Key, None] = {}
    for (key, _), bits in held.items():
        first, *others = _alike(bits)
        if others:
            differing[key] = None
            most.update(first)
            odd.update(*others)
    if not differing:
        return
    most -= odd
    layers = of.in_order(layer for layer, _, _ in differing)
    certain = [key for key in differing if key in sure] or list(differing)
    layer, role, name = min(certain, key=lambda key: layers.index(key[0]))
    yield Disagreement(
        layer=layer,
        role=role,
        tensor=name,
        ranks=tuple(sorted(odd)),
        others=tuple(sorted(most)),
        message=f"{named_ranks(sorted(odd))} {'has' if len(odd) == 1 else 'have'} "
        f"{'other' if most else 'different'} values of "
        + _listed((layer, name), len(differing), "tensor")
        + (f" than {named_ranks(sorted(most))}" if most else ""),
        value=float(len(differing)),
        layers=layers,
        is_sure=not sure.isdisjoint(differing),
    )


def _batches(of: Gathered) -> Iterator[Disagreement]:
    """The same batch on ranks that share the batch out."""
    return of.same(
        {rank: one.batch for rank, one in of.seen.items()},
        lambda each: "; ".join(f"{ranks} got the same batch" for ranks in each),
    )


def _averaging(of: Gathered) -> Iterator[Disagreement]:
    """Parameters that get gradients on ranks with other samples, and that no wrapper averages.

    What `fully_shard` leaves out may be meant so, and a loop may average by hand where the wrappers
    that there are get no gradient: that only warns.
    """
    by_reason: dict[str, list[Name]] = {}
    for name, why in {k: v for s in of.seen.values() for k, v in s.unaveraged.items()}.items():
        by_reason.setdefault(why, []).append(name)
    for why, parameters in by_reason.items():
        layers = of.in_order(layer for layer, _ in parameters)
        first = next(name for name in parameters if name[0] == layers[0])
        is_one = len(parameters) == 1
        reason = why.format(
            they="it" if is_one else "they",
            them="it" if is_one else "them",
            were="was" if is_one else "were",
        )
        text = (
            f"the gradients of {_listed(first, len(parameters))} are not averaged over "
            f"{named_ranks(of.seen)}: {reason}"
        )
        if why == BYPASSED:
            text = (
                f"{first[0]!r} is wrapped in DDP and called past its wrapper: "
                f"{named_ranks(of.seen)} train it each on gradients of its own batch"
            )
        yield Disagreement(
            layer=first[0],
            tensor=first[1],
            message=text,
            value=float(len(parameters)),
            layers=layers,
            is_sure=why not in (LEFT_OUT, BY_HAND),
        )


def _paths(of: Gathered) -> Iterator[Disagreement]:
    """Parameters that some ranks use and others do not: these never finish the reduction."""
    lacking: dict[Name, list[int]] = {}
    for rank, one in of.seen.items():
        for name in sorted(one.unused):
            lacking.setdefault(name, []).append(rank)
    differing = {name: ranks for name, ranks in lacking.items() if len(ranks) < len(of.seen)}
    if not differing:
        return
    layers = of.in_order(layer for layer, _ in differing)
    without = next(ranks for (name, _), ranks in differing.items() if name == layers[0])
    having = [rank for rank in of.seen if rank not in without]
    more = len(layers) - 1
    also = f"; {more} more layer{' differs' if more == 1 else 's differ'}, too" if more else ""
    yield Disagreement(
        ranks=tuple(sorted({rank for ranks in differing.values() for rank in ranks})),
        message=f"its parameters get a gradient on {named_ranks(having)}, and none on "
        f"{named_ranks(without)}, where DDP waits for one{also}",
        value=float(len(layers)),
        layers=layers,
    )


def _unused(of: Gathered) -> Iterator[Disagreement]:
    """Parameters that no rank uses: the next step of DDP raises, if it gets other gradients."""
    unused = frozenset.intersection(*(one.unused for one in of.seen.values()))
    for held, waited_for in of.own.waiting:
        if waited_for <= unused:
            unused -= held  # as of a teacher: a DDP without any gradient waits for none
    if not unused:
        return
    layers = of.in_order(layer for layer, _ in unused)
    names = (leaf.key for leaf in of.own.wrapped.parameters)
    first = next(name for name in names if name in unused and name[0] == layers[0])
    yield Disagreement(
        layer=first[0],
        tensor=first[1],
        message=f"{_listed(first, len(unused))} {'get' if len(unused) > 1 else 'gets'} no gradient "
        f"on {named_ranks(of.seen)}, and DDP waits for one: its next forward raises",
        value=float(len(unused)),
        layers=layers,
    )


def _loss_weights(of: Gathered) -> Iterator[Disagreement]:
    """Samples or tokens that weigh more on one rank than on another.

    The mean over ranks gives each rank the same weight. A loss that is a mean over the rank's own
    targets, or their sum over their own number, thus weighs a target by one over that number. A sum
    over the number of all ranks does not. It is judged where the whole loss is one call of a loss
    function times a number, or the sum of means over the same number.
    """
    known = {r: _weighed(one.observation) for r, one in of.seen.items() if len(one.place.data) > 1}
    counts = {rank: count for rank, (count, _) in known.items()}
    weights = [weight for _, weight in known.values()]
    if len(known) < max(2, len(of.seen)) or not all(counts.values()):
        return
    fewest, most = min(counts.values()), max(counts.values())
    if fewest == most or max(weights) - min(weights) > _TOLERANCE * max(weights):
        return
    odd = tuple(rank for rank, count in counts.items() if count < math.sqrt(fewest * most))
    own = max(counts[rank] for rank in odd)
    is_range = fewest < own
    times = f"{most / own:.3g}" + (f" to {most / fewest:.3g}" if is_range else "")
    between = f"{fewest:,}" + (f" to {own:,}" if is_range else "")
    light = next(rank for rank, count in counts.items() if count == most)
    yield Disagreement(
        ranks=odd,
        message=f"a target of {named_ranks(odd)} weighs {times} times as much as one of rank "
        f"{light}: the loss is a mean over {between} targets on the one, over {most:,} on the "
        "other",
        value=most / fewest,
    )


def _weighed(own: Observation) -> tuple[int, float]:
    """Return how many targets a rank learns from, 0 if unknown, and what they weigh together."""
    calls = [call for call in own.loss_calls if call.value is not None]
    if not calls or own.loss is None or not math.isfinite(own.loss):
        return 0, 0.0
    counts = {_count(call) for call in calls}
    if len(counts) > 1:
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


def _norms(of: Gathered) -> Iterator[Disagreement]:
    """Batch norms of torch's in training that see few samples each: nothing synchronises them."""
    norms, synced = nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm
    named = ((each.name, each.module) for each in of.own.wrapped.modules)
    alone = [
        name
        for name, module in named
        if isinstance(module, norms) and not isinstance(module, synced) and module.training
    ]
    samples = {}
    layers: list[str] = []
    for rank, one in of.seen.items():
        own = one.observation
        called = [name for name in alone if name in own.layers and own.layers[name].calls]
        if called and len(one.place.data) > 1:
            samples[rank] = own.samples // max(1, own.batches)
            layers += called
    if samples:
        fewest = min(samples.values())
        yield Disagreement(
            layer=of.in_order(layers)[0],
            ranks=tuple(samples),
            message=f"{named_ranks(samples)} normalise each by their own {fewest:,} "
            f"sample{'' if fewest == 1 else 's'} alone",
            value=float(fewest),
            layers=of.in_order(alone),
        )


def _randomness(of: Gathered) -> Iterator[Disagreement]:
    """Dropouts that drop the same units on ranks with other samples."""
    dropping = {
        rank: [
            layer.name
            for layer in one.observation.layers.values()
            if drops(layer, "dropout_") or ("dropout" in layer.type_name.lower() and drops(layer))
        ]
        for rank, one in of.seen.items()
    }
    for one in of.same(
        {rank: one.random for rank, one in of.seen.items() if dropping[rank]},
        lambda each: (
            f"{' and so do '.join(each)} start from the same random numbers: the same "
            "units are dropped on each"
        ),
    ):
        layers = of.in_order(name for rank in one.ranks for name in dropping[rank])
        yield replace(one, layers=layers)


def _replicas(of: Gathered) -> Iterator[Disagreement]:
    """Layers that get the same on all ranks of a tensor-parallel group, and return other values.

    Statistics that are equal to the last bit are taken for those of equal tensors. A layer that has
    parts of a weight may return parts, unless its own forward drops units.
    """
    groups = sorted({one.place.tensor for one in of.seen.values() if one.place.tensor[1:]})
    first = {ranks: _parting([of.seen[rank].observation for rank in ranks]) for ranks in groups}
    layers = of.in_order(layer for layer in first.values() if layer is not None)
    if layers:
        some = (ranks for ranks, layer in first.items() if layer == layers[0])
        yield Disagreement(
            layer=layers[0],
            ranks=tuple(
                sorted(r for ranks, layer in first.items() if layer is not None for r in ranks)
            ),
            message=f"{' and '.join(map(named_ranks, some))}, of one tensor-parallel group, get "
            "other values from it for the same inputs",
        )


def _parting(group: list[Observation]) -> str | None:
    """Return the first layer that gets the same on all ranks and returns other values."""

    def is_equal(name: str, read: Callable[[LayerRecord], int]) -> bool:
        return len({read(one.layers[name]) for one in group}) == 1

    called = [
        record
        for name, record in group[0].layers.items()
        if all(name in one.layers for one in group) and record.inputs and record.activations
    ]
    weights = lambda r: combined(of_statistics(held) for held in r.parameters.values())  # noqa: E731
    cut = [r.name for r in called if not is_equal(r.name, weights)]
    wrong = []
    for record in called:
        assert record.inputs is not None
        assert record.activations is not None
        name, placement = record.name, record.placements.get("activations")
        has_parts = any(c == name or is_inside(c, name) for c in cut)
        is_piece = record.activations.count * len(group) == record.inputs.count or (
            placement is not None and placement.is_cut
        )
        if (
            not is_piece
            and (not has_parts or drops(record, "dropout_"))
            and is_equal(name, lambda r: of_statistics(r.inputs))
            and not is_equal(name, lambda r: of_statistics(r.activations))
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


COMPARED: tuple[tuple[str, str, Callable[[Gathered], Iterable[Disagreement]]], ...] = (
    ("finite", "", _nonfinite),
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
