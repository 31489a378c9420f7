"""`Company`: the ranks that inspect one model together, and what they can ask of each other.

Numbers go over a process group of our own, of gloo, made while all is well: the groups of the
model are never used, since a rank that failed may have left another of their collectives open.
All is computed on the CPU. What a reduction returns is the same on every rank, to the last bit.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.ranks.meeting import Meeting
from pytest_modelhealth.ranks.patience import is_of_waiting
from pytest_modelhealth.report.ranks import Dimension, Group

T = TypeVar("T", bound=np.generic)
Array = npt.NDArray[T]


@dataclass(frozen=True)
class Place:
    """Where this rank stands among the ranks of a model.

    Args:
        data: the ranks that hold the same part of the model and see other samples, in order.
        tensor: the ranks that see the same samples and hold other parts of its tensors, in order.
        engine: what distributes the model, for people.
    """

    data: tuple[int, ...]
    tensor: tuple[int, ...]
    engine: str = ""


class Company:
    """Ranks that inspect one model together.

    Args:
        ranks: who takes part, in order; this process is one of them.
        store: a store of these ranks alone, for meetings.
        seconds: how long to wait for the others.
        place: where this rank stands.
    """

    def __init__(self, ranks: Sequence[int], store: Any, seconds: float, place: Place) -> None:
        self.ranks = tuple(ranks)
        self.rank = dist.get_rank()
        self.place = place
        self.meeting = Meeting(store, ranks, self.rank, seconds)
        self.groups: tuple[Group, ...] = ()
        self.sent = 0
        """Bytes that this rank gave to reductions and gathers so far."""
        self._channels: dict[tuple[int, ...], Any] = {}

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.ranks)

    def sum(self, values: Array[T], among: tuple[int, ...] | None = None) -> Array[T]:
        """Return the sum over ranks, element by element.

        Args:
            values: int64 or float64, of the same shape on every rank.
            among: the ranks that take part; ``None`` is all of them.
        """
        return self._reduced(values, dist.ReduceOp.SUM, among)

    def smallest(self, values: Array[T], among: tuple[int, ...] | None = None) -> Array[T]:
        """Return the smallest over ranks, element by element; as `sum`."""
        return self._reduced(values, dist.ReduceOp.MIN, among)

    def largest(self, values: Array[T], among: tuple[int, ...] | None = None) -> Array[T]:
        """Return the largest over ranks, element by element; as `sum`."""
        return self._reduced(values, dist.ReduceOp.MAX, among)

    def either(self, bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the bits that are set on some rank."""
        return self._reduced(bits, dist.ReduceOp.BOR, None)

    def total(self, tensor: torch.Tensor, among: tuple[int, ...]) -> torch.Tensor:
        """Return the sum of a tensor of one dimension over some ranks, on the CPU."""
        whole = tensor.detach().to("cpu", copy=True)
        self.sent += whole.nbytes
        if len(among) > 1:
            dist.all_reduce(whole, dist.ReduceOp.SUM, group=self._channel(among))
        return whole

    def gather(self, value: Any, among: tuple[int, ...] | None = None) -> list[Any]:
        """Return the object of each rank, in order. Only for few and small ones."""
        ranks = self.ranks if among is None else among
        if len(ranks) == 1:
            return [value]
        found: list[Any] = [None] * len(ranks)
        self.sent += len(pickle.dumps(value))
        dist.all_gather_object(found, value, group=self._channel(ranks))
        return found

    def first(self, value: Any) -> Any:
        """Return the object that the first rank has."""
        return value if self.size == 1 else self._sent_by(self.ranks[0], value, self.ranks)

    def distinct(
        self, value: Any, digest: str, among: tuple[int, ...] | None = None
    ) -> list[tuple[tuple[int, ...], Any]]:
        """Return each different object of the ranks once, with the ranks that have it.

        Where all are equal no object is sent. The order is that of their first ranks.

        Args:
            value: the object; equal ones have an equal digest.
            digest: `digest` of something that tells objects apart.
            among: the ranks that take part; ``None`` is all of them.
        """
        ranks = self.ranks if among is None else among
        mine = np.zeros(len(ranks), dtype=np.int64)
        mine[ranks.index(self.rank)] = np.int64(int(digest[:15], 16))
        having: dict[int, list[int]] = {}
        for rank, number in zip(ranks, self.sum(mine, among).tolist(), strict=True):
            having.setdefault(number, []).append(rank)
        if len(having) == 1:
            return [(tuple(ranks), value)]
        return [(tuple(same), self._sent_by(same[0], value, ranks)) for same in having.values()]

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Tell all others if this rank fails inside; what it raises is raised as it is.

        Raises:
            InspectionError: it waited for a rank that had failed.
        """
        try:
            yield
        except BaseException as error:
            if self.meeting.failed:
                raise  # they know
            text = (str(error).splitlines() or [""])[0][:500]
            said = type(error).__name__ + (f": {text}" if text else "")
            own = (
                f"rank {self.rank} of {self.size} raised {said} in {what}; the others did not, "
                "and their inspection ends with it"
            )
            first = self.meeting.fail(own)
            if first != own and is_of_waiting(error):
                raise InspectionError(first) from error
            raise

    def open(self) -> None:
        """Make the process group of these ranks; all do so at once, while all is well.

        Raises:
            InspectionError: torch has no gloo here.
        """
        if self._channels:
            return
        self._channel(self.ranks)
        for among in (self.place.data, self.place.tensor):
            if 1 < len(among) < self.size:
                self._channel(among)
        self.groups = self._all_groups()

    @property
    def is_closed(self) -> bool:
        """Whether its process group was destroyed."""
        known = dist.distributed_c10d._world.pg_map
        return any(channel not in known for channel in self._channels.values())

    def _all_groups(self) -> tuple[Group, ...]:
        """Return who shares what out among all ranks."""
        found: list[Group] = []
        dimensions: tuple[tuple[Dimension, tuple[int, ...]], ...] = (
            ("data", self.place.data),
            ("tensor", self.place.tensor),
        )
        for dimension, mine in dimensions:
            groups = tuple(group for _, group in self.distinct(mine, digest(repr(mine))))
            if any(len(group) > 1 for group in groups):
                found.append(Group(dimension, groups))
        return tuple(found)

    def _channel(self, ranks: tuple[int, ...]) -> Any:
        if ranks not in self._channels:
            if not dist.is_gloo_available():
                raise InspectionError(
                    "this torch has no gloo, by which ranks put their reports together: "
                    "ranks=False inspects one rank alone"
                )
            self._channels[ranks] = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=max(1.0, self.meeting.seconds)),
                backend="gloo",
                use_local_synchronization=True,
            )
        return self._channels[ranks]

    def _reduced(self, values: Array[T], by: Any, among: tuple[int, ...] | None) -> Array[T]:
        ranks = self.ranks if among is None else among
        if len(ranks) == 1 or not values.size:
            return values.copy()
        whole = torch.from_numpy(np.ascontiguousarray(values).copy())
        self.sent += whole.nbytes
        dist.all_reduce(whole, by, group=self._channel(ranks))
        result: Array[T] = whole.numpy()
        return result

    def _sent_by(self, source: int, value: Any, ranks: tuple[int, ...]) -> Any:
        box = [value if self.rank == source else None]
        if self.rank == source:
            self.sent += len(pickle.dumps(value))
        dist.broadcast_object_list(box, src=source, group=self._channel(ranks))
        return box[0]


def digest(text: str) -> str:
    """Return 16 hexadecimal digits that tell texts apart."""
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()
