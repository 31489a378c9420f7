"""`RankGroup`: the ranks that inspect one model together, and what they can ask of each other.

Objects go over a process group of our own, of gloo, made while all is well: the groups of the
model are never used, since a rank that failed may have left another of their collectives open.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.capture.parallel.placements import summed
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules, type_name
from pytest_modelhealth.ranks.barrier import Barrier
from pytest_modelhealth.ranks.layout import Place

T = TypeVar("T")


class RankGroup:
    """Ranks that inspect one model together.

    Args:
        place: who takes part, and where this rank stands.
        store: a store of these ranks alone, for barriers.
        seconds: how long to wait for the others.
    """

    def __init__(self, place: Place, store: Any, seconds: float) -> None:
        self.place, self.ranks = place, place.ranks
        self.rank = dist.get_rank()
        self.barrier = Barrier(store, place.ranks, self.rank, seconds)
        self.kept: dict[Any, int] | None = None
        """Fingerprints that hold for all batches of a run; ``None`` outside of one."""
        self._groups: dict[tuple[int, ...], Any] = {}

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
        dist.all_gather_object(found, value, group=self._group(ranks))
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
            if self.barrier.failed:
                raise  # they know
            own = (
                f"rank {self.rank} of {len(self.ranks)} raised {_told(error)} in {what}; the "
                "others did not, and their inspection ends with it"
            )
            is_waiting = isinstance(error, RuntimeError) and any(s in str(error) for s in _SAID)
            layer = _layer_of(error, model) if is_waiting and model is not None else None
            if layer is not None:
                own = (
                    f"rank {self.rank} of {len(self.ranks)} waited in vain for another rank in "
                    f"{layer!r}, in {what}: {_told(error)}"
                )
            first = self.barrier.fail(own)
            if is_waiting and (first != own or layer is not None):
                raise InspectionError(first) from error
            raise

    def open(self) -> None:
        """Make the process groups of these ranks; all do so at once, while all is well.

        Raises:
            InspectionError: torch has no gloo here.
        """
        for among in (self.ranks, self.place.data, self.place.tensor):
            if len(among) > 1:
                self._group(among)

    @property
    def is_closed(self) -> bool:
        """Whether its process group was destroyed."""
        known = dist.distributed_c10d._world.pg_map
        return any(group not in known for group in self._groups.values())

    def _group(self, ranks: tuple[int, ...]) -> Any:
        if ranks not in self._groups:
            if not dist.is_gloo_available():
                raise InspectionError(
                    "this torch has no gloo, by which ranks put their reports together: "
                    "ranks=False inspects one rank alone"
                )
            self._groups[ranks] = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=max(1.0, self.barrier.seconds)),
                backend="gloo",
                use_local_synchronization=True,
            )
        return self._groups[ranks]

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
            ranks = self.place.data
            if len(ranks) > 1:
                each = self.gather([*own], ranks)
                for key in dict.fromkeys(key for some in each for key in some):
                    self._average(own.get(key), *key[2:])
        return whole

    def _average(self, gradient: Tensor | None, size: int, dtype: torch.dtype) -> None:
        wide = torch.float32 if dtype.itemsize < 4 else dtype  # sums of many ranks may overflow
        total = torch.zeros(size, dtype=wide)
        if gradient is not None:
            dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
            total += dense.detach().reshape(-1).to("cpu", wide)
        dist.all_reduce(total, group=self._group(self.place.data))
        if gradient is not None:
            gradient.copy_((total / len(self.place.data)).reshape(gradient.shape))


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
    set_timeout: Any = dist.distributed_c10d._set_pg_timeout
    changed = []
    try:
        for group in list(dist.distributed_c10d._world.pg_map):
            if dist.get_backend(group) != "gloo":
                continue
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            if timeout > limit:
                set_timeout(limit, group)
                changed.append(partial(set_timeout, timeout, group))
        yield
    finally:
        for put_back in changed:
            put_back()


def _layer_of(error: BaseException, model: nn.Module) -> str | None:
    """Return the name of the innermost layer that an error was raised in; ``None`` of none."""
    names: dict[object, str] = {
        n.module: n.name or type_name(n.module) for n in named_modules(model)
    }
    called = [
        names.get(frame.f_locals.get("self"))
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code is nn.Module._call_impl.__code__
    ]
    return next(filter(None, reversed(called)), None)


_SAID = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "gloo")
"""What a collective raises to which another rank did not come, or which it left."""
