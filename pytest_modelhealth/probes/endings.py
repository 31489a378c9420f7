"""How a probe ends: with what it found, or by raising why it judges nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_modelhealth.report import Parting


class Found(NamedTuple):
    """What a probe found.

    Args:
        changed: what was changed, for people.
        partings: where runs part that should not, in execution order.
        notes: what else a reader should know.
    """

    changed: str
    partings: Sequence[Parting] = ()
    notes: tuple[str, ...] = ()


class UntellableError(Exception):
    """Nothing can be told.

    Args:
        reason: why, and what is needed.
        changed: what was changed, where a run followed; ``""`` where none did.
        notes: what else a reader should know.
    """

    def __init__(self, reason: str, changed: str = "", notes: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.changed, self.notes = changed, notes


class NotApplicableError(UntellableError):
    """There is nothing to judge in this model or batch."""
