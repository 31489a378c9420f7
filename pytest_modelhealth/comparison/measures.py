"""How far two tensors are apart, in every measure that the field uses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Elements that are brought to float64 at a time."""


@dataclass(frozen=True)
class Difference:
    """What separates a tensor of the candidate from the reference's, element by element.

    Norms and errors are of the elements that are finite on both sides, computed in float64.

    Args:
        count: number of elements.
        unequal: how many are not equal; two NaNs are equal, and so are two equal infinities.
        nan_reference: NaNs in the reference only.
        nan_candidate: NaNs in the candidate only.
        nan_both: NaNs on both sides.
        other_infinities: elements that are infinite on one side, or with another sign.
        max_abs: largest absolute error.
        max_rel: largest error by the reference's magnitude, where that is not 0.
        error_norm: L2 norm of the error.
        norm: L2 norm of the reference.
        abs_max: largest magnitude in the reference.
        cosine: cosine of the angle between the two; NaN where one is zero.
        max_ulp: largest distance in units in the last place of the coarser dtype.
        at: index of the largest absolute error, or of the first element that is NaN or infinite on
            one side only.
        expected: the reference's value there.
        found: the candidate's value there.
    """

    count: int
    unequal: int = 0
    nan_reference: int = 0
    nan_candidate: int = 0
    nan_both: int = 0
    other_infinities: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    error_norm: float = 0.0
    norm: float = 0.0
    abs_max: float = 0.0
    cosine: float = 1.0
    max_ulp: float = 0.0
    at: tuple[int, ...] | None = None
    expected: float = math.nan
    found: float = math.nan

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

    @property
    def sqnr(self) -> float:
        """Signal to quantisation noise ratio in decibels; infinite where nothing differs."""
        relative = self.relative_l2
        if not relative:
            return math.inf
        return -20 * math.log10(relative) if math.isfinite(relative) else -math.inf


def equal_nans(reference: Tensor, candidate: Tensor) -> int | None:
    """Return how many NaNs two equal tensors share; ``None`` if they are not equal.

    This is the cheap test: tensors without a NaN are not copied.
    """
    if reference.dtype != candidate.dtype:
        return None
    if torch.equal(reference, candidate):
        return 0
    nan = reference.isnan()
    count = int(nan.sum())
    if not count or not bool(((reference == candidate) | (nan & candidate.isnan())).all()):
        return None
    return count


def measure(reference: Tensor, candidate: Tensor) -> Difference:
    """Return what separates two real, strided tensors of one shape."""
    sums = _Sums()
    flat, other = reference.reshape(-1), candidate.reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        sums.add(flat[start : start + CHUNK], other[start : start + CHUNK], start)
    place = sums.nonfinite_at if sums.nonfinite_at is not None else sums.at
    at = None if place is None else _index(place, tuple(reference.shape))
    lengths = math.sqrt(sums.squares * sums.other_squares)
    return Difference(
        count=flat.numel(),
        unequal=sums.unequal,
        nan_reference=sums.nan_reference,
        nan_candidate=sums.nan_candidate,
        nan_both=sums.nan_both,
        other_infinities=sums.other_infinities,
        max_abs=sums.max_abs,
        max_rel=sums.max_rel,
        error_norm=math.sqrt(sums.error_squares),
        norm=math.sqrt(sums.squares),
        abs_max=sums.abs_max,
        cosine=sums.products / lengths if lengths else math.nan,
        max_ulp=sums.max_ulp,
        at=at,
        expected=math.nan if place is None else float(flat[place]),
        found=math.nan if place is None else float(other[place]),
    )


SAFE = 1e-15, 1e15
"""Differences whose squares neither underflow nor overflow in float32."""


def gap(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the L2 norm and the largest magnitude of the difference, where both are finite.

    The difference of two float32 tensors is as good in float32, which is a third of the work.
    """
    narrow = {a.dtype, b.dtype} <= {torch.float32, torch.float64}
    if not narrow or not a.numel():
        return _wide_gap(a, b)
    error = a - b
    largest = float(torch.linalg.vector_norm(error, math.inf))
    if not largest:
        return 0.0, 0.0
    if not SAFE[0] < largest < SAFE[1]:  # or NaN
        return _wide_gap(a, b)
    return float(torch.linalg.vector_norm(error)), largest


def _wide_gap(a: Tensor, b: Tensor) -> tuple[float, float]:
    squares, largest = 0.0, 0.0
    flat, other = a.reshape(-1), b.reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        error = flat[start : start + CHUNK].double() - other[start : start + CHUNK].double()
        error = torch.where(error.isfinite(), error, 0.0)
        squares += float(error @ error)
        largest = max(largest, float(error.abs().max()))
    return math.sqrt(squares), largest


@dataclass
class _Sums:
    """What `measure` adds up over chunks."""

    unequal: int = 0
    nan_reference: int = 0
    nan_candidate: int = 0
    nan_both: int = 0
    other_infinities: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: float = 0.0
    abs_max: float = 0.0
    error_squares: float = 0.0
    squares: float = 0.0
    other_squares: float = 0.0
    products: float = 0.0
    at: int | None = None
    nonfinite_at: int | None = None

    def add(self, reference: Tensor, candidate: Tensor, start: int) -> None:
        a, b = reference.double(), candidate.double()
        error = b - a
        if math.isfinite(float(error @ error)):  # then so are all elements
            self.unequal += int(error.count_nonzero())
            self._add_finite(a, b, error, start, None)
            self.max_ulp = max(self.max_ulp, _max_ulp(reference, candidate))
            return
        self._count_nonfinite(a, b, start)
        finite = a.isfinite() & b.isfinite()
        places = finite.nonzero().squeeze(-1)
        if len(places):
            a, b = a[finite], b[finite]
            self._add_finite(a, b, b - a, start, places)
            self.max_ulp = max(self.max_ulp, _max_ulp(reference[finite], candidate[finite]))

    def _count_nonfinite(self, a: Tensor, b: Tensor, start: int) -> None:
        nan_a, nan_b = a.isnan(), b.isnan()
        same = (a == b) | (nan_a & nan_b)
        one_sided = ~same & ~(a.isfinite() & b.isfinite())
        self.unequal += int((~same).sum())
        self.nan_both += int((nan_a & nan_b).sum())
        self.nan_reference += int((nan_a & ~nan_b).sum())
        self.nan_candidate += int((nan_b & ~nan_a).sum())
        self.other_infinities += int((one_sided & ~nan_a & ~nan_b).sum())
        if self.nonfinite_at is None and bool(one_sided.any()):
            self.nonfinite_at = start + int(one_sided.int().argmax())

    def _add_finite(
        self, a: Tensor, b: Tensor, error: Tensor, start: int, places: Tensor | None
    ) -> None:
        self.error_squares += float(error @ error)
        self.squares += float(a @ a)
        self.other_squares += float(b @ b)
        self.products += float(a @ b)
        error = error.abs_()
        largest = float(error.amax())
        if largest > self.max_abs:
            where = int(error.argmax())
            self.max_abs = largest
            self.at = start + (where if places is None else int(places[where]))
        magnitude = a.abs()
        self.abs_max = max(self.abs_max, float(magnitude.max()))
        relative = torch.where(magnitude > 0, error.div_(magnitude), 0.0)
        self.max_rel = max(self.max_rel, float(relative.max()))


_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def _max_ulp(reference: Tensor, candidate: Tensor) -> float:
    """Return the largest number of representable values from one to the other."""
    dtype = coarser(reference.dtype, candidate.dtype)
    if dtype not in _INTEGERS:
        return math.nan
    a, b = _rank(reference.to(dtype)).long(), _rank(candidate.to(dtype)).long()
    if dtype is not torch.float64:
        return float((a - b).abs_().amax())
    rough = (a.double() - b.double()).abs()
    # a difference of int64 may overflow where it is large, and one of float64 is rounded there
    exact = (a - b).abs().double()
    return float(torch.where(rough < 2**60, exact, rough).max())


def _rank(values: Tensor) -> Tensor:
    """Number the representable values in ascending order; both zeros are 0."""
    bits = values.contiguous().view(_INTEGERS[values.dtype])
    lowest = torch.iinfo(_INTEGERS[values.dtype]).min
    return torch.where(bits < 0, lowest - bits, bits)


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the floating dtype with the larger machine epsilon."""
    if not a.is_floating_point:
        return b
    if not b.is_floating_point:
        return a
    return a if torch.finfo(a).eps >= torch.finfo(b).eps else b


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        index.append(place % size)
        place //= size
    return tuple(reversed(index))
