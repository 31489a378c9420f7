"""`Replayed`: how an inspection that was run again compares with the one that was saved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replayed:
    """An inspection was run again from a bundle; plain data.

    Args:
        bundle: the folder it was read from.
        same: whether verdict and numbers are those that were saved, bit for bit.
        differences: what is not, a phrase each, the verdict first; then what else is different
            here: versions, the machine.
    """

    bundle: str
    same: bool
    differences: tuple[str, ...] = ()
