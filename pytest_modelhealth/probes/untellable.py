"""How a probe ends that judges nothing."""

from __future__ import annotations


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
