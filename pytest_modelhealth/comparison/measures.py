"""How far two tensors are apart, element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 20  # elements that are brought to float64 at a time


@dataclass
class Difference:
    """What separates a tensor of the candidate from the reference's, element by element.

    Norms and errors are of the elements that are finite on both sides, computed in float64.
    """

    count: int  # number of elements
    unequal: int = 0  # how many are not equal; two NaNs are equal, and so are two equal infinities
    nan_reference: int = 0  # NaNs in the reference only
    nan_candidate: int = 0  # NaNs in the candidate only
    nan_both: int = 0  # NaNs on both sides
    other_infinities: int = 0  # elements that are infinite on one side, or with another sign
    max_abs: float = 0.0  # largest absolute error
    abs_max: float = 0.0  # largest magnitude in the reference
    error_squares: float = 0.0  # sum of the squared errors
    squares: float = 0.0  # sum of the reference's squares
    # index of the largest absolute error, or of the first element that is NaN or infinite on one
    # side only
    at: tuple[int, ...] | None = None
    expected: float = math.nan  # the reference's value there
    found: float = math.nan  # the candidate's value there

    @property
    def error_norm(self) -> float:
        """L2 norm of the error."""
        return math.sqrt(self.error_squares)

    @property
    def norm(self) -> float:
        """L2 norm of the reference."""
        return math.sqrt(self.squares)

    @property
    def nonfinite(self) -> int:
        """Elements that are NaN or infinite on one side only."""
        return self.nan_reference + self.nan_candidate + self.other_infinities

    @property
    def relative_l2(self) -> float:
        """L2 norm of the error by that of the reference."""
        if not self.error_norm:
            return 0.0
        return self.error_norm / self.norm if self.norm else math.inf


def measure(reference: Tensor, candidate: Tensor) -> Difference:
    """Return what separates two real, strided tensors of one shape."""
    sums = Difference(reference.numel())
    if reference.dtype == candidate.dtype and torch.equal(reference, candidate):
        return sums  # most are, and none is copied
    flat, other = reference.reshape(-1), candidate.reshape(-1)
    place = odd_place = None
    for start in range(0, flat.numel(), CHUNK):
        largest, odd = _add(sums, flat[start : start + CHUNK], other[start : start + CHUNK])
        place = start + largest if largest is not None else place
        odd_place = start + odd if odd is not None and odd_place is None else odd_place
    place = odd_place if odd_place is not None else place
    if place is not None:
        sums.at = tuple(map(int, np.unravel_index(place, reference.shape)))
        sums.expected, sums.found = float(flat[place]), float(other[place])
    return sums


def _add(sums: Difference, reference: Tensor, candidate: Tensor) -> tuple[int | None, int | None]:
    """Add the elements of a chunk; return where its error is the largest yet, or not finite."""
    a, b = reference.double(), candidate.double()
    error, odd = b - a, None
    if not math.isfinite(float(error @ error)):  # else all elements are finite
        nan_a, nan_b, same = a.isnan(), b.isnan(), a == b
        finite = a.isfinite() & b.isfinite()
        apart = ~(finite | same | (nan_a & nan_b))
        sums.nan_both += int((nan_a & nan_b).sum())
        sums.nan_reference += int((nan_a & ~nan_b).sum())
        sums.nan_candidate += int((nan_b & ~nan_a).sum())
        sums.other_infinities += int((apart & ~nan_a & ~nan_b).sum())
        sums.unequal += int(apart.sum())
        odd = int(apart.int().argmax()) if bool(apart.any()) else None
        a, error = (torch.where(finite, one, 0.0) for one in (a, error))
    sums.unequal += int(error.count_nonzero())
    sums.error_squares += float(error @ error)
    sums.squares += float(a @ a)
    error = error.abs_()
    largest = float(error.amax())
    place = int(error.argmax()) if largest > sums.max_abs else None
    sums.max_abs = max(sums.max_abs, largest)
    sums.abs_max = max(sums.abs_max, float(a.abs().max()))
    return place, odd
