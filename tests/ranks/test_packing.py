"""Packed statistics of ranks are those of the whole tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pytest_modelhealth.ranks.company import Company, Place
from pytest_modelhealth.ranks.packing import join
from pytest_modelhealth.ranks.part import Joined, Part
from pytest_modelhealth.statistics import TensorStatistics, reduce
from tests.ranks.engines import told
from tests.ranks.launching import on_ranks

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
        "on none": [None, None, None],
        "integers": [torch.arange(20).reshape(5, 4) - 7 * rank for rank in range(SIZE)],
        "bfloat16": [normal(5, 4, dtype=torch.bfloat16) for _ in range(SIZE)],
        "a scalar": [normal(), normal(), normal()],
    }


def company() -> Company:
    """Return all ranks, which share the batch out."""
    everyone = tuple(range(dist.get_world_size()))
    store = dist.PrefixStore("packing", dist.distributed_c10d._get_default_store())
    made = Company(everyone, store, 20.0, Place(everyone, (dist.get_rank(),)))
    made.open()
    return made


def seen(tensor: Tensor | None) -> TensorStatistics | None:
    """Return statistics with units along dimension 1."""
    if tensor is None:
        return None
    return reduce(tensor, 1 if tensor.dim() > 1 else None)


def joined() -> tuple[list[Joined], Any, int]:
    """Return what this rank is told of all tensors."""
    rank = dist.get_rank()
    parts = [Part(seen(held[rank])) for held in tensors().values()]
    replicas = [Part(seen(held[0]), is_replica=True) for held in tensors().values()]
    everyone = company()
    found = join(everyone, parts, samples=5)
    same = join(everyone, replicas, samples=5)
    return [*found, *same], told((found, same)), everyone.sent


@pytest.fixture(scope="module")
def ranks() -> list[tuple[list[Joined], Any, int]]:
    """What each rank was told."""
    return on_ranks(SIZE, joined)


def test_all_ranks_are_told_the_same(ranks: list[tuple[list[Joined], Any, int]]) -> None:
    """To the last bit."""
    assert all(told_there == ranks[0][1] for _, told_there, _ in ranks)


@pytest.mark.parametrize(("index", "name"), list(enumerate(tensors())))
def test_numbers_are_those_of_the_whole(
    ranks: list[tuple[list[Joined], Any, int]], index: int, name: str
) -> None:
    """As float64 NumPy has them of all values, and as `merge` has the histogram."""
    held = [tensor for tensor in tensors()[name] if tensor is not None]
    one = ranks[0][0][index]
    assert one.ranks == len(held)
    if not held:
        assert one.seen is None
        return
    assert one.seen is not None
    values = np.concatenate([tensor.double().numpy().reshape(-1) for tensor in held])
    finite = values[np.isfinite(values)]
    assert one.seen.count == values.size
    assert one.seen.nan_count == np.isnan(values).sum()
    assert one.seen.negative_inf_count == np.isneginf(values).sum()
    assert one.seen.zero_count == (values == 0).sum()
    merged = seen(held[0])
    for other in held[1:]:
        assert merged is not None
        part = seen(other)
        assert part is not None
        merged = merged.merge(part)
    assert merged is not None
    assert one.seen.exponents.lowest == merged.exponents.lowest
    assert np.array_equal(one.seen.exponents.counts, merged.exponents.counts)
    ill = tuple(rank for rank, t in enumerate(tensors()[name]) if t is not None and not_finite(t))
    assert one.nonfinite == ill
    if not finite.size:
        assert np.isnan([one.seen.mean, one.seen.std, one.seen.min, one.seen.max]).all()
        assert one.largest is None
        return
    scale = np.abs(finite).max() or 1.0
    assert (one.seen.min, one.seen.max) == (finite.min(), finite.max())
    assert one.seen.mean == pytest.approx(
        (finite / scale).mean() * scale, rel=1e-12, abs=1e-14 * scale
    )
    assert one.seen.std == pytest.approx((finite / scale).std() * scale, rel=1e-10)
    sizes = [t.double()[t.isfinite()].abs().max() if t.isfinite().any() else -1 for t in held]
    if len(held) == SIZE:
        assert one.largest == int(np.argmax(sizes))
    if name == "constant":
        assert one.seen.std == 0.0
    if held[0].dim() > 1:
        _require_units(one.seen, held)


def not_finite(tensor: Tensor) -> bool:
    """Whether there is a NaN or infinity."""
    return not bool(tensor.isfinite().all())


def _require_units(joined: TensorStatistics, held: list[Tensor]) -> None:
    whole = seen(torch.cat([tensor.double() for tensor in held]))
    assert whole is not None
    assert whole.units is not None
    assert joined.units is not None
    assert np.array_equal(joined.units.alive, whole.units.alive)
    assert joined.units.observations == whole.units.observations
    np.testing.assert_allclose(joined.units.minimum, whole.units.minimum, rtol=1e-6)
    np.testing.assert_allclose(joined.units.maximum, whole.units.maximum, rtol=1e-6)


def test_of_replicas_one_counts(ranks: list[tuple[list[Joined], Any, int]]) -> None:
    """Its numbers are untouched."""
    found = ranks[0][0][len(tensors()) :]
    for (name, held), one in zip(tensors().items(), found, strict=True):
        alone = seen(held[0])
        if alone is None:
            assert one.seen is None
            continue
        assert one.seen is not None
        assert one.seen.shape == alone.shape
        for number in ("count", "nan_count", "min", "max", "mean", "std", "first_nonfinite"):
            assert repr(getattr(one.seen, number)) == repr(getattr(alone, number)), (name, number)


def test_a_tensor_costs_some_hundred_bytes(ranks: list[tuple[list[Joined], Any, int]]) -> None:
    """Whatever the number of ranks."""
    assert ranks[0][2] / (2 * len(tensors())) < 700
