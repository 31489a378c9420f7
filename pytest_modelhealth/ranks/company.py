"""`Company`: the ranks that inspect one model together, and what they can ask of each other.

Objects go over a process group of our own, of gloo, made while all is well: the groups of the
model are never used, since a rank that failed may have left another of their collectives open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules, type_name
from pytest_modelhealth.ranks.layout import Place
from pytest_modelhealth.ranks.meeting import Meeting

T = TypeVar("T")


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
        self.kept: dict[Any, int] | None = None
        """Fingerprints that hold for all batches of a run; ``None`` outside of one."""
        self._channels: dict[tuple[int, ...], Any] = {}

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.ranks)

    def total(self, tensor: torch.Tensor, among: tuple[int, ...]) -> torch.Tensor:
        """Return the sum of a tensor of one dimension over some ranks, on the CPU."""
        whole = tensor.detach().to("cpu", copy=True)
        if len(among) > 1:
            dist.all_reduce(whole, dist.ReduceOp.SUM, group=self._channel(among))
        return whole

    def gather(self, value: T, among: tuple[int, ...] | None = None) -> list[T]:
        """Return a copy of the object of each rank, in order.

        Args:
            value: the object of this rank, which can be pickled.
            among: the ranks that take part; ``None`` is all of them.
        """
        ranks = self.ranks if among is None else among
        if len(ranks) == 1:
            return [value]
        found: list[Any] = [None] * len(ranks)
        dist.all_gather_object(found, value, group=self._channel(ranks))
        return found

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

    @property
    def is_closed(self) -> bool:
        """Whether its process group was destroyed."""
        known = dist.distributed_c10d._world.pg_map
        return any(channel not in known for channel in self._channels.values())

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


def _told(error: BaseException) -> str:
    """Return an error for people; of one that says nothing itself, what it was raised for."""
    text = (str(error).splitlines() or [""])[0].strip()[:500]
    if not text and error.__cause__ is not None:
        return _told(error.__cause__)
    return type(error).__name__ + (f": {text}" if text else "")


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Let no collective of gloo wait longer inside; each group has its own timeout again after it.

    Groups of NCCL keep theirs: it ends the process when that has passed.
    """
    limit = timedelta(seconds=max(1.0, seconds))
    changed: list[tuple[Any, timedelta]] = []
    try:
        for group in list(dist.distributed_c10d._world.pg_map):
            timeout = _timeout(group)
            if timeout is not None and timeout > limit:
                dist.distributed_c10d._set_pg_timeout(limit, group)
                changed.append((group, timeout))
        yield
    finally:
        for group, timeout in changed:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def _timeout(group: Any) -> timedelta | None:
    """Return the timeout of a group of gloo; ``None`` of any other."""
    if dist.get_backend(group) != "gloo":
        return None
    found = group._get_backend(torch.device("cpu")).options._timeout
    return found if isinstance(found, timedelta) else None


def is_of_waiting(error: BaseException) -> bool:
    """Whether an error is that of a collective which another rank did not come to, or left."""
    said = str(error)
    return isinstance(error, RuntimeError) and any(word in said for word in _SAID)


def layer_of(error: BaseException, model: nn.Module) -> str | None:
    """Return the name of the innermost layer that an error was raised in; ``None`` of none."""
    names: dict[object, str | None] = {
        named.module: named.name or type_name(named.module) for named in named_modules(model)
    }
    found = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code is nn.Module._call_impl.__code__:
            found = names.get(frame.f_locals.get("self"), found)
        trace = trace.tb_next
    return found


_SAID = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "gloo")
