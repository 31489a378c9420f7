"""`Event`: something that went wrong in a training, to be marked in its picture."""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """Something that went wrong.

    Args:
        step: the number of the step.
        layer: the layer, ``""`` for the model itself.
        text: what it was, in a few words.
    """

    step: int
    layer: str
    text: str
