"""One observation of what several ranks saw, the same on each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pytest_modelhealth.ranks.company import Company, digest
from pytest_modelhealth.ranks.evidence import Evidence
from pytest_modelhealth.ranks.packing import joining, layout_of
from pytest_modelhealth.ranks.part import Joined, Part
from pytest_modelhealth.ranks.placing import (
    FLOWING,
    LOSS_INPUT,
    LOSS_TARGET,
    Key,
    firsts_of,
    keys_of,
    parts_of,
)
from pytest_modelhealth.ranks.rounds import Rounds, Steps, in_rounds
from pytest_modelhealth.ranks.skeleton import Skeleton, agreed, told
from pytest_modelhealth.ranks.small import has_measured, small_numbers
from pytest_modelhealth.ranks.zero_slices import joined_slices, sliced
from pytest_modelhealth.report import ROLES, LayerRecord, Observation, ZeroSlices
from pytest_modelhealth.report.observation import (
    ClassTargets,
    GivenTensor,
    LossCall,
    mean_of,
    merged_targets,
)
from pytest_modelhealth.report.ranks import Assembly, How, Ranks
from pytest_modelhealth.statistics import TensorStatistics

_HOWS: tuple[How, ...] = ("units", "pieces", "replicas")


def assembled(company: Company, own: Observation, noted: Evidence | None = None) -> Observation:
    """Return what all ranks saw of one step, put together from what each saw.

    Counts, extremes and histograms are exact, moments right to rounding, units that ranks share
    out stand in a row. Gradients of activations are divided by the number of ranks that share the
    batch out, as their losses are averaged: so all numbers are those of one process that has the
    whole batch.

    One message says whether the ranks saw the same; two more rounds carry the numbers.

    Args:
        company: the ranks; each calls this at the same time.
        own: what this rank saw.
        noted: what it noted before the run; its cards go with the first message.
    """
    keys = keys_of(own)
    parts = parts_of(company, own, keys) if len(company.place.tensor) == 1 else None
    slips: list[_Slip] = company.gather(_Slip.of(company, own, keys, parts, noted))
    if noted is not None:
        noted.cards = [slip.cards for slip in slips]
    skeleton = agreed(
        company, own, keys, [slip.layout for slip in slips], [slip.flow for slip in slips]
    )
    if parts is None or len(skeleton.layouts) > 1:
        parts = parts_of(company, own, skeleton.keys)
    is_alike = len(skeleton.layouts) == 1 and _is_same(slip.tensors for slip in slips)
    device = slips[0].device if is_alike else None
    is_shared = len(skeleton.layouts) == 1 and _is_same(slip.shared for slip in slips)
    firsts = firsts_of(parts) if is_shared else list(range(len(parts)))
    distinct = sorted(set(firsts))
    some = [parts[place] for place in distinct]
    has_options = any(slip.has_measured for slip in slips)
    records = skeleton.observation.layers
    found, codes, small, sliced_keys = in_rounds(
        company,
        lambda rounds: joining(rounds, company, some, own.samples, device),
        lambda rounds: _hows(rounds, parts, device is not None),
        lambda rounds: small_numbers(rounds, records, own, has_options),
        lambda rounds: sliced(rounds, own, skeleton.keys),
    )
    by_place = dict(zip(distinct, found, strict=True))
    joined = [by_place[place] for place in firsts]
    tensors = dict(zip(skeleton.keys, joined, strict=True))
    seen = {key: one.seen for key, one in tensors.items()}
    slices = joined_slices(company, own, sliced_keys, seen)
    assemblies = _assemblies(skeleton.keys, joined, codes)
    whole = _layers(records, tensors, slices, small, assemblies)
    return _observation(company, skeleton, own, slips, tensors, whole)


def _is_same(texts: Iterable[str]) -> bool:
    """Whether all ranks have the same text, and it says something."""
    distinct = set(texts)
    return len(distinct) == 1 and "" not in distinct


@dataclass(frozen=True)
class _Slip:
    """What of a rank is gathered as it is: some hundred bytes.

    Args:
        rank: the rank.
        is_first: whether it stands first among those that see the same samples.
        layout, flow: tell what it saw from what others did, see `told`.
        tensors: tells its tensors from those of others, see `layout_of`; ``""`` where that is not
            known yet.
        shared: tells which of its tensors are the same, likewise.
        device: where its tensors are, one or several.
        cards: what it noted for the checks between ranks.
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
    layout: str
    flow: str
    tensors: str
    shared: str
    device: str
    has_measured: bool
    cards: list[Any]

    @classmethod
    def of(
        cls,
        company: Company,
        own: Observation,
        keys: Sequence[Key],
        parts: Sequence[Part] | None,
        noted: Evidence | None,
    ) -> _Slip:
        calls = own.loss_calls
        devices = sorted({one.seen.device for one in parts or () if one.seen is not None})
        is_whole = len(devices) == 1 and parts is not None
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
            *told(own, keys),
            layout_of(parts, own.samples) if is_whole and parts is not None else "",
            "" if parts is None else digest(repr(firsts_of(parts))),
            " ".join(devices),
            has_measured(own),
            [] if noted is None else noted.written(own),
        )


def _hows(rounds: Rounds, parts: Sequence[Part], is_agreed: bool) -> Steps[list[int]]:
    """Return how each tensor becomes one, by its place in `_HOWS`."""
    own = [len(_HOWS) if part.seen is None else _HOWS.index(part.how) for part in parts]
    if is_agreed:
        return own
    codes = rounds.smallest(np.array(own, dtype=np.int64))
    yield
    found: list[int] = codes.result.tolist()
    return found


def _assemblies(
    keys: Sequence[Key], joined: Sequence[Joined], codes: Sequence[int]
) -> dict[tuple[str, str], Assembly]:
    """Return how the statistics of each layer and role became one."""
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
    records: Mapping[str, LayerRecord],
    tensors: Mapping[Key, Joined],
    slices: Mapping[str, dict[str, ZeroSlices]],
    small: Mapping[str, dict[str, Any]],
    assemblies: Mapping[tuple[str, str], Assembly],
) -> dict[str, LayerRecord]:
    roles: dict[str, dict[str, Any]] = {
        name: {r: None if r in FLOWING else {} for r in ROLES} for name in records
    }
    for (layer, role, name), one in tensors.items():
        if one.seen is None or role not in ROLES:
            continue
        if role in FLOWING:
            roles[layer][role] = one.seen
        else:
            roles[layer][role][name] = one.seen
    how: dict[str, dict[str, Assembly]] = {}
    for (layer, role), assembly in assemblies.items():
        how.setdefault(layer, {})[role] = assembly
    return {
        name: replace(
            record,
            **roles[name],
            **small[name],
            zero_slices=slices.get(name, {}),
            largest={},
            nonfinite={},
            placements={},
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
                value=mean_of([_nth(slip.values, number) for slip in firsts]),
                log_normalizer=mean_of([_nth(slip.normalizers, number) for slip in firsts]),
                targets=merged_targets([_nth(slip.targets, number) for slip in firsts]),
            )
        )
    return tuple(found)


def _seen(tensors: Mapping[Key, Joined], key: Key) -> TensorStatistics | None:
    return tensors[key].seen if key in tensors else None


def _nth(values: Sequence[Any], number: int) -> Any:
    return values[number] if number < len(values) else None
