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
        samples: the samples that are enough to fail as the whole batch did, numbered from 0;
            ``None`` where none were looked for, or no fewer fail.
        of: how many samples the batch had.
        runs: how many inspections it took to find them.
        smallest: whether it is known that leaving out any one of them passes; else the search
            ended at its limit.
        twice: whether the one sample was given twice, as the model takes no batch of one.
    """

    bundle: str
    same: bool
    differences: tuple[str, ...] = ()
    samples: tuple[int, ...] | None = None
    of: int = 0
    runs: int = 0
    smallest: bool = False
    twice: bool = False
