"""Ranks wait for each other in the store of their process group, before a collective could hang.

The store answers even where nobody else does. `torch.distributed.monitored_barrier` names a missing
rank on the first rank alone and closes the group for all: a rank that comes late is told nothing,
and the next inspection has no group.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report.ranks import named_ranks

_PAUSE = 0.001
"""Seconds between two looks of a rank that waits."""


class Barrier:
    """What ranks settle with each other before they go on.

    Each comes to the same barriers in the same order, and says in a key of its own where it is. A
    rank that fails between two says so at the next one.

    Args:
        store: the store of the default group, with a prefix of these ranks.
        ranks: who takes part.
        rank: who this is.
        seconds: how long to wait for the others.
        advice: what to do where a rank does not come, or comes from elsewhere.
    """

    def __init__(
        self, store: Any, ranks: Sequence[int], rank: int, seconds: float, advice: str = ""
    ) -> None:
        self._store, self._ranks, self._rank = store, tuple(ranks), rank
        self.seconds, self._advice = seconds, advice
        self.failed = False
        """Whether the last one ended in an error, which all ranks know of."""
        self._number = 0
        self._description = ""

    def wait(self, where: str, description: str = "") -> None:
        """Wait for all, and go on where all came with the same.

        Args:
            where: what all are before, for people: ``"the run"``.
            description: what must be equal, a line a thing: the first that differs is shown.

        Raises:
            InspectionError: a rank failed, did not come in time, or came with another value.
        """
        self.failed = True
        if description and description != self._description:  # often that of the run before
            self._store.set(f"text{self._rank}", description)
            self._description = description
        self._store.set(self._key(self._rank), json.dumps([where, digest(description), ""]))
        keys, end = [*map(self._key, self._ranks)], time.monotonic() + self.seconds
        while not self._store.check(keys) and time.monotonic() < end:
            time.sleep(_PAUSE)
        came = {rank: told for rank in self._ranks if (told := self._told(rank))}
        problem = self._problem(where, came)
        if len(came) < len(self._ranks):  # whoever comes late is told
            self._store.set(self._key(self._rank), json.dumps([where, "", problem]))
        self._number += 1
        if problem:
            raise InspectionError(problem)
        self.failed = False

    def fail(self, text: str) -> str:
        """Tell all others, at the barrier that comes next, that this rank cannot go on.

        Returns:
            what a rank said that failed before; empty where this is the first.
        """
        self.failed = True
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone with its keeper
            told = [self._told(rank) for rank in self._ranks]
            self._store.set(self._key(self._rank), json.dumps(["", "", text]))
            self._number += 1
            return next((error for *_, error in filter(None, told) if error), "")
        return ""

    def _key(self, rank: int) -> str:
        return f"{self._number}/{rank}"

    def _told(self, rank: int) -> list[str]:
        key = self._key(rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else []

    def _problem(self, where: str, came: dict[int, list[str]]) -> str:
        """Return why ranks cannot go on, the same on each; or nothing."""
        error = next((error for *_, error in came.values() if error), "")
        missing = [rank for rank in self._ranks if rank not in came]
        if error:
            return error
        if missing:
            return (
                f"{named_ranks(missing)} did not come within {self.seconds:.3g} s: "
                f"{named_ranks(came)} waited before {where}{self._advice}"
            )
        first = self._ranks[0]
        other = [rank for rank, told in came.items() if told != came[first]]
        if not other:
            return ""
        here, there = came[first][0], came[other[0]][0]
        if here != there:
            return (
                f"{named_ranks(other)} came to {there} while rank {first} was before {here}"
                f"{self._advice}"
            )
        keys = [f"text{rank}" for rank in (other[0], first)]
        texts = [self._store.get(key).decode() if self._store.check([key]) else "" for key in keys]
        lines = zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing")
        more = next((f": {a}; on rank {first}: {b}" for a, b in lines if a != b), "")
        return f"{named_ranks(other)} came to {where} with something else than rank {first}{more}"


def digest(text: str) -> str:
    """Return 16 hexadecimal digits that tell texts apart."""
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8).hexdigest()
