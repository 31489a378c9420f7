"""What goes into a kernel and what comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pytest_modelhealth.statistics.exponents import ExponentCounts
from pytest_modelhealth.statistics.moments import Moments

KERNEL_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32}
    | {torch.int16, torch.int8, torch.uint8, torch.bool}
)
"""The dtypes that every kernel reads; all others are converted to one of them before."""


Extremes = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""The least and the greatest value of each unit."""


@dataclass(slots=True)
class KernelResult:
    """What a kernel finds in one tensor; the fields are those of `TensorStatistics`."""

    nan_count: int = 0
    positive_inf_count: int = 0
    negative_inf_count: int = 0
    zero_count: int = 0
    moments: Moments = field(default_factory=Moments)
    min: float = math.nan
    max: float = math.nan
    exponents: ExponentCounts = field(default_factory=ExponentCounts)
    histogram_sampled: bool = False
