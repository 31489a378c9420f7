"""What runs functions on several ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.launching import RanksFailedError, on_ranks


def add(value: float) -> float:
    """Return the sum over ranks."""
    tensor = torch.tensor(value + dist.get_rank())
    dist.all_reduce(tensor)
    return float(tensor)


def fail_on_one() -> None:
    """Raise on rank 1."""
    if dist.get_rank() == 1:
        raise ValueError("only here")


def hang_on_one() -> None:
    """Wait on rank 1."""
    if dist.get_rank() == 1:
        time.sleep(60)


def test_each_rank_returns() -> None:
    """They see each other."""
    assert on_ranks(2, add, 10.0) == [21.0, 21.0]


def test_what_a_rank_raises_is_raised() -> None:
    """The text says which one it was."""
    with pytest.raises(RanksFailedError, match=r"(?s)^rank 1: Traceback.*ValueError: only here"):
        on_ranks(2, fail_on_one)


def test_a_rank_that_hangs_is_ended() -> None:
    """So that a test does not wait for ever."""
    with pytest.raises(RanksFailedError, match="rank 1: ended with exit code -9"):
        on_ranks(2, hang_on_one, seconds=2)
