"""Ranks meet in the store of their process group, which answers even where nobody else does.

`torch.distributed.monitored_barrier` names a missing rank on the first rank alone and closes the
group for all: a rank that comes late is told nothing, and the next inspection has no group.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report.ranks import named_ranks

SLICE = timedelta(seconds=1)
"""The longest wait in one piece: Ctrl-C is heard between two."""

_PAUSES = (0.0002, 0.0005, 0.001, 0.002, 0.004)
"""Seconds between the first looks of a rank that waits, before it has the store wait."""


class Meeting:
    """What ranks settle with each other before a collective could hang.

    Each takes part in the same meetings in the same order. A rank that fails between two ends the
    next one for all. A meeting costs a rank a few short keys, removed at the next but one.

    Args:
        store: the store of the default group, with a prefix of this company.
        ranks: who takes part.
        rank: who this is.
        seconds: how long to wait for the others.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, seconds: float) -> None:
        self._store, self._ranks, self._rank = store, tuple(ranks), rank
        self.seconds = seconds
        self.failed = False
        """Whether the last meeting ended in an error, which all ranks know of."""
        self._number = 0
        self._described = ""

    def agree(self, where: str, description: str = "") -> None:
        """Wait for all, and go on where all came with the same.

        Args:
            where: what this meeting is before, for people: ``"the run"``.
            description: what must be equal, a line a thing: the first that differs is shown.

        Raises:
            InspectionError: a rank failed, did not come in time, or came with another value.
        """
        self.failed = True
        try:
            value = digest(description)
            if description and value != self._described:  # most often it is that of the run before
                self._store.set(f"text{self._rank}", description)
                self._described = value
            self._store.set(self._key(f"rank{self._rank}"), f"{where}|{value}")
            is_last = self._store.add(self._key("count"), 1) == len(self._ranks)
            verdict = self._settle(self._difference() or "go") if is_last else self._waited()
        except (RuntimeError, OSError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise InspectionError(
                f"rank {self._rank} could not reach the other ranks before {where}: their process "
                f"group was destroyed, or the rank that keeps its store ended ({said})"
            ) from error
        finally:
            self._forget()
            self._number += 1
        if verdict != "go":
            raise InspectionError(verdict)
        self.failed = False

    def fail(self, text: str) -> str:
        """Tell all others, in the meeting that comes next, that this rank cannot go on.

        Returns:
            what all are told: the text of the rank that failed first.
        """
        self.failed = True
        try:
            return self._settle(text)
        except (RuntimeError, OSError):
            return text  # the group is gone, and what this rank raises says more
        finally:
            self._number += 1

    def _settle(self, verdict: str) -> str:
        return str(self._store.compare_set(self._key("verdict"), "", verdict).decode())

    def _waited(self) -> str:
        key = self._key("verdict")
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            if _is_soon_there(self._store, key) or _wait(self._store, key, end):
                return str(self._store.get(key).decode())
        return self._settle(self._missing())

    def _missing(self) -> str:
        """Return who did not come, and where the others wait."""
        came = {rank: self._said(rank) for rank in self._ranks}
        missing = [rank for rank, said in came.items() if said is None]
        places = sorted({said.partition("|")[0] for said in came.values() if said is not None})
        waiting = [rank for rank, said in came.items() if said is not None]
        return (
            f"{named_ranks(missing)} did not come within {self.seconds:.3g} s: "
            f"{named_ranks(waiting)} waited before {' and '.join(places)}. "
            "All ranks of the group must inspect the same batches, not under 'if rank == 0'; "
            "ranks=False inspects one rank alone. The setting rank_timeout waits longer, as far as "
            "the time limit of the test allows"
        )

    def _said(self, rank: int) -> str | None:
        key = self._key(f"rank{rank}")
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _difference(self) -> str:
        """Return who came with another value, and the first line in which it differs; or nothing.

        The last rank to come asks, as all have said theirs.
        """
        first, *others = self._ranks
        here = self._said(first) or ""
        came = {rank: said for rank in others if (said := self._said(rank)) != here}
        if not came:
            return ""
        where = here.partition("|")[0]
        odd = named_ranks(came)
        elsewhere = sorted({(said or "").partition("|")[0] for said in came.values()} - {where})
        if elsewhere:
            return (
                f"{odd} came to {' and '.join(elsewhere)} while rank {first} was "
                f"before {where}. All ranks must do the same in the same order, and run the same "
                "number of batches: a DistributedSampler with drop_last=True deals them out evenly"
            )
        keys = [f"text{rank}" for rank in (next(iter(came)), first)]
        more = ""
        if self._store.check(keys):
            theirs, ours = (self._store.get(key).decode() for key in keys)
            more = first_difference(theirs, ours, first)
        return f"{odd} came to {where} with something else than rank {first}{more}"

    def _key(self, what: str, number: int | None = None) -> str:
        return f"{self._number if number is None else number}/{what}"

    def _forget(self) -> None:
        """Remove what this rank left two meetings ago, which all have read since."""
        past = self._number - 2
        keys = [f"rank{self._rank}"]
        if self._rank == self._ranks[0]:
            keys += ["count", "verdict"]
        try:
            for key in keys if past >= 0 else ():
                self._store.delete_key(self._key(key, past))
        except (RuntimeError, OSError, NotImplementedError):
            return  # a store that keeps them holds some bytes more


def _is_soon_there(store: Any, key: str) -> bool:
    """Return whether a key is there within some milliseconds; a store in a file looks each 10."""
    for pause in _PAUSES:
        if store.check([key]):
            return True
        time.sleep(pause)
    return False


def _wait(store: Any, key: str, end: float) -> bool:
    """Return whether a key is there, after a second at most."""
    left = timedelta(seconds=max(0.01, end - time.monotonic()))
    try:
        store.wait([key], min(SLICE, left))
    except RuntimeError:
        return bool(store.check([key]))
    return True


def first_difference(own: str, reference: str, first: int) -> str:
    """Return ``": 'a: Linear', on rank 0 'a: Conv2d'"``, of the first line that differs."""
    ours, theirs = own.splitlines(), reference.splitlines()
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f": {mine}; on rank {first}: {other}"
    longer = ours if len(ours) > len(theirs) else theirs
    line = longer[min(len(ours), len(theirs))] if len(ours) != len(theirs) else ""
    where = "here alone" if longer is ours else f"on rank {first} alone"
    return f": {line}, {where}" if line else ""


def digest(text: str) -> str:
    """Return 16 hexadecimal digits that tell texts apart."""
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()
