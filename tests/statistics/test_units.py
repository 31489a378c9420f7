"""Units: which channels or features are alive, and what merging makes of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from pytest_modelhealth.statistics import TensorStatistics, UnitStatistics, reduce


def units_of(statistics: TensorStatistics) -> UnitStatistics:
    """Return the units, which must be there."""
    assert statistics.units is not None
    return statistics.units


def test_channels_are_the_units_of_an_image() -> None:
    """With `unit_dim` 1 a channel is dead when its whole map is, over the whole batch."""
    images = torch.ones(2, 4, 3, 3)
    images[:, 1] = 0
    images[0, 2] = 0
    statistics = reduce(images.to(memory_format=torch.channels_last), 1)
    assert units_of(statistics).alive.tolist() == [True, False, True, True]
    assert units_of(statistics).observations == 2
    assert statistics.dead_fraction == 0.25


def test_tokens_are_samples_of_features_and_pixels_are_none_of_channels() -> None:
    """What lies before the units counts as samples, what lies behind belongs to one."""
    assert units_of(reduce(torch.ones(8, 5, 4), -1)).observations == 40
    assert units_of(reduce(torch.ones(8, 5, 4, 4), 1)).observations == 8
    assert units_of(reduce(torch.ones(5, 4, 4), 0)).observations == 1


def test_a_unit_alive_in_one_batch_is_alive() -> None:
    """Merging keeps the liveliest, the extremes of both, and adds up the observations."""
    first = reduce(torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 3.0]]), 1)
    second = reduce(torch.tensor([[0.0, 1.0, -4.0]]), -1)
    assert first.dead_fraction == pytest.approx(2 / 3)
    merged = units_of(first.merge(second))
    assert merged.alive.tolist() == [False, True, True]
    assert merged.minimum.tolist() == [0.0, 0.0, -4.0]
    assert merged.maximum.tolist() == [0.0, 1.0, 3.0]
    assert merged.observations == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_unit_that_is_not_finite_is_alive(bad: float) -> None:
    """A NaN or an infinity is an illness of its own, and neither hides nor makes a dead unit."""
    units = units_of(reduce(torch.tensor([[bad, 0.0, 1.0], [0.0, 0.0, 1.0]]), 1))
    assert units.alive.tolist() == [True, False, True]


def test_a_tensor_of_zeros_is_dead_throughout() -> None:
    """Where the largest magnitude is zero, no unit is alive."""
    assert reduce(torch.zeros(5, 3), 1).dead_fraction == 1.0


@pytest.mark.parametrize(("activation", "silent"), [(gelu, -5.5), (silu, -18.0)])
def test_smooth_activations_die_out_without_reaching_zero(
    activation: torch.nn.Module, silent: float
) -> None:
    """A GELU or SiLU unit far down its tail is dead, one at -3 is alive."""
    outputs = activation(torch.tensor([[silent, -3.0, 3.0]]))
    assert outputs[0, 0] != 0
    assert units_of(reduce(outputs, 1)).alive.tolist() == [False, True, True]


def test_complex_units_count_both_parts() -> None:
    """A complex unit is alive when its real or its imaginary part is."""
    units = units_of(reduce(torch.tensor([[0j, 1j, 1 + 0j]] * 2), -1))
    assert units.alive.tolist() == [False, True, True]
    assert units.observations == 2


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


@pytest.mark.parametrize("other", [torch.ones(2, 4), torch.ones(3)])
def test_units_of_different_numbers_do_not_merge(other: Tensor) -> None:
    """Units that cannot be the same are dropped, in whatever order they come; the rest merges."""
    first, second = reduce(torch.ones(2, 3), 1), reduce(other, 1 if other.ndim == 2 else None)
    assert first.merge(second).units is None
    assert second.merge(first).units is None
    assert first.merge(second).count == 6 + other.numel()
