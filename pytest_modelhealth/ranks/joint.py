"""`company_of`, `observed_together`: an inspection that several ranks make together."""

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
from pytest_modelhealth.ranks.averaging import Averager
from pytest_modelhealth.ranks.company import Company, limited
from pytest_modelhealth.ranks.comparing import disagreements
from pytest_modelhealth.ranks.evidence import Evidence
from pytest_modelhealth.ranks.layout import Place, described, place_of
from pytest_modelhealth.ranks.meeting import digest
from pytest_modelhealth.ranks.placing import Seen
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.parts import Extreme, Probed
from pytest_modelhealth.tolerance import Run, observed

_companies: dict[tuple[tuple[int, ...], Place], Company] = {}
_made: dict[tuple[int, ...], int] = {}


def company_of(model: nn.Module, everyone: bool, seconds: float) -> Company | None:
    """Return the ranks that inspect this model together; ``None`` where this one is alone.

    Ranks that meet again have met before: the company is kept, with its process group.

    Args:
        model: the model.
        everyone: whether all ranks share the batches of a model that nothing distributes.
        seconds: how long to wait for the others.
    """
    found = place_of(model, everyone)
    if found is None:
        return None
    company = _companies.get(found)
    if company is None or company.is_closed:
        company = _companies[found] = _new_company(*found, seconds)
    end = os.environ.get(END_OF_TEST)
    left = math.inf if end is None else max(1.0, 0.8 * (float(end) - time.time()))
    company.meeting.seconds = min(seconds, left)  # and say who is missing, before the test is ended
    return company


def observed_together(company: Company, request: Request, run: Run = observed) -> Observation:
    """Return what all ranks saw of a step that each runs on its own batch.

    Args:
        company: the ranks.
        request: what is asked of this one.
        run: runs it on this rank.

    Raises:
        InspectionError: another rank failed, did not come, or inspects something else.
        Exception: whatever this rank's model or loss raises, untouched.
    """
    refuse_unknown_ways(find_wrappers(State(request.model).modules))
    company.meeting.agree("the run", _structure(request))
    company.open()
    with company.telling("its run", request.model), limited(company.meeting.seconds):
        evidence = Evidence(company, request)
        try:
            own = run(replace(request, averager=Averager(company)))
        finally:
            evidence.close()
    company.meeting.agree("the reports are put together")
    with company.telling("putting the reports together"):
        seen = company.gather(Seen(company.rank, company.place, own, evidence.record(own)))
        joint = assembled(company, seen)
        found = disagreements(evidence, seen, joint)
    assert joint.ranks is not None
    return replace(joint, ranks=replace(joint.ranks, disagreements=found))


@contextmanager
def together(company: Company) -> Iterator[None]:
    """Let all ranks know if one fails between its batches."""
    company.kept = {}
    try:
        with company.telling("its batches"):
            yield
    finally:
        company.kept = None


def time_is_up(company: Company, here: bool) -> bool:
    """Return whether time is up on some rank, after a batch that all have run: all end there.

    Raises:
        InspectionError: a rank failed, or did not come from this batch.
    """
    company.meeting.agree("its next batch")
    with company.telling("ending its batches"):
        return any(company.gather(here))


def settled(company: Company, own: Observation, over_batches: bool) -> Observation:
    """Return what all ranks end with: what each measured by itself is that of the first rank.

    Ranks that have nothing more to tell each other do not meet.

    Args:
        company: the ranks.
        own: what this one ends with.
        over_batches: whether it is of batches, of which ranks may have had other numbers.

    Raises:
        InspectionError: another rank is not at its end.
    """
    alone = (own.probes, own.costs, own.stepped)
    if alone == _NOTHING and not over_batches:
        return own
    batches = f"{own.batches} batch" + ("" if own.batches == 1 else "es")
    company.meeting.agree(f"the end of its inspection, after {batches}")
    with company.telling("ending its inspection"):
        extremes = {name: (r.largest, r.nonfinite) for name, r in own.layers.items()}
        sent = company.gather((extremes, own.odd_samples, alone))
    layers = {}
    for name, record in own.layers.items():
        largest, first = zip(*(each[name] for each, _, _ in sent), strict=True)
        layers[name] = replace(
            record,
            largest=_outstanding(company, largest, lambda one: -abs(one.value)),
            nonfinite=_outstanding(company, first, lambda one: one.batch),
        )
    odd = {
        kind: (who, replace(place, rank=rank))
        for rank, (_, each, _) in reversed([*zip(company.ranks, sent, strict=True)])
        for kind, (who, place) in each.items()
    }
    probes, costs, stepped = sent[0][2]
    return replace(own, layers=layers, odd_samples=odd, probes=probes, costs=costs, stepped=stepped)


def _outstanding(
    company: Company, extremes: Sequence[Mapping[str, Extreme]], order: Callable[[Extreme], float]
) -> dict[str, Extreme]:
    """Return by role the first of the smallest `order`; gradients as their statistics are."""
    found: dict[str, Extreme] = {}
    for rank, each in zip(company.ranks, extremes, strict=True):
        for role, one in each.items():
            if role not in found or order(one) < order(found[role]):
                found[role] = replace(one, rank=rank)
    shares = len(company.place.data)
    return {
        role: replace(one, value=one.value / shares) if role == "gradients" else one
        for role, one in found.items()
    }


_NOTHING = (Probed(), None, None)


def _new_company(ranks: tuple[int, ...], place: Place, seconds: float) -> Company:
    number = _made[ranks] = _made.get(ranks, 0) + 1
    name = f"modelhealth/{digest(repr(ranks))}/{number}"
    store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return Company(ranks, store, seconds, place)


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
