"""Mergeable summaries of tensors: the numbers that every check, table and snapshot reads."""

from pytest_modelhealth.statistics.dense import UnsupportedTensorError, unseen
from pytest_modelhealth.statistics.ledger import Entries, Entry, Ledger, reduce
from pytest_modelhealth.statistics.tensor_statistics import (
    DEAD_RATIO,
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    ExponentCounts,
    Histogram,
    TensorStatistics,
    UnitStatistics,
)

__all__ = [
    "DEAD_RATIO",
    "HIGHEST_EXPONENT",
    "LOWEST_EXPONENT",
    "Entries",
    "Entry",
    "ExponentCounts",
    "Histogram",
    "Ledger",
    "TensorStatistics",
    "UnitStatistics",
    "UnsupportedTensorError",
    "reduce",
    "unseen",
]
