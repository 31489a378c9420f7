"""In what ranks differ, or do not although they should: a table of what is compared.

Every rank runs it on the same gathered records, so all come to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from pytest_modelhealth.ranks.evidence import (
    BY_HAND,
    BYPASSED,
    LATER,
    LEFT_OUT,
    OUTSIDE,
    THAWED,
    Evidence,
    Key,
    Name,
)
from pytest_modelhealth.ranks.placing import Gathered, Seen
from pytest_modelhealth.ranks.replicas import drops_in_forward, is_rate, replicas, with_parts
from pytest_modelhealth.report import LayerRecord, LossCall, Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks

_TOLERANCE = 1e-3


def disagreements(
    evidence: Evidence, seen: Iterable[Seen], joint: Observation
) -> tuple[Disagreement, ...]:
    """Return where ranks disagree, the same on every rank.

    Args:
        evidence: what this rank noted.
        seen: what each rank saw and noted.
        joint: what all saw, put together.
    """
    gathered = Gathered({one.rank: one for one in seen}, evidence, joint)
    found = tuple(
        replace(one, kind=check) for check, compare in COMPARED for one in compare(gathered)
    )
    return with_parts(gathered, found)


def _nonfinite(of: Gathered) -> Iterator[Disagreement]:
    """Losses that are not finite, and weights that are not where the joint report hides it.

    Of replicas the report has one.
    """
    ill: dict[tuple[str, str, str], dict[int, tuple[str, int]]] = {}
    for rank, one in of.seen.items():
        loss = one.observation.loss
        if loss is not None and not math.isfinite(loss):
            ill.setdefault(("", "loss", ""), {})[rank] = (f"the loss is {loss}", 1)
        for record in one.observation.layers.values():
            for name, held in record.parameters.items():
                count = held.nonfinite_count
                if count and not _is_shown(record.name, name, of.joint):
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
            others=of.others(having),
            message=f"{text} on {named_ranks(having)}",
            value=float(count),
        )


def _is_shown(layer: str, tensor: str, joint: Observation) -> bool:
    record = joint.layers.get(layer)
    shown = None if record is None else record.parameters.get(tensor)
    return shown is not None and bool(shown.nonfinite_count)


def _weights(of: Gathered) -> Iterator[Disagreement]:
    """Tensors of equal keys that differ, as one."""
    odd: set[int] = set()
    most: set[int] = set()
    differing: dict[tuple[str, str, str], bool] = {}
    same = {key[0]: held for key, held in of.own.held.items()}  # other parts, as here
    by_key: dict[Key, dict[int, tuple[int, ...]]] = {}
    for rank, one in of.seen.items():
        for key, bits in one.record.tensors.items():
            by_key.setdefault(key, {})[rank] = bits
    for key, having in by_key.items():
        first, *others = _alike(having)
        most.update(first if others else ())
        for ranks in others:
            odd.update(ranks)
            pairs = zip(same[key[0]], having[first[0]], having[ranks[0]], strict=False)
            for held, mine, theirs in pairs:
                if mine != theirs:
                    tensor = (held.leaf.layer, held.role, held.leaf.name)
                    differing[tensor] = held.role == "parameters" or held.in_training
    if not differing:
        return
    layers = of.in_order(layer for layer, _, _ in differing)
    sure = [one for one, is_sure in differing.items() if is_sure] or list(differing)
    layer, role, name = min(sure, key=lambda one: layers.index(one[0]))
    full = _listed(f"{layer}.{name}", len(differing), "tensor")
    most -= odd
    yield Disagreement(
        layer=layer,
        role=role,
        tensor=name,
        ranks=tuple(sorted(odd)),
        others=tuple(sorted(most)),
        message=f"{named_ranks(sorted(odd))} {'has' if len(odd) == 1 else 'have'} "
        f"{'other' if most else 'different'} values of {full}"
        + (f" than {named_ranks(sorted(most))}" if most else ""),
        value=float(len(differing)),
        layers=layers,
        is_sure=any(differing.values()),
    )


def _batches(of: Gathered) -> Iterator[Disagreement]:
    """The same batch on ranks that share the batch out."""
    same = of.same_of_others({rank: one.record.batch for rank, one in of.seen.items()})
    if not same:
        return
    each = "; ".join(f"{named_ranks(ranks)} got the same batch" for ranks in same[:3])
    more = f"; and so on, {len(same) - 3} times more" if len(same) > 3 else ""
    ranks = tuple(sorted(rank for some in same for rank in some))
    yield Disagreement(
        role="inputs",
        ranks=ranks,
        others=of.others(ranks),
        message=each + more,
        value=float(len(ranks)),
    )


_REASONS = {
    OUTSIDE: "no wrapper holds {them}",
    BY_HAND: "no wrapper that gets a gradient holds {them}, unless the training loop does it by "
    "hand after backward()",
    LATER: "DDP was made before {they} came in",
    LEFT_OUT: "fully_shard does not hold {them}, by ignored_params or since a later change",
    THAWED: "DDP was made while {they} {were} frozen",
}


def _averaging(of: Gathered) -> Iterator[Disagreement]:
    """Parameters that get gradients on ranks with other samples, and that no wrapper averages.

    What `fully_shard` leaves out may be meant so, and a loop may average by hand where the wrappers
    that there are get no gradient: that only warns.
    """
    ranks, by_reason = tuple(of.seen), dict[str, dict[Name, None]]()
    lost = {(p, q): why for one in of.seen.values() for p, q, why in one.record.unaveraged}
    for name, why in lost.items():
        by_reason.setdefault(why, {})[name] = None
    for why, parameters in by_reason.items():
        layers = of.in_order(layer for layer, _ in parameters)
        layer, own = next(one for one in parameters if one[0] == layers[0])
        count, among = len(parameters), named_ranks(ranks)
        if why == BYPASSED:
            text = (
                f"{layer!r} is wrapped in DDP and called past its wrapper: {among} train it each "
                "on gradients of its own batch"
            )
        else:
            words = ("it", "it", "was") if count == 1 else ("they", "them", "were")
            reason = _REASONS[why].format(**dict(zip(("they", "them", "were"), words, strict=True)))
            listed = _listed(f"{layer}.{own}", count)
            text = f"the gradients of {listed} are not averaged over {among}: {reason}"
        yield Disagreement(
            layer=layer,
            role="parameter_gradients",
            tensor=own,
            ranks=ranks,
            message=text,
            value=float(count),
            layers=layers,
            is_sure=why not in (LEFT_OUT, BY_HAND),
        )


def _paths(of: Gathered) -> Iterator[Disagreement]:
    """Parameters that some ranks use and others do not: these never finish the reduction."""
    lacking: dict[Name, list[int]] = {}
    for rank, one in of.seen.items():
        for name in one.record.unused:
            lacking.setdefault(name, []).append(rank)
    differing = {name: ranks for name, ranks in lacking.items() if len(ranks) < len(of.seen)}
    if not differing:
        return
    layers = of.in_order(layer for layer, _ in differing)
    without = next(ranks for (name, _), ranks in differing.items() if name == layers[0])
    odd = tuple(sorted({rank for ranks in differing.values() for rank in ranks}))
    more = {1: "", 2: "; one more layer differs, too"}.get(
        len(layers), f"; {len(layers) - 1:,} more layers differ, too"
    )
    yield Disagreement(
        layer=layers[0],
        role="parameter_gradients",
        ranks=odd,
        others=of.others(odd),
        message=f"its parameters get a gradient on {named_ranks(of.others(without))}, and none on "
        f"{named_ranks(without)}, where DDP waits for one{more}",
        value=float(len(layers)),
        layers=layers,
    )


def _unused(of: Gathered) -> Iterator[Disagreement]:
    """Parameters that no rank uses: the next step of DDP raises, if it gets other gradients."""
    unused = set.intersection(*(set(one.record.unused) for one in of.seen.values()))
    for held, waited_for in of.own.waiting:
        if waited_for <= unused:
            unused -= held  # as of a teacher: a DDP without any gradient waits for none
    if not unused:
        return
    layers = of.in_order(layer for layer, _ in unused)
    names = ((leaf.layer, leaf.name) for leaf in of.own.wrapped.parameters)
    first = next(one for one in names if one in unused and one[0] == layers[0])
    count = len(unused)
    yield Disagreement(
        layer=first[0],
        role="parameter_gradients",
        tensor=first[1],
        ranks=tuple(of.seen),
        message=f"{_listed('.'.join(first), count)} {'get' if count > 1 else 'gets'} no gradient "
        f"on {named_ranks(of.seen)}, and DDP waits for one: its next forward raises",
        value=float(count),
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
    middle = math.sqrt(fewest * most)
    odd = tuple(rank for rank, count in counts.items() if count < middle)
    own = sorted(counts[rank] for rank in odd)
    times = f"{most / own[-1]:.3g}" + (f" to {most / own[0]:.3g}" if own[0] < own[-1] else "")
    between = f"{own[0]:,}" + (f" to {own[-1]:,}" if own[0] < own[-1] else "")
    light = next(rank for rank, count in counts.items() if count == most)
    yield Disagreement(
        role="loss",
        ranks=odd,
        others=of.others(odd),
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
    count, *others = map(_count, calls)
    if any(other != count for other in others):
        return 0, 0.0
    means = [call.options.get("reduction", "mean") == "mean" for call in calls]
    values = sum(call.value or 0.0 for call in calls)
    if all(means) and math.isclose(own.loss, values, rel_tol=_TOLERANCE):
        return count, 1.0
    if len(calls) > 1 or not values:
        return 0, 0.0
    factor = own.loss / values
    return count, factor if means[0] else factor * count


def _count(call: LossCall) -> int:
    """Return of how many targets a call is the mean; 0 where they weigh by themselves."""
    if call.options.get("weight") or call.options.get("reduction") == "none":
        return 0
    if call.targets is not None:
        return call.targets.count - call.targets.ignored
    return 0 if call.target is None else call.target.count


def _norms(of: Gathered) -> Iterator[Disagreement]:
    """Batch norms of torch's in training that see few samples each: nothing synchronises them."""
    alone = [layer for module, layer in of.own.wrapped.names.items() if _is_alone(module)]
    samples = {}
    layers: list[str] = []
    for rank, one in of.seen.items():
        own = one.observation
        called = [name for name in alone if name in own.layers and own.layers[name].calls]
        if called and len(one.place.data) > 1:
            samples[rank] = own.samples // max(1, own.batches)
            layers += called
    if not samples:
        return
    fewest = min(samples.values())
    yield Disagreement(
        layer=of.in_order(layers)[0],
        role="activations",
        ranks=tuple(samples),
        message=f"{named_ranks(samples)} normalise each by their own {fewest:,} "
        f"sample{'' if fewest == 1 else 's'} alone",
        value=float(fewest),
        layers=of.in_order(alone),
    )


def _is_alone(module: nn.Module) -> bool:
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_norm and not isinstance(module, nn.SyncBatchNorm) and module.training


def _randomness(of: Gathered) -> Iterator[Disagreement]:
    """Dropouts that drop the same units on ranks with other samples."""
    dropping = {
        rank: [r.name for r in one.observation.layers.values() if _drops(r)]
        for rank, one in of.seen.items()
    }
    states = {rank: one.record.random for rank, one in of.seen.items() if dropping[rank]}
    same = of.same_of_others(states)
    if not same:
        return
    ranks = tuple(sorted(rank for some in same for rank in some))
    each = " and so do ".join(named_ranks(some) for some in same[:3])
    yield Disagreement(
        layer=of.in_order(dropping[rank][0] for rank in ranks)[0],
        role="activations",
        ranks=ranks,
        others=of.others(ranks),
        message=f"{each} start from the same random numbers: the same units are dropped on each",
        value=float(len(ranks)),
        layers=of.in_order(r.name for r in of.joint.layers.values() if _drops(r)),
    )


def _drops(record: LayerRecord) -> bool:
    """Whether a layer is a dropout at work, or its own forward calls one."""
    options = record.options
    is_at_work = record.entered is not None and options.get("training", True) is True
    is_dropout = "dropout" in record.type_name.lower() and is_rate(options.get("p"))
    return drops_in_forward(record) or (is_at_work and is_dropout)


COMPARED: tuple[tuple[str, Callable[[Gathered], Iterable[Disagreement]]], ...] = (
    ("finite", _nonfinite),
    ("same_weights", _weights),
    ("distinct_data", _batches),
    ("averaged_gradients", _averaging),
    ("same_path", _paths),
    ("unused_parameters", _unused),
    ("even_weights", _loss_weights),
    ("replicas_agree", replicas),
    ("synced_norm", _norms),
    ("distinct_dropout", _randomness),
)
"""The check that judges it, and what compares the gathered records for it."""


def _alike(cards: Mapping[int, Any]) -> list[tuple[int, ...]]:
    """Return the ranks with equal cards together; the most first, of as many the lowest ranks."""
    groups: dict[Any, list[int]] = {}
    for rank, card in cards.items():
        groups.setdefault(card, []).append(rank)
    return sorted((tuple(ranks) for ranks in groups.values()), key=lambda r: (-len(r), r))


def _listed(name: str, count: int, what: str = "parameter") -> str:
    """Return ``"'a.weight' and 2 more parameters"``: the first by name, the others by number."""
    first = repr(name.lstrip("."))
    more = count - 1
    return f"{first} and {more:,} more {what}{'' if more == 1 else 's'}" if more else first
