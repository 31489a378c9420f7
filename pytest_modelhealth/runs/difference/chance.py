"""What differs between two runs by chance alone: another batch, other first weights, other masks.

Where no seed was set, every number moves from run to run. A tensor that was drawn anew has other
values of one distribution: its mean, deviation and zeros move no further than samples of its size
do. What is computed from it is not to be compared; what moved further was changed by somebody.
"""

from __future__ import annotations

import math

from pytest_modelhealth.snapshot.snapshot import TensorLine

DEVIATIONS = 6.0
"""So many standard errors apart two draws may be: by chance once in a billion, for normal ones."""

KURTOSIS = 5.0
"""Of what is drawn, at most: of a normal distribution it is 3, of a uniform one 1.8."""


TRAINED = 0.25
"""Weights that were trained apart are no samples of one distribution: by this part of their
deviation they may differ in any case."""


def is_another_draw(
    before: TensorLine, now: TensorLine, sizes: tuple[int, int], least: float = 0.0
) -> bool:
    """Whether two tensors may be two draws from one distribution.

    Args:
        before: one.
        now: the other.
        sizes: how many independent values either has: of a weight its elements, of a batch its
            samples.
        least: by this part of their deviation they may differ in any case.
    """
    if min(sizes) < 1 or (before.nan, before.inf) != (now.nan, now.inf):
        return False
    if not (before.std > 0 and now.std > 0):  # what is constant is not drawn
        return False
    spread = math.sqrt(before.std) * math.sqrt(now.std)
    step = max(DEVIATIONS * math.sqrt(1 / sizes[0] + 1 / sizes[1]), least)
    part = (before.zeros + now.zeros) / 2
    return (
        abs(now.mean - before.mean) <= step * spread
        and abs(math.log(now.std / before.std)) <= step * math.sqrt(KURTOSIS - 1) / 2
        and abs(now.zeros - before.zeros) <= step * math.sqrt(max(part * (1 - part), 0.0))
    )
