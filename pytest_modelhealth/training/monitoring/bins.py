"""Histograms on one fixed scale, so that those of all steps and layers can be put side by side."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.statistics import TensorStatistics

Fractions = npt.NDArray[np.float16]

BINNED = ("activations", "gradients")
"""The roles of which histograms are kept."""

LOWEST, HIGHEST, WIDTH = -32, 8, 2
"""Powers of two: where the first bin of a sign begins, where the last one ends, how wide one is."""

_A_SIGN = (HIGHEST - LOWEST) // WIDTH

BINS = 2 * _A_SIGN + 1
"""Bins of negative values, a bin of zeros, bins of positive values."""

EDGES = np.ldexp(1.0, np.arange(LOWEST, HIGHEST + 1, WIDTH))
"""Edges of the bins of positive values; the first and the last bin also take what is beyond."""


def binned(seen: TensorStatistics) -> Fractions:
    """Return which part of the finite values is in each bin, in ascending order of value.

    NaN where there is no finite value.
    """
    counts = seen.exponents.counts
    exponents = seen.exponents.lowest + np.arange(len(counts))
    places = np.clip((exponents - LOWEST) // WIDTH, 0, _A_SIGN - 1)
    both = np.zeros((_A_SIGN, 2))
    np.add.at(both, places, counts)
    every = np.concatenate([both[::-1, 0], [seen.zero_count], both[:, 1]])
    total = every.sum()
    return (every / total if total else np.full(BINS, np.nan)).astype(np.float16)
