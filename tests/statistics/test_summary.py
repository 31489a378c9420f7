"""`TensorStatistics`: the numbers derived from what is kept, and what merging makes of two."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.functional import gelu, silu

from pytest_modelhealth.statistics import Ledger, UnitStatistics, reduce
from tests.statistics import oracle
from tests.statistics.tensors import tensors

doubles = tensors(torch.float64)

# ---- histograms and derived numbers --------------------------------------------------------------


@given(tensor=tensors())
def test_every_value_lies_inside_its_bin(tensor: Tensor) -> None:
    """Sorting the values into the edges by comparison alone gives the counts again.

    Edges are finite, strictly ascending, symmetric, and powers of two but for the ends.
    """
    counts, edges = reduce(tensor).histogram
    assert len(edges) == len(counts) + 1
    assert (counts.dtype, edges.dtype) == (np.int64, np.float64)
    assert (np.diff(edges) > 0).all()
    assert (edges == -edges[::-1]).all()
    assert np.isfinite(edges).all()
    assert all(math.frexp(edge)[0] == 0.5 for edge in edges[len(edges) // 2 : -1])
    found = np.zeros(len(counts), dtype=np.int64)
    for value in oracle.real_values(tensor):
        if math.isfinite(value):
            found[bin_of(value, edges.tolist())] += 1
    assert found.tolist() == counts.tolist()


def bin_of(value: float, edges: list[float]) -> int:
    """Return the only bin that holds `value`, by the rule in the docstring of `Histogram`."""
    middle = len(edges) // 2 - 1
    pairs = list(enumerate(pairwise(edges)))
    if value == 0:
        return middle
    if value < 0:
        holding = [i for i, (low, high) in pairs[:middle] if low < value <= high]
    else:
        holding = [i for i, (low, high) in pairs[middle + 1 :] if low <= value < high]
    if not holding and abs(value) == edges[-1] == math.ldexp(1 - 2.0**-53, 1024):
        return len(edges) - 2 if value > 0 else 0  # the outermost bins hold the largest number
    (only,) = holding
    return only


def test_a_histogram_is_read_from_left_to_right() -> None:
    """Negative bins, the zeros, then positive ones, each twice as wide as the one before.

    All that is too small for a normal float32 shares a bin, as does all too large for it; without
    finite values there is a bin for the zeros and nothing in it.
    """
    counts, edges = reduce(torch.tensor([-1.0, -0.75, 0.0, -0.0, 0.5, 1.0, 1.5])).histogram
    assert edges.tolist() == [-2.0, -1.0, -0.5, 0.5, 1.0, 2.0]
    assert counts.tolist() == [1, 1, 2, 1, 2]
    values = [5e-324, 1e-40, 2.0**-126, 3e38, 2.0**128, 1e300]
    counts, edges = reduce(torch.tensor(values, dtype=torch.float64)).histogram
    positive = len(counts) // 2 + 1
    assert counts[[positive, positive + 1, -2, -1]].tolist() == [2, 1, 1, 2]
    assert edges[[positive, positive + 1]].tolist() == [2.0**-1074, 2.0**-126]
    assert edges[[-2, -1]].tolist() == [2.0**128, np.finfo(np.float64).max]
    for nothing in ([], [math.nan, math.inf]):
        counts, edges = reduce(torch.tensor(nothing)).histogram
        assert (counts.tolist(), edges.tolist()) == ([0], [-1.0, 1.0])


def test_derived_numbers_follow_numpy() -> None:
    """Norm, RMS, largest magnitude and fractions are those of the finite values.

    Without any they are NaN rather than an invented zero; the norm of nothing is 0.
    """
    values = np.array([3.0, -4.0, 0.0, -0.0, np.nan, np.inf, -np.inf, -np.inf])
    statistics = reduce(torch.from_numpy(values))
    finite = values[np.isfinite(values)]
    assert statistics.norm == pytest.approx(np.linalg.norm(finite))
    assert statistics.rms == pytest.approx(np.sqrt(np.mean(finite**2)))
    assert (statistics.abs_max, statistics.zero_fraction) == (4.0, 2 / 8)
    assert (statistics.nan_count, statistics.inf_count, statistics.finite_count) == (1, 3, 4)
    assert (statistics.positive_inf_count, statistics.negative_inf_count) == (1, 2)
    assert statistics.nonfinite_count == 4
    ill = reduce(torch.tensor([math.nan, math.inf]))
    assert all(map(math.isnan, (ill.mean, ill.std, ill.rms, ill.min, ill.max, ill.abs_max)))
    assert (ill.norm, ill.zero_fraction) == (0.0, 0.0)
    assert math.isnan(reduce(torch.empty(0)).zero_fraction)


def test_one_line_shows_what_matters() -> None:
    """The repr is a line; what is not there is not mentioned."""
    values = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    assert repr(reduce(values)) == (
        "TensorStatistics(shape=(2, 2), dtype=float32, mean=1, std=1.225, "
        "min=0, max=3, zeros=50.0%)"
    )
    ill = reduce(torch.tensor([[0.0, math.nan, 1.0], [0.0, math.inf, 1.0]]), 1)
    assert repr(ill).endswith("zeros=33.3%, nan=1, inf=1, dead=33.3%)")


# ---- units ---------------------------------------------------------------------------------------


def units_of(tensor: Tensor, dim: int) -> UnitStatistics:
    """Return the units, which must be there."""
    units = reduce(tensor, dim).units
    assert units is not None
    return units


def test_channels_are_the_units_of_an_image_and_tokens_samples_of_features() -> None:
    """With `unit_dim` 1 a channel is dead when its whole map is, over the whole batch.

    What lies before the units counts as samples, what lies behind belongs to one.
    """
    images = torch.ones(2, 4, 3, 3)
    images[:, 1] = 0
    images[0, 2] = 0
    images = images.to(memory_format=torch.channels_last)
    assert units_of(images, 1).alive.tolist() == [True, False, True, True]
    assert units_of(images, 1).observations == 2
    assert reduce(images, 1).dead_fraction == 0.25
    assert reduce(torch.zeros(5, 3), 1).dead_fraction == 1.0
    assert units_of(torch.ones(8, 5, 4), -1).observations == 40
    assert units_of(torch.ones(5, 4, 4), 0).observations == 1


ALIVE: dict[str, Tensor] = {
    **{
        str(bad): torch.tensor([[0.0, bad, 1.0], [0.0, 0.0, 1.0]]) for bad in (torch.nan, torch.inf)
    },
    "complex": torch.tensor([[0j, 1j, 1 + 0j]] * 2),
    "gelu": gelu(torch.tensor([[-5.5, -3.0, 3.0]])),
    "silu": silu(torch.tensor([[-18.0, -3.0, 3.0]])),
}


@pytest.mark.parametrize("kind", ALIVE)
def test_a_unit_is_alive_that_is_ever_more_than_a_trace(kind: str) -> None:
    """Smooth activations die out without reaching zero; what is not finite is ill, not silent."""
    assert units_of(ALIVE[kind], 1).alive.tolist() == [False, True, True]


NO_UNITS = {
    "no dimension given": (torch.ones(2, 3), None),
    "no elements": (torch.ones(2, 0), 0),
    "sparse": (torch.ones(2, 3).to_sparse(), 1),
}


@pytest.mark.parametrize(("tensor", "dim"), NO_UNITS.values(), ids=NO_UNITS)
def test_without_units_there_is_no_dead_fraction(tensor: Tensor, dim: int | None) -> None:
    """`None` says that nobody knows, where 0 would say that all are alive."""
    statistics = reduce(tensor, dim)
    assert statistics.units is None
    assert statistics.dead_fraction is None


@pytest.mark.parametrize(("shape", "dim"), [((2, 3), 2), ((2, 3), -3), ((), 0)])
def test_a_dimension_that_does_not_exist_raises(shape: tuple[int, ...], dim: int) -> None:
    """A wrong dimension is the caller's fault and is not passed over."""
    with pytest.raises(IndexError):
        reduce(torch.ones(shape), dim)


def test_a_unit_alive_in_one_batch_is_alive() -> None:
    """Merging keeps the liveliest, the extremes of both, and adds up the observations.

    Units that cannot be the same are dropped, in whatever order they come; the rest merges.
    """
    first = reduce(torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 3.0]]), 1)
    assert first.dead_fraction == pytest.approx(2 / 3)
    merged = first.merge(reduce(torch.tensor([[0.0, 1.0, -4.0]]), -1)).units
    assert merged is not None
    assert merged.alive.tolist() == [False, True, True]
    assert merged.minimum.tolist() == [0.0, 0.0, -4.0]
    assert merged.maximum.tolist() == [0.0, 1.0, 3.0]
    assert merged.observations == 3
    for other in (reduce(torch.ones(2, 4), 1), reduce(torch.ones(3))):
        assert first.merge(other).units is None
        assert other.merge(first).units is None
        assert first.merge(other).count == 6 + other.count


# ---- merging -------------------------------------------------------------------------------------


@given(a=tensors(), b=tensors())
def test_merging_is_reducing_both_at_once(a: Tensor, b: Tensor) -> None:
    """Counts, extremes and histogram are exact, moments right to rounding, for any two dtypes."""
    values = oracle.real_values(a) + oracle.real_values(b)
    oracle.assert_describes(reduce(a).merge(reduce(b)), values)


@given(a=doubles, b=doubles, c=doubles)
def test_neither_order_nor_grouping_of_batches_matters(a: Tensor, b: Tensor, c: Tensor) -> None:
    """Merging commutes and is associative, but for rounding; of no values it keeps every bit."""
    first, second, third, nothing = reduce(a), reduce(b), reduce(c), reduce(torch.empty(0))
    left = first.merge(second).merge(third)
    for right in (first.merge(second.merge(third)), third.merge(second.merge(first))):
        assert oracle.counts(left) == oracle.counts(right)
        oracle.assert_moments(left, right.mean, right.std)
    assert oracle.bits(first.merge(nothing)) == oracle.bits(first)
    assert oracle.bits(nothing.merge(first))[:2] == oracle.bits(first)[:2]


def test_many_small_batches_keep_the_moments_of_all() -> None:
    """A thousand merges cost no more than a few roundings, and a constant stays one."""
    values = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) + 1000
    merged = reduce(values[0])
    for row in values[1:]:
        merged = merged.merge(reduce(row))
    exact = values.double().numpy()
    assert merged.mean == pytest.approx(exact.mean(), rel=1e-13)
    assert merged.std == pytest.approx(exact.std(), rel=1e-11)
    merged = reduce(torch.empty(0))
    for length in (3, 1, 10, 70_001):  # sums of this many tenths are not exact
        merged = merged.merge(reduce(torch.full((length,), 0.1, dtype=torch.float64)))
        assert (merged.mean, merged.std) == (0.1, 0.0)


LARGEST = 1.7976931348623157e308


def test_moments_neither_overflow_nor_vanish() -> None:
    """Sums and squares may leave float64 on the way, mean and deviation do not."""
    large = torch.tensor([-LARGEST, LARGEST] * 8, dtype=torch.float64)
    for statistics in (reduce(large), reduce(large[::2]).merge(reduce(large[1::2]))):
        assert statistics.mean == 0.0
        assert statistics.std == pytest.approx(LARGEST, rel=1e-15)
    assert reduce(large[1:2]).merge(reduce(large[1:2])).norm == math.inf
    small = torch.tensor([3e-200, 1e-200], dtype=torch.float64)
    for statistics in (reduce(small), reduce(small[:1]).merge(reduce(small[1:]))):
        assert statistics.std == pytest.approx(1e-200)
        assert statistics.norm == pytest.approx(math.hypot(3e-200, 1e-200))
    nothing = reduce(torch.empty(0)).merge(reduce(torch.empty(0)))
    assert nothing.count == 0
    assert math.isnan(nothing.mean)
    assert math.isnan(nothing.std)


def test_shape_dtype_and_device_are_those_of_the_first() -> None:
    """A merged summary names the tensor that came first."""
    merged = reduce(torch.ones(2, 3)).merge(reduce(torch.ones(5).half()))
    assert (merged.shape, merged.dtype, merged.device) == ((2, 3), "float32", "cpu")


# ---- the first value that is not finite ----------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2]
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_first_nonfinite_is_that_of_numpy(bad: float, dtype: torch.dtype) -> None:
    """`reduce` and `Ledger` agree with a search in float64, contiguous or not."""
    for index in ((0, 0, 0), (1, 2, 3), (4, 6, 8)):
        values = torch.randn(5, 7, 9).to(dtype)
        values[index] = values[4, 6, 8] = bad
        for tensor in (values, values.transpose(0, 2)):
            truth = tuple(np.argwhere(~np.isfinite(tensor.double().numpy()))[0].tolist())
            assert reduce(tensor).first_nonfinite == truth
            assert Ledger().add(tensor).statistics.first_nonfinite == truth
            together = Ledger().add_many([torch.ones(3), tensor])[1]
            assert together is None or together.statistics.first_nonfinite == truth


def test_the_first_nonfinite_of_several_tensors_is_that_of_the_first_with_one() -> None:
    """In the order of the merge; a scalar has an index without dimensions.

    What follows the first NaN is NaN throughout, and costs no second pass for ever.
    """
    good, bad = reduce(torch.zeros(4)), reduce(torch.tensor([0.0, 0.0, torch.nan, 0.0]))
    worse = reduce(torch.tensor([torch.nan] * 4))
    assert good.first_nonfinite is None
    assert reduce(torch.tensor(torch.nan)).first_nonfinite == ()
    assert good.merge(bad).merge(worse).first_nonfinite == (2,)
    assert worse.merge(bad).first_nonfinite == (0,)
    ledger, ill = Ledger(), torch.tensor([1.0, torch.nan])
    found = [ledger.add(ill).statistics.first_nonfinite for _ in range(65)]
    assert found == [(1,)] * 64 + [None]
