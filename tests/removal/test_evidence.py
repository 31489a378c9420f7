"""What is kept of units while batches pass."""

import gc
import weakref

import pytest
import torch

from pytest_modelhealth.removal import evidence
from pytest_modelhealth.removal.evidence import UnitWatch, look
from pytest_modelhealth.removal.search import count, parted


@pytest.mark.parametrize("at_once", [100, 2**20])
@pytest.mark.parametrize(
    ("shape", "dimension"), [((7, 12), -1), ((3, 5, 12), -1), ((4, 12, 3, 5), -3), ((12, 6), -2)]
)
def test_units_are_where_the_dimension_says(shape, dimension, at_once, monkeypatch):
    """Zero and equal units are found by comparing each with each, read in parts too."""
    monkeypatch.setattr(evidence, "_AT_ONCE", at_once)
    torch.manual_seed(0)
    value = torch.randn(shape).movedim(dimension, 0).clone()
    value[3] = 0.0
    value[8] = value[2]
    value[11] = value[2]
    value[9] = value[5] * (1 + 2**-23)
    value[10] = -value[5]
    seen = look(value.movedim(0, dimension), dimension)
    assert seen.zero.nonzero().flatten().tolist() == [3]
    assert [*seen.twins()] == [(8, 2), (9, 5), (11, 2)]
    assert seen.samples == {2: 7, 3: 15, 4: 4}[len(shape)] if dimension != -2 else 1


def test_units_equal_in_one_batch_alone_are_no_twins():
    """Over all samples they have to be; merging is exact where the batches are."""
    torch.manual_seed(0)
    first, second = torch.randn(50, 6), torch.randn(50, 6)
    first[:, 4] = first[:, 1]
    first[:, 5] = first[:, 2]
    second[:, 5] = second[:, 2]
    first[:, 0] = 0.0
    merged = look(first, -1).merge(look(second, -1))
    assert [*look(first, -1).twins()] == [(4, 1), (5, 2)]
    assert merged.twins() == ((5, 2),)
    assert not merged.zero.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_two_of_many_random_units_are_taken_for_twins(dtype):
    """Four projections and the norm tell a thousand units apart, in half precision too."""
    torch.manual_seed(0)
    assert look(torch.randn(64, 1000).to(dtype), -1).twins() == ()


def test_no_tensor_is_held():
    """What a watch has seen is a number of each unit."""
    watch = UnitWatch({("relu", 0): -1})
    value = torch.randn(32, 8)
    alive = weakref.ref(value)
    watch.see("relu", "activations", "", value)
    del value
    gc.collect()
    assert alive() is None
    assert watch.seen["relu", 0].samples == 32


@pytest.mark.parametrize(
    ("total", "length", "expected"),
    [(10, 10, [8, 9]), (2, 2, [1]), (6, 6, [4, 5]), (10, 6, [5]), (4, 6, [3, 4, 5])],
)
def test_the_last_fifth_is_held_out(total, length, expected):
    """One at least, though there are fewer than the loader said, or more."""
    assert [b for b, is_held_out in parted(range(length), total) if is_held_out] == expected


def test_every_batch_comes_once():
    """Where nobody knows how many there are, too."""
    for length in range(1, 60):
        pairs = list(parted(iter(range(length)), 0))
        assert sorted(batch for batch, _ in pairs) == list(range(length))
        flags = [is_held_out for _, is_held_out in pairs]
        assert flags == sorted(flags)
        assert 1 <= sum(flags) <= 9


def test_a_length_that_raises_is_not_known():
    """A loader over a stream has none."""

    class Stream:
        def __len__(self):
            raise TypeError("streams have no length")

        def __iter__(self):
            return iter(())

    assert count(Stream(), None) == 0
    assert count([1, 2, 3], 2) == 2
