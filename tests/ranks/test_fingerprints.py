"""Numbers that tell tensors apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pytest_modelhealth.ranks.evidence import _summed, fingerprint

VALUES = torch.arange(1.0, 25.0).reshape(4, 6)


@pytest.mark.parametrize(
    "other",
    [
        VALUES.flip(0),
        VALUES.reshape(6, 4),
        VALUES.double(),
        VALUES.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(24.000002)),
        VALUES.t(),
        -VALUES,
    ],
    ids=["order", "shape", "dtype", "last bit", "strides", "sign"],
)
def test_other_tensors_have_other_numbers(other: Tensor) -> None:
    """Order, shape and dtype count as much as the values."""
    assert fingerprint(other) != fingerprint(VALUES)


@pytest.mark.parametrize(
    "same",
    [VALUES.clone(), VALUES.t().contiguous().t(), torch.nn.Parameter(VALUES.clone())],
    ids=["copy", "strides", "parameter"],
)
def test_equal_tensors_have_equal_numbers(same: Tensor) -> None:
    """Whatever memory and graph they have."""
    assert fingerprint(same) == fingerprint(VALUES)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.empty(3, device="meta"),
        torch.tensor(float("nan")),
    ],
    ids=["empty", "complex", "bool", "bfloat16", "meta", "nan"],
)
def test_any_tensor_has_one(tensor: Tensor) -> None:
    """The same one twice."""
    assert fingerprint(tensor) == fingerprint(tensor.clone())


def test_sums_of_other_devices_tell_places_apart() -> None:
    """Moving, swapping or changing one byte of many changes the number."""
    chance = torch.Generator().manual_seed(0)
    held = torch.randint(256, (5000,), generator=chance, dtype=torch.uint8)
    numbers = {_summed(held, 7), _summed(held.flip(0), 7), _summed(held.roll(1), 7)}
    for place in range(0, 5000, 50):
        changed = held.clone()
        changed[place] ^= 1
        numbers.add(_summed(changed, 7))
    assert len(numbers) == 103
    assert _summed(held, 7) == _summed(held.clone(), 7)
