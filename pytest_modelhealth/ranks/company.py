"""`Company`: the ranks that inspect one model together, and what they can ask of each other.

Numbers go over a process group of our own, of gloo, made while all is well: the groups of the
model are never used, since a rank that failed may have left another of their collectives open.
All is computed on the CPU. What a reduction returns is the same on every rank, to the last bit.
"""

from __future__ import annotations

import copy
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
from torch import nn

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.ranks.meeting import Meeting
from pytest_modelhealth.ranks.patience import is_of_waiting, layer_of
from pytest_modelhealth.report.ranks import Dimension, Group

_SMALLEST_SLOT = 2048
"""Bytes that each rank gives to a gather, at least."""

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
        self.kept: dict[Any, int] | None = None
        """Fingerprints that hold for all batches of a run; ``None`` outside of one."""
        self._channels: dict[tuple[int, ...], Any] = {}
        self._slots: dict[tuple[int, ...], int] = {}

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

    def reduce_all(self, tensors: Sequence[torch.Tensor], by: Sequence[Any]) -> None:
        """Reduce tensors of one dimension in place, over all ranks and at once.

        Args:
            tensors: of the CPU, of the same sizes on every rank.
            by: the operation of each.
        """
        if self.size == 1:
            return
        channel = self._channel(self.ranks)
        works = []
        for tensor, operation in zip(tensors, by, strict=True):
            if tensor.numel():
                self.sent += tensor.nbytes
                works.append(dist.all_reduce(tensor, operation, group=channel, async_op=True))
        for work in works:
            work.wait()

    def gather(self, value: Any, among: tuple[int, ...] | None = None) -> list[Any]:
        """Return the object of each rank, in order. Only for few and small ones.

        One message carries objects that are not much larger than those before.
        """
        ranks = self.ranks if among is None else among
        if len(ranks) == 1:
            return [value]
        text = pickle.dumps(value)
        self.sent += len(text)
        slot = self._slots.get(ranks, _SMALLEST_SLOT)
        table = self._gathered(text, slot, ranks)
        sizes = table[:, :8].copy().view(np.int64)[:, 0]
        longest = int(sizes.max()) + 8
        if longest > slot:
            self._slots[ranks] = 1 << (longest - 1).bit_length()
            table = self._gathered(text, self._slots[ranks], ranks)
        return [
            value if rank == self.rank else pickle.loads(row[8 : 8 + size].tobytes())
            for rank, row, size in zip(ranks, table, sizes.tolist(), strict=True)
        ]

    def _gathered(self, text: bytes, slot: int, ranks: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return the length and the first bytes of what each rank has to say, a row a rank."""
        own = np.zeros(slot, dtype=np.uint8)
        own[:8] = np.array([len(text)], dtype=np.int64).view(np.uint8)
        some = text[: slot - 8]
        own[8 : 8 + len(some)] = np.frombuffer(some, dtype=np.uint8)
        whole = torch.empty((len(ranks), slot), dtype=torch.uint8)
        dist.all_gather(list(whole), torch.from_numpy(own), group=self._channel(ranks))
        table: npt.NDArray[np.uint8] = whole.numpy()
        return table

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
        return self.each(value, self.gather(digest, among), among)

    def each(
        self, value: Any, digests: Sequence[str], among: tuple[int, ...] | None = None
    ) -> list[tuple[tuple[int, ...], Any]]:
        """Return the same as `distinct`, where the digests of all ranks are known already."""
        ranks = self.ranks if among is None else among
        having: dict[str, list[int]] = {}
        for rank, one in zip(ranks, digests, strict=True):
            having.setdefault(one, []).append(rank)
        if len(having) == 1:
            return [(tuple(ranks), value)]
        return [(tuple(same), self._sent_by(same[0], value, ranks)) for same in having.values()]

    @contextmanager
    def telling(self, what: str, model: nn.Module | None = None) -> Iterator[None]:
        """Tell all others if this rank fails inside; what it raises is raised as it is.

        Args:
            what: what it is at, for people.
            model: what runs inside: whoever waits there in vain is told in which layer.

        Raises:
            InspectionError: it waited for a rank that had failed, or that did not come.
        """
        try:
            yield
        except BaseException as error:
            if self.meeting.failed:
                raise  # they know
            own = (
                f"rank {self.rank} of {self.size} raised {_told(error)} in {what}; the others did "
                "not, and their inspection ends with it"
            )
            is_waiting = is_of_waiting(error)
            layer = layer_of(error, model) if is_waiting and model is not None else None
            if layer is not None:
                own = (
                    f"rank {self.rank} of {self.size} waited in vain for another rank in {layer!r}"
                    f", in {what}: {_told(error)}"
                )
            first = self.meeting.fail(own)
            if is_waiting and (first != own or layer is not None):
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

    def among(self, ranks: tuple[int, ...]) -> Company:
        """Return those of the ranks, this one among them, that put something together first."""
        some = copy.copy(self)
        some.ranks, some.groups = ranks, ()
        return some

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


def _told(error: BaseException) -> str:
    """Return an error for people; of one that says nothing itself, what it was raised for."""
    text = (str(error).splitlines() or [""])[0].strip()[:500]
    if not text and error.__cause__ is not None:
        return _told(error.__cause__)
    return type(error).__name__ + (f": {text}" if text else "")


def digest(text: str) -> str:
    """Return 16 hexadecimal digits that tell texts apart."""
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()
