"""`first_nonfinite`: the index of the first NaN or infinity, held against NumPy."""

import numpy as np
import pytest
import torch

from pytest_modelhealth.statistics import reduce
from pytest_modelhealth.statistics.ledger import Ledger

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2)
BAD = (torch.nan, torch.inf, -torch.inf)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2]
)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("index", [(0, 0, 0), (1, 2, 3), (4, 6, 8)])
def test_index_is_that_of_numpy(index, bad, dtype):
    """`reduce` and `Ledger` agree with a search in float64, contiguous or not."""
    values = torch.randn(5, 7, 9).to(dtype)
    values[index] = values[4, 6, 8] = bad
    for tensor in (values, values.transpose(0, 2)):
        truth = tuple(np.argwhere(~np.isfinite(tensor.double().numpy()))[0].tolist())
        assert reduce(tensor).first_nonfinite == truth
        assert Ledger().add(tensor).statistics.first_nonfinite == truth
        together = Ledger().add_many([torch.ones(3), tensor])[1]
        assert together is None or together.statistics.first_nonfinite == truth


def test_finite_tensor_has_none():
    """Nothing to find, and a scalar has an index without dimensions."""
    assert reduce(torch.ones(3)).first_nonfinite is None
    assert Ledger().add(torch.ones(3)).statistics.first_nonfinite is None
    assert reduce(torch.tensor(torch.nan)).first_nonfinite == ()


def test_merge_keeps_that_of_the_first_tensor_that_held_one():
    """Which tensor came first is the order of the merge."""
    good, bad = reduce(torch.zeros(4)), reduce(torch.tensor([0.0, 0.0, torch.nan, 0.0]))
    worse = reduce(torch.tensor([torch.nan] * 4))
    assert good.merge(bad).merge(worse).first_nonfinite == (2,)
    assert worse.merge(bad).first_nonfinite == (0,)


def test_ledger_looks_again_at_so_many_and_no_more():
    """What follows the first NaN is NaN throughout, and costs no second pass for ever."""
    ledger, bad = Ledger(), torch.tensor([1.0, torch.nan])
    found = [ledger.add(bad).statistics.first_nonfinite for _ in range(65)]
    assert found == [(1,)] * 64 + [None]
