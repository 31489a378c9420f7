"""One observation of what several ranks saw, the same on each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.packing import join
from pytest_modelhealth.ranks.part import Joined, Part
from pytest_modelhealth.ranks.placing import LOSS_INPUT, LOSS_TARGET, Key, parts_of
from pytest_modelhealth.ranks.skeleton import Skeleton, agreed
from pytest_modelhealth.ranks.small import small_numbers
from pytest_modelhealth.ranks.zero_slices import joined_slices
from pytest_modelhealth.report import ROLES, LayerRecord, Observation
from pytest_modelhealth.report.observation import ClassTargets, GivenTensor, LossCall
from pytest_modelhealth.report.ranks import Assembly, How, Ranks
from pytest_modelhealth.statistics import TensorStatistics

_HOWS: tuple[How, ...] = ("units", "pieces", "replicas")


def assembled(company: Company, own: Observation) -> Observation:
    """Return what all ranks saw of one step, put together from what each saw.

    Counts, extremes and histograms are exact, moments right to rounding, units that ranks share
    out stand in a row. Gradients of activations are divided by the number of ranks that share the
    batch out, as their losses are averaged: so all numbers are those of one process that has the
    whole batch.

    Args:
        company: the ranks; each calls this at the same time.
        own: what this rank saw.
    """
    skeleton = agreed(company, own)
    slips = company.gather(_Slip.of(company, own))
    parts = parts_of(company, own, skeleton.keys)
    joined = join(company, parts, own.samples)
    tensors = dict(zip(skeleton.keys, joined, strict=True))
    assemblies = _assemblies(company, skeleton.keys, parts, joined)
    whole = _layers(company, skeleton, own, tensors, assemblies)
    return _observation(company, skeleton, own, slips, tensors, whole)


@dataclass(frozen=True)
class _Slip:
    """The few numbers of a rank that are gathered as they are: some hundred bytes.

    Args:
        rank: the rank.
        is_first: whether it stands first among those that see the same samples.
    """

    rank: int
    is_first: bool
    loss: float | None
    samples: int
    sample_deviation: float | None
    notes: tuple[str, ...]
    errors: tuple[str, ...]
    given: tuple[GivenTensor, ...]
    widened: Any
    has_tasks: bool
    values: tuple[float | None, ...]
    normalizers: tuple[float | None, ...]
    targets: tuple[ClassTargets | None, ...]

    @classmethod
    def of(cls, company: Company, own: Observation) -> _Slip:
        calls = own.loss_calls
        return cls(
            company.rank,
            company.place.tensor[0] == company.rank,
            own.loss,
            own.samples,
            own.sample_deviation,
            own.notes,
            own.errors,
            own.given,
            None if own.loss_path is None else own.loss_path.widened,
            bool(own.tasks),
            tuple(call.value for call in calls),
            tuple(call.log_normalizer for call in calls),
            tuple(call.targets for call in calls),
        )


def _assemblies(
    company: Company, keys: Sequence[Key], parts: Sequence[Part], joined: Sequence[Joined]
) -> dict[tuple[str, str], Assembly]:
    """Return how the statistics of each layer and role became one."""
    own = [len(_HOWS) if p.seen is None else _HOWS.index(p.how) for p in parts]
    codes = company.smallest(np.array(own, dtype=np.int64)).tolist()
    found: dict[tuple[str, str], Assembly] = {}
    sizes: dict[tuple[str, str], float] = {}
    for (layer, role, _), one, code in zip(keys, joined, codes, strict=True):
        if one.seen is None:
            continue
        how: How = "one rank" if one.ranks == 1 else _HOWS[code]
        place, size = (layer, role), one.seen.abs_max
        before = found.get(place)
        if before is None:
            found[place] = Assembly(how, one.ranks, one.nonfinite, one.largest)
            sizes[place] = size
            continue
        is_larger = not size <= sizes[place] and one.largest is not None
        sizes[place] = size if is_larger else sizes[place]
        found[place] = Assembly(
            before.how,
            max(before.ranks, one.ranks),
            tuple(sorted({*before.nonfinite, *one.nonfinite})),
            one.largest if is_larger else before.largest,
        )
    return found


def _layers(
    company: Company,
    skeleton: Skeleton,
    own: Observation,
    tensors: Mapping[Key, Joined],
    assemblies: Mapping[tuple[str, str], Assembly],
) -> dict[str, LayerRecord]:
    records = skeleton.observation.layers
    roles: dict[str, dict[str, Any]] = {name: {} for name in records}
    for (layer, role, name), one in tensors.items():
        if one.seen is None or role not in ROLES:
            continue
        if role in ("inputs", "activations", "gradients"):
            roles[layer][role] = one.seen
        else:
            roles[layer].setdefault(role, {})[name] = one.seen
    slices = joined_slices(company, own, {key: one.seen for key, one in tensors.items()})
    small = small_numbers(company, records, own)
    how: dict[str, dict[str, Assembly]] = {}
    for (layer, role), assembly in assemblies.items():
        how.setdefault(layer, {})[role] = assembly
    return {
        name: replace(
            record,
            **roles[name],
            **small[name],
            zero_slices=slices.get(name, {}),
            assembled={r: a for r, a in how.get(name, {}).items() if r in ROLES},
        )
        for name, record in records.items()
    }


def _observation(
    company: Company,
    skeleton: Skeleton,
    own: Observation,
    slips: Sequence[_Slip],
    tensors: Mapping[Key, Joined],
    layers: dict[str, LayerRecord],
) -> Observation:
    bare = skeleton.observation
    firsts = [slip for slip in slips if slip.is_first]
    losses = [(slip.loss, slip.rank) for slip in firsts if slip.loss is not None]
    path = bare.loss_path
    if path is not None:
        path = replace(path, widened=next((s.widened for s in slips if s.widened), None))
    has_tasks = any(slip.has_tasks for slip in slips)
    return replace(
        bare,
        layers=layers,
        loss=math.fsum(loss for loss, _ in losses) / len(losses) if losses else None,
        samples=sum(slip.samples for slip in firsts),
        sample_deviation=max(
            (s.sample_deviation for s in slips if s.sample_deviation is not None), default=None
        ),
        notes=tuple(dict.fromkeys(note for slip in slips for note in slip.notes)),
        errors=_errors(slips),
        given=_given(firsts),
        loss_calls=_loss_calls(bare.loss_calls, firsts, tensors),
        loss_path=path,
        unregistered=company.first(own.unregistered) if bare.unregistered else (),
        tasks=company.first(own.tasks) if has_tasks else (),
        ranks=Ranks(company.ranks, company.place.engine, company.groups, (), _range_of(losses)),
    )


def _range_of(losses: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    finite = [pair for pair in losses if not math.isnan(pair[0])]
    if not finite:
        return ()
    return min(finite), max(finite, key=lambda pair: (pair[0], -pair[1]))


def _errors(slips: Sequence[_Slip]) -> tuple[str, ...]:
    """Return the errors of all ranks; what only some have with the first of those."""
    having: dict[str, list[int]] = {}
    for slip in slips:
        for error in dict.fromkeys(slip.errors):
            having.setdefault(error, []).append(slip.rank)
    return tuple(
        error if len(ranks) == len(slips) else f"rank {ranks[0]}: {error}"
        for error, ranks in having.items()
    )


def _given(firsts: Sequence[_Slip]) -> tuple[GivenTensor, ...]:
    """Return the batch as one process would have been given it."""
    first = firsts[0]
    total = sum(slip.samples for slip in firsts)
    return tuple(
        replace(one, shape=(total, *one.shape[1:]))
        if one.shape and one.shape[0] == first.samples
        else one
        for one in first.given
    )


def _loss_calls(
    calls: Sequence[LossCall], firsts: Sequence[_Slip], tensors: Mapping[Key, Joined]
) -> tuple[LossCall, ...]:
    found = []
    for number, call in enumerate(calls):
        found.append(
            replace(
                call,
                input=_seen(tensors, ("", LOSS_INPUT, str(number))),
                target=_seen(tensors, ("", LOSS_TARGET, str(number))),
                value=_mean([_nth(slip.values, number) for slip in firsts]),
                log_normalizer=_mean([_nth(slip.normalizers, number) for slip in firsts]),
                targets=_targets([_nth(slip.targets, number) for slip in firsts]),
            )
        )
    return tuple(found)


def _seen(tensors: Mapping[Key, Joined], key: Key) -> TensorStatistics | None:
    return tensors[key].seen if key in tensors else None


def _nth(values: Sequence[Any], number: int) -> Any:
    return values[number] if number < len(values) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _targets(seen: Sequence[ClassTargets | None]) -> ClassTargets | None:
    known = [one for one in seen if one is not None]
    if not known:
        return None
    count = sum(one.count for one in known)
    tails, only = {one.tail for one in known}, {one.only for one in known}
    share = sum(one.tail_share * one.count for one in known) / max(count, 1)
    return ClassTargets(
        count,
        sum(one.ignored for one in known),
        tail=tails.pop() if len(tails) == 1 else None,
        tail_share=share if not tails else 0.0,
        only=only.pop() if len(only) == 1 else None,
    )
