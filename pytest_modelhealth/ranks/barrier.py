"""Ranks wait for each other in the store of their process group.

It answers even where nobody else does. `torch.distributed.monitored_barrier` names a missing rank
on the first rank alone and closes the group for all: a rank that comes late is told nothing, and
the next inspection has no group.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report.ranks import named_ranks

_PAUSES = (0.0002, 0.0005, 0.001, 0.002, 0.004)
"""Seconds between the first looks of a rank that waits; a store in a file looks each 10 ms."""

_LATE = (
    ". All ranks of the group must inspect the same batches, not under 'if rank == 0'; "
    "ranks=False inspects one rank alone. The setting rank_timeout waits longer, as far as the "
    "time limit of the test allows"
)
_ELSEWHERE = (
    ". All ranks must do the same in the same order, and run the same number of batches: a "
    "DistributedSampler with drop_last=True deals them out evenly"
)


class Barrier:
    """What ranks settle with each other before a collective could hang.

    Each comes to the same barriers in the same order. A rank that fails between two ends the next
    one for all. A barrier costs a rank a few short keys, removed at the next but one.

    Args:
        store: the store of the default group, with a prefix of these ranks.
        ranks: who takes part.
        rank: who this is.
        seconds: how long to wait for the others.
        advice: what to do where a rank does not come, and where it comes from elsewhere.
    """

    def __init__(
        self,
        store: Any,
        ranks: Sequence[int],
        rank: int,
        seconds: float,
        advice: tuple[str, str] = (_LATE, _ELSEWHERE),
    ) -> None:
        self._store, self._ranks, self._rank = store, tuple(ranks), rank
        self.seconds = seconds
        self.failed = False
        """Whether the last one ended in an error, which all ranks know of."""
        self._advice = advice
        self._number = 0
        self._described = ""

    def wait(self, where: str, description: str = "") -> None:
        """Wait for all, and go on where all came with the same.

        Args:
            where: what all are before, for people: ``"the run"``.
            description: what must be equal, a line a thing: the first that differs is shown.

        Raises:
            InspectionError: a rank failed, did not come in time, or came with another value.
        """
        self.failed = True
        try:
            if description and description != self._described:  # often that of the run before
                self._store.set(f"text{self._rank}", description)
                self._described = description
            self._store.set(self._key(f"rank{self._rank}"), f"{where}|{digest(description)}")
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
        """Tell all others, at the barrier that comes next, that this rank cannot go on.

        Returns:
            what all are told: the text of the rank that failed first.
        """
        self.failed = True
        try:
            return self._settle(text)
        except (RuntimeError, OSError):
            return text  # the store is gone, and with it whoever would read it
        finally:
            self._number += 1

    def _settle(self, verdict: str) -> str:
        return str(self._store.compare_set(self._key("verdict"), "", verdict).decode())

    def _waited(self) -> str:
        key = self._key("verdict")
        end = time.monotonic() + self.seconds
        for pause in _PAUSES:
            if self._store.check([key]):
                return str(self._store.get(key).decode())
            time.sleep(pause)
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(RuntimeError):  # Ctrl-C is heard between two waits
                self._store.wait([key], timedelta(seconds=min(1.0, max(0.01, left))))
            if self._store.check([key]):
                return str(self._store.get(key).decode())
        came = {rank: self._said(rank) for rank in self._ranks}
        places = sorted({said.partition("|")[0] for said in came.values() if said})
        return self._settle(
            f"{named_ranks(rank for rank, said in came.items() if not said)} did not come within "
            f"{self.seconds:.3g} s: {named_ranks(rank for rank, said in came.items() if said)} "
            f"waited before {' and '.join(places)}{self._advice[0]}"
        )

    def _said(self, rank: int) -> str:
        key = self._key(f"rank{rank}")
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _difference(self) -> str:
        """Return who came with another value, and the first line in which it differs; or nothing.

        The last rank to come asks, as all have said theirs.
        """
        first, *others = self._ranks
        here = self._said(first)
        came = {rank: said for rank in others if (said := self._said(rank)) != here}
        if not came:
            return ""
        where = here.partition("|")[0]
        elsewhere = sorted({said.partition("|")[0] for said in came.values()} - {where})
        if elsewhere:
            return (
                f"{named_ranks(came)} came to {' and '.join(elsewhere)} while rank {first} was "
                f"before {where}{self._advice[1]}"
            )
        keys = [f"text{rank}" for rank in (next(iter(came)), first)]
        texts = [self._store.get(key).decode() if self._store.check([key]) else "" for key in keys]
        lines = zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing")
        more = next((f": {a}; on rank {first}: {b}" for a, b in lines if a != b), "")
        return f"{named_ranks(came)} came to {where} with something else than rank {first}{more}"

    def _key(self, what: str) -> str:
        return f"{self._number}/{what}"

    def _forget(self) -> None:
        """Remove what this rank left two barriers ago, which all have read since."""
        own = ["count", "verdict"] if self._rank == self._ranks[0] else []
        with contextlib.suppress(RuntimeError, OSError, NotImplementedError):
            for what in (f"rank{self._rank}", *own) if self._number > 1 else ():
                self._store.delete_key(f"{self._number - 2}/{what}")


def digest(text: str) -> str:
    """Return 16 hexadecimal digits that tell texts apart."""
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()
