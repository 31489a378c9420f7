"""`company_of`, `observed`: an inspection that several ranks make together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_modelhealth.capture import Request
from pytest_modelhealth.ranks import evidence
from pytest_modelhealth.ranks.assembling import assembled
from pytest_modelhealth.ranks.averaging import Averager
from pytest_modelhealth.ranks.company import Company, Place, digest
from pytest_modelhealth.ranks.places import place_of
from pytest_modelhealth.report import Observation

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
    company.meeting.seconds = seconds
    return company


def observed(
    company: Company, request: Request, run: Callable[[Request], Observation]
) -> Observation:
    """Return what all ranks saw of a step that each runs on its own batch.

    Raises:
        InspectionError: another rank failed, did not come, or inspects something else.
        Exception: whatever this rank's model or loss raises, untouched.
    """
    structure = _structure(request)
    company.meeting.agree("the run", digest(structure), structure)
    company.open()
    with company.telling("its run"):
        noted = evidence.collected(company, request)
        try:
            own = run(replace(request, averager=Averager(company)))
        finally:
            noted.close()
    company.meeting.agree("the reports are put together", "")
    with company.telling("putting the reports together"):
        joint = assembled(company, own)
        found = evidence.disagreements(company, noted, own, joint)
    assert joint.ranks is not None
    return replace(joint, ranks=replace(joint.ranks, disagreements=found))


def _new_company(ranks: tuple[int, ...], place: Place, seconds: float) -> Company:
    number = _made[ranks] = _made.get(ranks, 0) + 1
    name = f"modelhealth/{digest(repr(ranks))}/{number}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return Company(ranks, store, seconds, place)


def _structure(request: Request) -> str:
    """Return what must be equal before ranks run a model together, a line a thing."""
    asked = {
        "loss": _kind(request.loss),
        "backward": _kind(request.backward),
        "scaler": _kind(request.scaler),
        "gradients": str(torch.is_grad_enabled()),
    }
    lines = [", ".join(f"{name}={value}" for name, value in asked.items())]
    return "\n".join([*lines, evidence.described(request.model)])


def _kind(value: Any) -> str:
    return str(value) if isinstance(value, bool | None) else "given"
