"""The kernel for other devices: right on the CPU, and nothing in it waits for a device.

`test_kernels.py` holds it against values counted one by one. Here a dispatch mode refuses every
operator that would make the host wait, on the CPU and on fake tensors of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_modelhealth.statistics import (
    Ledger,
    TensorStatistics,
    queued,
    reduce,
)
from pytest_modelhealth.statistics.tensor_statistics import Subject
from tests.statistics import oracle
from tests.statistics.tensors import FLOATS, tensors

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.item,
    aten.masked_select,
    aten.nonzero,
    aten.bincount,
    aten.unique_dim,
    aten._unique2,
    aten.repeat_interleave,
    aten.histc,  # looks for its range where none is given
}
"""Operators that need a value, or make a result whose size is one."""


class NoWaiting(TorchDispatchMode):
    """Refuses what would wait for a device: a value, a boolean index, a copy to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in WAITING:
            raise AssertionError(f"{func} waits for the device")
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise AssertionError("a boolean index waits for the device")
        given = next((a for a in args if isinstance(a, Tensor)), None)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and given is not None and given.device != result.device:
            raise AssertionError(f"{func} copies from {given.device} to {result.device}")
        return result


def assert_same(found: TensorStatistics, expected: TensorStatistics) -> None:
    """Assert that statistics are equal to the last bit, but for the rounding of moments."""
    assert oracle.counts(found) == oracle.counts(expected)
    assert oracle.bits(found)[2:] == oracle.bits(expected)[2:]
    oracle.assert_moments(found, expected.mean, expected.std)


def noise(*shape: int) -> Tensor:
    """Return random values of several magnitudes, a tenth of them zero."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3 + 1
    return values.where(values.abs() > 0.3, 0.0)


def test_the_guard_sees_what_waits() -> None:
    """Each way to wait for a device is refused, as is fetching: so the tests below can fail."""
    values = noise(4, 5).flatten()
    for wait in (
        lambda t: float(t.sum()),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: torch.bincount(t.long().clamp(0)),
        lambda t: t.unique(),
        lambda t: torch.equal(t, t),
    ):
        with NoWaiting(), pytest.raises(AssertionError, match="waits"):
            wait(values)
    with FakeTensorMode():
        values = torch.empty(4, device="cuda")
        with NoWaiting(), pytest.raises(AssertionError, match="copies from cuda"):
            values.cpu()


SHAPES = [(3,), (2, 3, 4, 5), (300, 200), (0, 3), ()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_nothing_waits_for_the_device(
    device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """On the CPU and on fake tensors of other devices, queueing is one stream of operators."""
    if device == "mps" and dtype is torch.float64:
        pytest.skip("there is no float64 on mps")
    dim = len(shape) - 1 if len(shape) > 1 else None
    if device == "cpu":
        values = noise(*shape).to(dtype)
        with NoWaiting():
            found = queued.queue(values, dim)
        assert found.pieces == math.ceil(values.numel() / queued.CHUNK_ELEMENTS)
        return
    with FakeTensorMode():
        values = torch.empty(shape, dtype=dtype, device=device)
        with NoWaiting():
            found = queued.queue(values, dim)
    assert found.numbers.device.type == device
    assert found.numbers.dtype is torch.int64
    assert found.real is (torch.float32 if device == "mps" else torch.float64)


@given(tensor=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]).flatmap(tensors))
def test_a_device_without_float64_finds_the_same_to_float32_rounding(tensor: Tensor) -> None:
    """Counts, extremes and exponents are exact there too; moments lose what float32 loses."""
    tensor = tensor.resolve_neg()
    values = oracle.real_values(tensor)
    finite = [value for value in values if math.isfinite(value)]
    found = summarized(tensor, torch.float32)
    assert found.nan_count == sum(map(math.isnan, values))
    assert found.zero_count == finite.count(0.0)
    assert oracle.same(found.min, min(finite, default=math.nan))
    assert oracle.same(found.max, max(finite, default=math.nan))
    assert oracle.kept_bins(found) == oracle.bins(finite)
    mean, std = oracle.moments(finite)
    most = max(map(abs, finite), default=0.0)
    assert found.mean == pytest.approx(mean, abs=1e-5 * most + 1e-44, nan_ok=True)
    assert found.std == pytest.approx(std, abs=1e-5 * most + 1e-44, nan_ok=True)


def summarized(tensor: Tensor, real: torch.dtype = torch.float64) -> TensorStatistics:
    """Return what the kernel finds in pieces as long as those of another device."""
    with patch.object(queued, "CHUNK_ELEMENTS", queued.ACCELERATOR_CHUNK_ELEMENTS):
        found = queued.queue(tensor, None, real)
    subject = Subject.of(tensor, tuple(tensor.shape), tensor.numel(), None)
    return queued.decode(found, queued.fetch_all([found])[0], subject)


def test_a_large_histogram_is_a_sample_of_what_is_not_zero() -> None:
    """The counts add up, and the extremes have their bins; all else is exact."""
    values = noise(500, 800)
    values[3, 3] = 2.0**40
    found = summarized(values)
    oracle.assert_agrees(found, values, sampled=True)
    assert found.exponents.counts.sum() == np.count_nonzero(values)
    assert found.exponents.highest == 40
    few = torch.zeros(1_000_000)  # what is not zero is sampled: a few among zeros are all found
    few[::5003] = 1.5
    few[7] = 1e-40
    oracle.assert_agrees(summarized(few), few)
    for columns in (64, 128, 640):  # none is favoured by one in 64
        values = torch.ones(1 << 20).view(-1, 64).repeat_interleave(columns // 64, 1)
        values[:, : columns // 64] = 2.0**20
        counts = summarized(values).exponents.counts[:, 1]
        assert counts.sum() == values.numel()
        assert counts[-1] == pytest.approx(values.numel() / 64, rel=0.1)


@pytest.fixture
def fetches() -> Iterator[list[int]]:
    """The sizes of what was fetched, one for each transfer."""
    sizes: list[int] = []
    fetch_all = queued.fetch_all

    def counted(wanted: Any) -> Any:
        sizes.append(len(wanted))
        return fetch_all(wanted)

    with patch.object(queued, "fetch_all", counted):
        yield sizes


def test_all_results_are_fetched_at_once(fetches: list[int]) -> None:
    """Asking for one brings all, as they were when they were queued; the next waits again.

    A model that never ends does not fill the device with results.
    """
    ledger = Ledger(queue_all=True)
    many = [noise(n % 7 + 1, n % 5 + 1) for n in range(100)]
    entries = [ledger.add(tensor, 1) for tensor in many]
    expected = [*map(partial(reduce, unit_dim=1), many)]
    assert fetches == []
    many[0].fill_(7)
    for entry, statistics in zip(entries, expected, strict=True):
        assert_same(entry.statistics, statistics)
    assert fetches == [100]
    late = ledger.add(many[0])
    assert late.statistics.count == many[0].numel()
    assert fetches == [100, 1]
    ledger = Ledger(queue_all=True)
    with patch("pytest_modelhealth.statistics.ledger.MOST_QUEUED", 20_000):
        entries = [ledger.add(noise(4, 4)) for _ in range(20)]
    assert len(fetches) > 4
    assert all(entry.statistics.count == 16 for entry in entries)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_gpu_finds_what_the_cpu_finds(dtype: torch.dtype) -> None:
    """Counts and extremes exactly, moments to rounding, for small and for sampled tensors."""
    for shape in ((3,), (40, 30), (2, 3, 4, 5)):
        tensor = noise(*shape).to(dtype)
        found = Ledger().add(tensor.cuda(), -1).statistics
        assert found.device == "cuda:0"
        assert oracle.counts(found) == oracle.counts(reduce(tensor, -1))
        assert found.mean == pytest.approx(reduce(tensor).mean, rel=1e-12)
        assert found.std == pytest.approx(reduce(tensor).std, rel=1e-12)


@needs_cuda
def test_a_gpu_is_not_waited_for() -> None:
    """CUDA itself says so: its own check for waits raises at the first."""
    ledger, tensor = Ledger(), noise(700, 800).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        entry = ledger.add(tensor, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(entry.statistics, Ledger(queue_all=True).add(tensor, 1).statistics)


@needs_cuda
def test_results_of_another_stream_are_there_when_they_are_fetched() -> None:
    """A hook may run in a stream of the user's; the fetch waits for all."""
    ledger, tensor = Ledger(), noise(3000, 2000).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        entries = [ledger.add(tensor * n) for n in range(20)]
    assert entries[19].statistics.max == pytest.approx(19 * float(tensor.max()), rel=1e-6)
