"""What ranks have of a tensor is put where it is in the whole; `tests/statistics` has the merge."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pytest_modelhealth.ranks.assembling import joined
from pytest_modelhealth.ranks.parts import Part
from pytest_modelhealth.statistics import TensorStatistics, reduce

SHARDS = [torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)) for rows in (7, 1, 3)]


def seen(tensor: Tensor) -> TensorStatistics:
    """Return statistics with units along dimension 1."""
    return reduce(tensor, 1)


def numbers(statistics: TensorStatistics) -> str:
    """Return what tells tensors apart, to the last bit."""
    s = statistics
    return repr((s.shape, s.count, s.min, s.mean, s.std, s.first_nonfinite))


def test_of_replicas_one_counts() -> None:
    """That of the first rank, and its numbers are untouched."""
    each = {rank: Part(seen(one)) for rank, one in enumerate(SHARDS)}
    assert numbers(joined(each).seen) == numbers(seen(SHARDS[0]))


def test_pieces_add_up_whatever_a_rank_holds() -> None:
    """Shards of no rows, of nothing finite, on one rank alone; who has a NaN, and the largest."""
    pieces = [torch.empty(0, 4), torch.full((2, 4), torch.nan), *SHARDS, -9 * SHARDS[0]]
    whole = joined({rank: Part(seen(one), (rank,)) for rank, one in enumerate(pieces)})
    expected = seen(torch.cat([one.double() for one in pieces]))
    assert (
        (whole.seen.count, whole.seen.nan_count) == (expected.count, expected.nan_count) == (80, 8)
    )
    assert (whole.seen.min, whole.seen.max) == (expected.min, expected.max)
    assert math.isclose(whole.seen.std, expected.std, rel_tol=1e-12)
    assert whole.seen.units is not None
    assert whole.seen.units.observations == 20
    assert (whole.assembly.ranks, whole.assembly.nonfinite, whole.assembly.largest) == (6, (1,), 5)
    alone = joined({1: Part(seen(SHARDS[0]), (1,))})
    assert (alone.assembly.how, numbers(alone.seen)) == ("one rank", numbers(seen(SHARDS[0])))
    ill = joined({rank: Part(seen(pieces[1]), (rank,)) for rank in range(2)})
    assert ill.assembly.largest is None
    assert math.isnan(ill.seen.mean)


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
