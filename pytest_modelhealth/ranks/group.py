"""`RankGroup`: the ranks that inspect one model together, and what they can ask of each other.

Objects go over a process group of our own, of gloo, made while all is well: the groups of the
model are never used, since a rank that failed may have left another of their collectives open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.capture.parallel.placements import summed
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.ranks.barrier import Barrier
from pytest_modelhealth.ranks.layout import Place

T = TypeVar("T")

_ADVICE = (
    ". All ranks must inspect the same batches in the same order, none under 'if rank == 0', and "
    "as many: a DistributedSampler with drop_last=True deals them out evenly. ranks=False inspects "
    "one rank alone; the setting rank_timeout waits longer"
)
_ECHOES = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "gloo")
"""What a collective raises to which another rank did not come, or which it left."""


class RankGroup:
    """Ranks that inspect one model together.

    Args:
        place: who takes part, and where this rank stands.
        store: a store of these ranks alone, for barriers.
        seconds: how long to wait for the others.
    """

    def __init__(self, place: Place, store: Any, seconds: float) -> None:
        self.place, self.ranks, self.rank = place, place.ranks, dist.get_rank()
        self.barrier = Barrier(store, place.ranks, self.rank, seconds, _ADVICE)
        self._groups: dict[tuple[int, ...], Any] = {}

    def open(self) -> None:
        """Make the process groups of these ranks; all do so at once, while all is well.

        Raises:
            InspectionError: torch has no gloo here.
        """
        if not dist.is_gloo_available():
            raise InspectionError(
                "this torch has no gloo, by which ranks put their reports together: "
                "ranks=False inspects one rank alone"
            )
        for ranks in (self.ranks, self.place.data):
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups[ranks] = dist.new_group(
                    list(ranks),
                    timeout=timedelta(seconds=max(1.0, self.barrier.seconds)),
                    backend="gloo",
                    use_local_synchronization=True,
                )

    def gather(self, value: T, ranks: tuple[int, ...] = ()) -> list[T]:
        """Return a copy of the object of each rank, or of some, in order."""
        ranks = ranks or self.ranks
        each: list[Any] = [None] * len(ranks)
        dist.all_gather_object(each, value, group=self._groups[ranks])
        return each

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Tell all others if this rank fails inside; what it raises is raised as it is.

        Args:
            what: what it is at, for people.

        Raises:
            InspectionError: it waited for a rank that had failed, or that did not come.
        """
        try:
            yield
        except BaseException as error:
            if self.barrier.failed:
                raise  # they know
            told = self.barrier.fail(
                f"rank {self.rank} of {len(self.ranks)} raised {_named(error)} in {what}; the "
                "others did not, and their inspection ends with it"
            )
            if told and any(echo in str(error) for echo in _ECHOES):
                raise InspectionError(told) from error
            raise

    def averaged(self, gradients: list[Held]) -> list[Held]:
        """Return gradients of parameters as a step of the user's would leave them on each rank.

        They are changed in place: a local backward pass made them, for the inspection alone. A
        parameter that a rank did not use counts as zeros there, where another rank used it. The
        engine of a `DTensor` has averaged it.

        Raises:
            InspectionError: a rank failed or did not come this far.
        """
        self.barrier.wait("its gradients are averaged")
        with torch.no_grad():
            whole = [(layer, name, summed(tensor)) for layer, name, tensor in gradients]
            own = {
                (layer.name, name, tensor.numel(), tensor.dtype): tensor
                for layer, name, tensor in whole
                if not hasattr(tensor, "device_mesh")
            }
            if len(self.place.data) > 1:
                each = self.gather([*own], self.place.data)
                for key in dict.fromkeys(key for keys in each for key in keys):
                    self._average(own.get(key), *key[2:])
        return whole

    def _average(self, gradient: Tensor | None, size: int, dtype: torch.dtype) -> None:
        wide = torch.float32 if dtype.itemsize < 4 else dtype  # sums of many ranks may overflow
        total = torch.zeros(size, dtype=wide)
        if gradient is not None:
            dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
            total += dense.detach().reshape(-1).to("cpu", wide)
        dist.all_reduce(total, group=self._groups[self.place.data])
        if gradient is not None:
            gradient.copy_((total / len(self.place.data)).reshape(gradient.shape))


def _named(error: BaseException) -> str:
    """Return an error for people; of one that says nothing itself, what it was raised for."""
    text = (str(error).splitlines() or [""])[0].strip()[:500]
    if not text and error.__cause__ is not None:
        return _named(error.__cause__)
    return type(error).__name__ + (f": {text}" if text else "")
