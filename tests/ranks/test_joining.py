"""Statistics of what ranks have of a tensor are those of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pytest_modelhealth.ranks.assembling import joined
from pytest_modelhealth.ranks.parts import Part
from pytest_modelhealth.statistics import TensorStatistics, reduce

SIZE = 3


def tensors() -> dict[str, list[Tensor | None]]:
    """Return tensors of all kinds, by name, as they lie on each rank."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    ill = [normal(5, 4) for _ in range(SIZE)]
    ill[1][2, 3] = torch.nan
    ill[2][0, 1] = -torch.inf
    bad = torch.full((2, 4), torch.nan)
    return {
        "plain": [normal(5, 4) for _ in range(SIZE)],
        "uneven rows": [normal(rows, 4) for rows in (7, 1, 3)],
        "an empty shard": [normal(2, 4), normal(1, 4), normal(0, 4)],
        "far apart": [normal(5, 4) * 1e-30, normal(5, 4) + 1e6, normal(5, 4) * 1e30],
        "near overflow": [normal(5, 4, dtype=torch.float64) * 1e300 for _ in range(SIZE)],
        "subnormal": [normal(5, 4, dtype=torch.float64) * 1e-310 for _ in range(SIZE)],
        "constant": [torch.full((5, 4), 0.1) for _ in range(SIZE)],
        "zeros": [torch.zeros(5, 4), -torch.zeros(5, 4), torch.zeros(5, 4)],
        "ill": ill,
        "nothing finite": [bad, bad, bad],
        "finite on one": [bad, normal(2, 4), bad],
        "on one rank": [None, normal(5, 4), None],
        "integers": [torch.arange(20).reshape(5, 4) - 7 * rank for rank in range(SIZE)],
        "bfloat16": [normal(5, 4, dtype=torch.bfloat16) for _ in range(SIZE)],
        "a scalar": [normal(), normal(), normal()],
    }


def seen(tensor: Tensor) -> TensorStatistics:
    """Return statistics with units along dimension 1."""
    return reduce(tensor, 1 if tensor.dim() > 1 else None)


@pytest.mark.parametrize("name", tensors())
def test_numbers_are_those_of_the_whole(name: str) -> None:
    """As float64 NumPy has them of all values, and as `merge` has the histogram."""
    held = [tensor for tensor in tensors()[name] if tensor is not None]
    parts = {
        rank: Part(seen(one), (rank,))
        for rank, one in enumerate(tensors()[name])
        if one is not None
    }
    one = joined(parts)
    assert one.assembly.ranks == len(held)
    values = np.concatenate([tensor.double().numpy().reshape(-1) for tensor in held])
    finite = values[np.isfinite(values)]
    assert one.seen.count == values.size
    assert one.seen.nan_count == np.isnan(values).sum()
    assert one.seen.negative_inf_count == np.isneginf(values).sum()
    assert one.seen.zero_count == (values == 0).sum()
    merged = seen(held[0])
    for other in held[1:]:
        merged = merged.merge(seen(other))
    assert one.seen.exponents.lowest == merged.exponents.lowest
    assert np.array_equal(one.seen.exponents.counts, merged.exponents.counts)
    ill = tuple(rank for rank, t in enumerate(tensors()[name]) if t is not None and not_finite(t))
    assert one.assembly.nonfinite == ill
    if not finite.size:
        assert np.isnan([one.seen.mean, one.seen.std, one.seen.min, one.seen.max]).all()
        assert one.assembly.largest is None
        return
    scale = np.abs(finite).max() or 1.0
    assert (one.seen.min, one.seen.max) == (finite.min(), finite.max())
    assert one.seen.mean == pytest.approx(
        (finite / scale).mean() * scale, rel=1e-12, abs=1e-14 * scale
    )
    assert one.seen.std == pytest.approx((finite / scale).std() * scale, rel=1e-10)
    sizes = [t.double()[t.isfinite()].abs().max() if t.isfinite().any() else -1 for t in held]
    if len(held) == SIZE:
        assert one.assembly.largest == int(np.argmax(sizes))
    if name == "constant":
        assert one.seen.std == 0.0
    if held[0].dim() > 1:
        _require_units(one.seen, held)


def not_finite(tensor: Tensor) -> bool:
    """Whether there is a NaN or infinity."""
    return not bool(tensor.isfinite().all())


def _require_units(joined: TensorStatistics, held: list[Tensor]) -> None:
    whole = seen(torch.cat([tensor.double() for tensor in held]))
    assert whole.units is not None
    assert joined.units is not None
    assert np.array_equal(joined.units.alive, whole.units.alive)
    assert joined.units.observations == whole.units.observations
    np.testing.assert_allclose(joined.units.minimum, whole.units.minimum, rtol=1e-6)
    np.testing.assert_allclose(joined.units.maximum, whole.units.maximum, rtol=1e-6)


def test_of_replicas_one_counts() -> None:
    """That of the first rank, and its numbers are untouched."""
    first, *_ = held = [seen(one) for one in tensors()["plain"] if one is not None]
    one = joined({rank: Part(each) for rank, each in enumerate(held)}).seen
    assert repr((one.shape, one.count, one.min, one.mean, one.std)) == repr(
        (first.shape, first.count, first.min, first.mean, first.std)
    )


def test_pieces_stand_where_they_are_in_the_whole() -> None:
    """Units in a row, the first NaN by its place in the whole, samples added."""
    left, right = torch.ones(4, 2), torch.zeros(4, 3)
    right[1, 2] = torch.nan
    parts = {
        0: Part(seen(left), (0,), whole=(4, 5), offset=(0, 0), units=(0, 5), rows=4),
        2: Part(
            seen(right),
            (2,),
            whole=(4, 5),
            offset=(0, 2),
            units=(2, 5),
            counts_samples=False,
            rows=0,
        ),
    }
    one = joined(parts)
    assert one.seen.units is not None
    assert (one.seen.shape, one.seen.first_nonfinite) == ((4, 5), (1, 4))
    assert one.seen.units.alive.tolist() == [True, True, False, False, True]
    assert one.seen.units.observations == 4
    assert (one.assembly.how, one.assembly.nonfinite, one.assembly.largest) == ("units", (2,), 0)
