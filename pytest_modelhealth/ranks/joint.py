"""`Joint`: the ranks that inspect one model together, and what they do so.

Objects go over a process group of our own, of gloo, made while all is well: the groups of the
model are never used, since a rank that failed may have left another of their collectives open.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.capture.parallel.placements import summed
from pytest_modelhealth.capture.parallel.wrappers import find_wrappers, refuse_unknown_ways
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.ranks.assembling import assembled
from pytest_modelhealth.ranks.barrier import Barrier
from pytest_modelhealth.ranks.comparing import disagreements
from pytest_modelhealth.ranks.evidence import Evidence
from pytest_modelhealth.ranks.layout import Place, described, place_of
from pytest_modelhealth.report import Observation, Probed
from pytest_modelhealth.report.merging import merged
from pytest_modelhealth.tolerance import Run, observed

T = TypeVar("T")

_ADVICE = (
    ". All ranks must inspect the same batches in the same order, none under 'if rank == 0', and "
    "as many: a DistributedSampler with drop_last=True deals them out evenly. ranks=False inspects "
    "one rank alone; the setting rank_timeout waits longer"
)
_known: dict[tuple[Any, Place], Joint] = {}


def joined(model: nn.Module, everyone: bool, seconds: float) -> Joint | None:
    """Return the ranks that inspect this model together; ``None`` where this one is alone.

    Ranks that inspect together again are the same `Joint`, as long as the default group is; of a
    model that nothing distributes, `everyone` shares the batches.
    """
    place = place_of(model, everyone)
    if place is None:
        return None
    key = (dist.group.WORLD, place)
    if key not in _known:
        number = sum(known.ranks == place.ranks for _, known in _known)
        name = f"modelhealth/{'-'.join(map(str, place.ranks))}/{number}"
        store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
        _known[key] = Joint(place, Barrier(store, place.ranks, dist.get_rank(), seconds, _ADVICE))
    _known[key]._barrier.seconds = seconds
    return _known[key]


class Joint:
    """Ranks that inspect one model together."""

    def __init__(self, place: Place, barrier: Barrier) -> None:
        self._place, self._barrier, self._rank = place, barrier, dist.get_rank()
        self._group: Any = None

    def observed(self, request: Request, run: Run = observed) -> Observation:
        """Return what all ranks saw of a step that each runs on its own batch.

        Raises:
            InspectionError: another rank failed, did not come, or inspects something else.
            Exception: whatever this rank's model or loss raises, untouched.
        """
        refuse_unknown_ways(find_wrappers(State(request.model).modules))
        self._barrier.wait("the run")
        self._open()
        asked = {"loss": request.loss, "backward": request.backward, "scaler": request.scaler}
        given = {n: one if isinstance(one, bool | None) else "given" for n, one in asked.items()}
        grads = f"gradients {torch.is_grad_enabled()}"
        self._require_same(f"{given}, {grads}\n{described(request.model)}")
        with self._telling("its run"):
            evidence = Evidence(self._place, request)
            try:
                own = run(replace(request, averager=self._averaged))
            finally:
                evidence.close()
        self._barrier.wait("the reports are put together")
        with self._telling("putting the reports together"):
            seen = self._gather(evidence.seen(own))
            return disagreements(evidence, seen, assembled(self._place, seen))

    def over_batches(self, run: Callable[[], Observation]) -> Observation:
        """Return what all ranks saw of batches; if one fails between its own, all are told."""
        with self._telling("its batches"):
            return self.settled(run(), over_batches=True)

    def settled(self, own: Observation, over_batches: bool = False) -> Observation:
        """Return what all ranks end with: what each measured by itself is that of the first rank.

        Ranks that have nothing more to tell each other do not meet; of batches they may have had
        other numbers.

        Raises:
            InspectionError: another rank is not at its end.
        """
        if (own.probes, own.costs, own.stepped) == (Probed(), None, None) and not over_batches:
            return own
        batches = f"{own.batches} batch" + ("" if own.batches == 1 else "es")
        self._barrier.wait(f"the end of its inspection, after {batches}")
        with self._telling("ending its inspection"):
            joint = merged(self._gather(replace(own, flow=None)), over="ranks")
        later = ("probes", "costs", "stepped")
        return replace(own, **{name: getattr(joint, name) for name in later})

    def _open(self) -> None:
        """Make the process group of these ranks; all do so at once, while all is well."""
        if self._group is None:
            self._group = dist.new_group(
                list(self._place.ranks),
                timeout=timedelta(seconds=max(1.0, self._barrier.seconds)),
                backend="gloo",
                use_local_synchronization=True,
            )

    def _gather(self, value: T) -> list[T]:
        """Return a copy of the object of each rank, in order."""
        each: list[Any] = [None] * len(self._place.ranks)
        # as a pickle, which has every bit of a record in half the time that plain data takes: both
        # sides are of one version, and records hold no object of the user's
        dist.all_gather_object(each, value, group=self._group)
        return each

    def _require_same(self, text: str) -> None:
        """Do nothing where all ranks came with the same text.

        Raises:
            InspectionError: one did not; the message shows the first line that differs.
        """
        if len({*self._gather(zlib.crc32(text.encode(errors="replace")))}) == 1:
            return
        first, *others = zip(self._place.ranks, self._gather(text), strict=True)
        rank, other = next(pair for pair in others if pair[1] != first[1])
        lines = zip_longest(other.splitlines(), first[1].splitlines(), fillvalue="nothing")
        here, there = next(pair for pair in lines if pair[0] != pair[1])
        raise InspectionError(
            f"rank {rank} came to the run with something else than rank {first[0]}: {here}; on "
            f"rank {first[0]}: {there}"
        )

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Tell all others if this rank fails in what it is at; its error is raised as it is."""
        try:
            yield
        except BaseException as error:
            if not self._barrier.failed:  # else they know
                text = f"{type(error).__name__}: {str(error)[:500]}".partition("\n")[0]
                self._barrier.fail(
                    f"rank {self._rank} of {len(self._place.ranks)} raised {text.rstrip(': ')} in "
                    f"{what}; the others did not, and their inspection ends with it"
                )
            raise

    def _averaged(self, gradients: list[Held]) -> list[Held]:
        """Return gradients of parameters as a step of the user's would leave them on each rank.

        They are changed in place: a local backward pass made them, for the inspection alone. A
        parameter that a rank did not use counts as zeros there, where another rank used it. The
        engine of a `DTensor` has averaged it.

        Raises:
            InspectionError: a rank failed or did not come this far.
        """
        self._barrier.wait("its gradients are averaged")
        with torch.no_grad():
            whole = [(layer, name, summed(tensor)) for layer, name, tensor in gradients]
            own = {(at.name, name): t for at, name, t in whole if not hasattr(t, "device_mesh")}
            if len(self._place.data) > 1:
                arrays = {}
                for key, tensor in own.items():  # for NumPy, which is pickled faster
                    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
                    # sums in few bits may overflow
                    wide = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
                    arrays[key] = dense.detach().to("cpu", wide).numpy()
                every = self._gather(arrays)
                ranks = dict(zip(self._place.ranks, every, strict=True))
                each = [ranks[rank] for rank in self._place.data]
                for key, tensor in own.items():
                    total: Any = sum(one[key] for one in each if key in one)
                    tensor.copy_(torch.as_tensor(total / len(each)))
        return whole
