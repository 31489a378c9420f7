"""Ranks wait for each other in the store of their process group, before a collective could hang.

The store answers even where nobody else does. `torch.distributed.monitored_barrier` names a missing
rank on the first rank alone and closes the group for all: a rank that comes late is told nothing,
and the next inspection has no group.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report.parts import named_ranks

_PAUSES = (0.0005, 0.02)  # seconds between two looks of a rank that waits, at first and later


class Barrier:
    """What ranks settle with each other before they go on.

    Each comes to the same barriers in the same order, and says in a key of its own where it is. A
    rank that fails between two says so at the next one. The store is that of the default group with
    a prefix of these ranks, the advice what to do where a rank does not come.
    """

    def __init__(
        self, store: Any, ranks: Sequence[int], rank: int, seconds: float, advice: str = ""
    ) -> None:
        self._store, self._ranks, self._rank = store, tuple(ranks), rank
        self.seconds, self._advice = seconds, advice
        self.failed = False  # whether the last one ended in an error, which all ranks know of
        self._number = 0

    def wait(self, where: str) -> None:
        """Wait for all, and go on where all came to the same.

        Raises:
            InspectionError: a rank failed, did not come in time, or came to something else.
        """
        self.failed = True
        self._say(where)
        keys, end = [*map(self._key, self._ranks)], time.monotonic() + self.seconds
        pause, longest = _PAUSES
        while not self._store.check(keys) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, longest)
        came = {rank: said for rank in self._ranks if (said := self._said(rank))}
        missing = [rank for rank in self._ranks if rank not in came]
        elsewhere = {rank: there for rank, (there, _) in came.items() if there != where}
        problem = next((error for _, error in came.values() if error), "")
        if missing and not problem:
            problem = (
                f"{named_ranks(missing)} did not come within {self.seconds:.3g} s: "
                f"{named_ranks(came)} waited before {where}{self._advice}"
            )
            self._say(where, problem)  # whoever comes late is told
        elif elsewhere and not problem:
            each = sorted({there: rank for rank, (there, _) in came.items()}.items())
            told = " while ".join(f"rank {rank} was before {there}" for there, rank in each)
            problem = f"{told}{self._advice}"
        self._number += 1
        if problem:
            raise InspectionError(problem)
        self.failed = False

    def fail(self, error: str) -> None:
        """Tell all others, at the barrier that comes next, that this rank cannot go on."""
        self.failed = True
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone with its keeper
            self._say("", error)
        self._number += 1

    def _key(self, rank: int) -> str:
        return f"{self._number}/{rank}"

    def _say(self, where: str, error: str = "") -> None:
        self._store.set(self._key(self._rank), json.dumps([where, error]))

    def _said(self, rank: int) -> list[str]:
        key = self._key(rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else []
