"""`group_of`, `observed_together`: an inspection that several ranks make together."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.parallel.wrappers import find_wrappers, refuse_unknown_ways
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.ranks import END_OF_TEST
from pytest_modelhealth.ranks.assembling import assembled
from pytest_modelhealth.ranks.barrier import digest
from pytest_modelhealth.ranks.comparing import disagreements
from pytest_modelhealth.ranks.evidence import Evidence
from pytest_modelhealth.ranks.group import RankGroup, limited
from pytest_modelhealth.ranks.layout import Place, described, place_of
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.parts import Extreme, Probed
from pytest_modelhealth.tolerance import Run, observed

_groups: dict[Place, RankGroup] = {}
_made: dict[tuple[int, ...], int] = {}


def group_of(model: nn.Module, everyone: bool, seconds: float) -> RankGroup | None:
    """Return the ranks that inspect this model together; ``None`` where this one is alone.

    Ranks that inspect together again have one group, with its process groups.

    Args:
        model: the model.
        everyone: whether all ranks share the batches of a model that nothing distributes.
        seconds: how long to wait for the others.
    """
    place = place_of(model, everyone)
    if place is None:
        return None
    group = _groups.get(place)
    if group is None or group.is_closed:
        number = _made[place.ranks] = _made.get(place.ranks, 0) + 1
        name = f"modelhealth/{digest(repr(place.ranks))}/{number}"
        store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
        group = _groups[place] = RankGroup(place, store, seconds)
    end = os.environ.get(END_OF_TEST)
    left = math.inf if end is None else max(1.0, 0.8 * (float(end) - time.time()))
    group.barrier.seconds = min(seconds, left)  # and say who is missing, before the test is ended
    return group


def observed_together(group: RankGroup, request: Request, run: Run = observed) -> Observation:
    """Return what all ranks saw of a step that each runs on its own batch.

    Args:
        group: the ranks.
        request: what is asked of this one.
        run: runs it on this rank.

    Raises:
        InspectionError: another rank failed, did not come, or inspects something else.
        Exception: whatever this rank's model or loss raises, untouched.
    """
    refuse_unknown_ways(find_wrappers(State(request.model).modules))
    group.barrier.wait("the run", _structure(request))
    group.open()
    with group.telling("its run", request.model), limited(group.barrier.seconds):
        evidence = Evidence(group, request)
        try:
            own = run(replace(request, averager=group.averaged))
        finally:
            evidence.close()
    group.barrier.wait("the reports are put together")
    with group.telling("putting the reports together"):
        seen = group.gather(evidence.seen(own))
        joint = assembled(group, seen)
        found = disagreements(evidence, seen, joint)
    assert joint.ranks is not None
    return replace(joint, ranks=replace(joint.ranks, disagreements=found))


@contextmanager
def together(group: RankGroup) -> Iterator[None]:
    """Let all ranks know if one fails between its batches."""
    group.kept = {}
    try:
        with group.telling("its batches"):
            yield
    finally:
        group.kept = None


def time_is_up(group: RankGroup, here: bool) -> bool:
    """Return whether time is up on some rank, after a batch that all have run: all end there.

    Raises:
        InspectionError: a rank failed, or did not come from this batch.
    """
    group.barrier.wait("its next batch")
    with group.telling("ending its batches"):
        return any(group.gather(here))


def settled(group: RankGroup, own: Observation, over_batches: bool) -> Observation:
    """Return what all ranks end with: what each measured by itself is that of the first rank.

    Ranks that have nothing more to tell each other do not meet.

    Args:
        group: the ranks.
        own: what this one ends with.
        over_batches: whether it is of batches, of which ranks may have had other numbers.

    Raises:
        InspectionError: another rank is not at its end.
    """
    alone = (own.probes, own.costs, own.stepped)
    if alone == _NOTHING and not over_batches:
        return own
    batches = f"{own.batches} batch" + ("" if own.batches == 1 else "es")
    group.barrier.wait(f"the end of its inspection, after {batches}")
    with group.telling("ending its inspection"):
        extremes = {name: (r.largest, r.nonfinite) for name, r in own.layers.items()}
        sent = group.gather((extremes, own.odd_samples, alone))
    layers = {}
    for name, record in own.layers.items():
        largest, first = zip(*(each[name] for each, _, _ in sent), strict=True)
        layers[name] = replace(
            record,
            largest=_outstanding(group, largest, lambda one: -abs(one.value)),
            nonfinite=_outstanding(group, first, lambda one: one.batch),
        )
    odd = {
        kind: (who, replace(place, rank=rank))
        for rank, (_, each, _) in reversed([*zip(group.ranks, sent, strict=True)])
        for kind, (who, place) in each.items()
    }
    probes, costs, stepped = sent[0][2]
    return replace(own, layers=layers, odd_samples=odd, probes=probes, costs=costs, stepped=stepped)


def _outstanding(
    group: RankGroup, extremes: Sequence[Mapping[str, Extreme]], order: Callable[[Extreme], float]
) -> dict[str, Extreme]:
    """Return by role the first of the smallest `order`; gradients as their statistics are."""
    found: dict[str, Extreme] = {}
    for rank, each in zip(group.ranks, extremes, strict=True):
        for role, one in each.items():
            if role not in found or order(one) < order(found[role]):
                found[role] = replace(one, rank=rank)
    shares = len(group.place.data)
    return {
        role: replace(one, value=one.value / shares) if role == "gradients" else one
        for role, one in found.items()
    }


_NOTHING = (Probed(), None, None)


def _structure(request: Request) -> str:
    """Return what must be equal before ranks run a model together, a line a thing."""
    asked = ", ".join(
        f"{name}={value if isinstance(value, bool | None) else 'given'}"
        for name, value in {
            "loss": request.loss,
            "backward": request.backward,
            "scaler": request.scaler,
            "gradients": torch.is_grad_enabled(),
        }.items()
    )
    return f"{asked}\n{described(request.model)}"
