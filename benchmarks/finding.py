"""What a detector objects to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One objection.

    Args:
        layer: the layer that it names; ``""`` is the model itself.
        check: the check or function that raised it.
        text: its sentences, with the cause where one is given.
        warns: whether it only warns, and fails nothing.
    """

    layer: str
    check: str
    text: str
    warns: bool = False
