"""`Joint`: an inspection that several ranks make together."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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
from pytest_modelhealth.report import LayerRecord, Observation, Probed
from pytest_modelhealth.report.merging import merged
from pytest_modelhealth.tolerance import Run, observed

_groups: dict[Place, RankGroup] = {}
_made: dict[tuple[int, ...], int] = {}


def joined(model: nn.Module, everyone: bool, seconds: float) -> Joint | None:
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
    return Joint(group)


@dataclass(frozen=True)
class Joint:
    """The inspections that the ranks of a group make together."""

    group: RankGroup

    def observed(self, request: Request, run: Run = observed) -> Observation:
        """Return what all ranks saw of a step that each runs on its own batch.

        Args:
            request: what is asked of this one.
            run: runs it on this rank.

        Raises:
            InspectionError: another rank failed, did not come, or inspects something else.
            Exception: whatever this rank's model or loss raises, untouched.
        """
        group = self.group
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

    def over_batches(self, run: Callable[[], Observation]) -> Observation:
        """Return what all ranks saw of batches; if one fails between its own, all are told."""
        group = self.group
        group.kept = {}
        try:
            with group.telling("its batches"):
                return self.settled(run(), over_batches=True)
        finally:
            group.kept = None

    def settled(self, own: Observation, over_batches: bool = False) -> Observation:
        """Return what all ranks end with: what each measured by itself is that of the first rank.

        Ranks that have nothing more to tell each other do not meet.

        Args:
            own: what this one ends with.
            over_batches: whether it is of batches, of which ranks may have had other numbers.

        Raises:
            InspectionError: another rank is not at its end.
        """
        if (own.probes, own.costs, own.stepped) == (Probed(), None, None) and not over_batches:
            return own
        group = self.group
        batches = f"{own.batches} batch" + ("" if own.batches == 1 else "es")
        group.barrier.wait(f"the end of its inspection, after {batches}")
        with group.telling("ending its inspection"):
            mine = replace(
                own,
                layers={n: replace(r, **_extremes(group, r)) for n, r in own.layers.items()},
                flow=None,
            )
            joint = merged(group.gather(mine), over="ranks")
        return replace(
            own,
            layers={
                n: replace(r, largest=joint.layers[n].largest, nonfinite=joint.layers[n].nonfinite)
                for n, r in own.layers.items()
            },
            probes=joint.probes,
            costs=joint.costs,
            stepped=joint.stepped,
        )


def _extremes(group: RankGroup, record: LayerRecord) -> dict[str, Any]:
    """Return where values of a layer stood, with the rank; gradients as their statistics are."""
    shares = len(group.place.data)
    return {
        kind: {
            role: replace(
                one, rank=group.rank, value=one.value / (shares if role == "gradients" else 1)
            )
            for role, one in getattr(record, kind).items()
        }
        for kind in ("largest", "nonfinite")
    }


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
