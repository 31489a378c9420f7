"""Numbers that tell tensors apart."""

from __future__ import annotations

import torch

from pytest_modelhealth.ranks.evidence import fingerprint

VALUES = torch.arange(1.0, 25.0).reshape(4, 6)


def test_tensors_have_one_number_as_far_as_they_are_equal() -> None:
    """Order, shape, dtype, sign and the last bit count; memory and graph do not."""
    last_bit = VALUES.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(24.000002))
    others = [VALUES.flip(0), VALUES.reshape(6, 4), VALUES.double(), last_bit, VALUES.t(), -VALUES]
    assert len({*map(fingerprint, others), fingerprint(VALUES)}) == 7
    for same in (VALUES.clone(), VALUES.t().contiguous().t(), torch.nn.Parameter(VALUES.clone())):
        assert fingerprint(same) == fingerprint(VALUES)
    for one in (
        torch.zeros(0, 3),
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.empty(3, device="meta"),
        torch.tensor(float("nan")),
    ):
        assert fingerprint(one) == fingerprint(one.clone())
