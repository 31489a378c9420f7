"""The compiled kernel against NumPy and on several threads, where the common tests leave it out.

`test_kernels.py` holds each kernel against values counted one by one, on small tensors.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_modelhealth.statistics import native, reduce
from pytest_modelhealth.statistics.native import Results
from tests.statistics import oracle
from tests.statistics.tensors import FLOATS, arranged, tensors

PROJECT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="the kernel is not compiled: python hatch_build.py"
)


def assert_same(values: Tensor, dim: int | None, *, sampled: bool = False) -> None:
    """Assert that the kernel reads `values` itself, and finds what NumPy does."""
    assert Results().read(values, dim) >= 0
    oracle.assert_agrees(reduce(values, dim), values, dim, sampled=sampled)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random values of several magnitudes with zeros of both signs and subnormals."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    values = torch.randn(shape, generator=generator) * 3 + 1
    flat = values.view(-1)
    flat[::7] = 0.0
    flat[::11] = -0.0
    flat[5::13] *= 1e-3
    flat[1::101] = torch.finfo(dtype).tiny / 4
    return values.to(dtype)


SHAPES = [
    pytest.param((300, 700), 1, id="features"),
    pytest.param((7, 5000), 1, id="more-features-than-a-block"),
    pytest.param((9000, 3), 1, id="few-features"),
    pytest.param((500, 12), 1, id="features-fewer-than-lanes"),
    pytest.param((7, 5), 1, id="rows-fewer-than-lanes"),
    pytest.param((70_000,), 0, id="every-element-a-unit"),
    pytest.param((3, 9, 2, 2), 1, id="tiny-channels"),
    pytest.param((8, 96, 5, 5), 1, id="small-channels"),
    pytest.param((3, 70, 7, 7), 1, id="channels-of-49"),
    pytest.param((2, 9, 30, 30), 1, id="several-channels-a-block"),
    pytest.param((11, 3001), 1, id="strips-of-four-rows"),
    pytest.param((4, 16, 20, 20), 1, id="channels"),
    pytest.param((2, 5, 70, 70), 1, id="channels-longer-than-a-block"),
    pytest.param((40_000, 1), 1, id="one-unit"),
]


WITH_DTYPES = [
    pytest.param((3, 1, 50_000), 1, torch.float32, id="several-parts"),
    *(
        pytest.param(*shape.values, dtype, id=f"{shape.id}-{dtype}")
        for number, shape in enumerate(SHAPES)
        for dtype in (torch.float32, torch.float64, (torch.float16, torch.bfloat16)[number % 2])
    ),
]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every value in the histogram, however many there are."""
    monkeypatch.setattr(native, "EXACT_HISTOGRAM", 1 << 40)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("shape", "dim", "dtype"), WITH_DTYPES)
def test_tensors_of_many_blocks_agree(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    """However units lie in memory: what NumPy finds, also beside what is not finite."""
    values = noise(*shape, dtype=dtype)
    assert_same(values, dim)
    flat = values.view(-1)
    flat[::5003] = math.nan
    flat[3::2501] = math.inf
    flat[4::7001] = -math.inf
    assert_same(values, dim)
    flat[:9000] = math.nan  # a whole block, and the first
    assert_same(values, None)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "arrange",
    [
        pytest.param(lambda t: arranged(t, "channels last"), id="channels-last"),
        pytest.param(lambda t: t.transpose(0, 3), id="transposed"),
        pytest.param(lambda t: t[:, :, 1:, 1:-1], id="sliced"),
        pytest.param(lambda t: t[:, 1::2], id="every-other-channel"),
        pytest.param(lambda t: t[..., ::3], id="strided-rows"),
        pytest.param(lambda t: t[:, :, :1].expand(-1, -1, 7, -1), id="expanded"),
        pytest.param(lambda t: t.flatten().as_strided((70, 8, 9, 5), (3, 2, 7, 1)), id="overlap"),
    ],
)
def test_strided_tensors_agree(arrange: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Tensors that are not dense in memory are read in place, by every dimension."""
    values = arrange(noise(4, 12, 20, 30, dtype=dtype))
    for dim in range(values.ndim):
        assert_same(values, dim)
    values.select(2, 1).fill_(math.nan)
    assert_same(values, 1)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_is_widened_exactly(dtype: torch.dtype) -> None:
    """Each of the values that 16 bits can hold, subnormal ones included, is found as it is."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_same(values[values.isfinite()], 0)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("mean", "first"), [(0.0, 1e30), (1000.0, 0.0), (1e6, -1e4), (1e5, 7.5)])
def test_a_mean_far_from_zero_costs_no_precision(mean: float, first: float) -> None:
    """Blocks whose squares cancel are read from a better pivot, wherever the first values lie."""
    values = noise(100_000) + mean
    values[: 1 if first > 1e6 else 9000] = first
    assert_same(values, None)


@pytest.mark.parametrize("constant", [0.1, 1e-30, 3e38])
def test_a_constant_has_no_deviation_at_all(constant: float) -> None:
    """The standard deviation of equal values is exactly zero."""
    found = reduce(torch.full((9999,), constant))
    assert found.std == 0.0
    assert found.mean == found.min == found.max


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_large_histogram_is_a_sample_and_says_so(dtype: torch.dtype) -> None:
    """Bins are right to sampling noise, their total and their first and last bin exactly."""
    values = noise(500, 1000, dtype=dtype)
    assert_same(values, 1, sampled=True)
    statistics, expected = reduce(values), oracle.bins(values.flatten().tolist())
    assert statistics.histogram_sampled
    assert statistics.histogram.counts.sum() == statistics.finite_count
    kept = oracle.kept_bins(statistics)
    share = 1 / min(values.numel() // native.LEAST_SAMPLED, native.MOST_SKIPPED)
    for key, count in expected.items():
        assert abs(kept[key] - count) * share <= 6 * math.sqrt(count * share) + 1
    assert kept[statistics.min < 0, math.frexp(statistics.min)[1] - 1]
    assert kept[statistics.max < 0, math.frexp(statistics.max)[1] - 1]
    assert statistics.merge(reduce(values[:1])).histogram_sampled


@pytest.mark.parametrize("outlier", [-1e20, 1e20])
def test_an_outlier_is_in_a_sampled_histogram(outlier: float) -> None:
    """The least and the greatest value have their bins, even where no sample met them."""
    values = noise(1_000_000).abs()
    values[123_457] = outlier
    kept = oracle.kept_bins(reduce(values))
    assert kept[outlier < 0, math.frexp(outlier)[1] - 1] == 1
    assert sum(kept.values()) == np.count_nonzero(values)


def test_what_a_sample_would_miss_is_counted_in_full() -> None:
    """Where it holds next to nothing but zeros, or nothing finite, every value is counted."""
    values = torch.zeros(1_000_000)
    values[::5003] = 1.5
    values[7] = 1e-40
    assert_same(values, None)
    for value in (0.0, -0.0, math.nan, math.inf):
        assert_same(torch.full((100_000,), value), None)


def compiled_for() -> list[str]:
    """Return the levels of CPU, up to this one's, that the kernel is compiled for."""
    levels = native._LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("base",))
    folder = Path(native.__file__).parent
    return [level for level in levels if (folder / f"{level}.so").exists()]


@pytest.mark.parametrize("level", compiled_for())
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_level_of_cpu_gives_the_same_bits(
    level: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot recorded with AVX-512 is that of a CPU without, to the last bit."""
    shapes = [(77, 999), (4, 8, 9, 30), (3, 70, 7, 7), (11, 3001), (5, 40, 3, 5), (2, 3, 300_000)]
    values = [noise(*shape, dtype=dtype) for shape in shapes]
    values += [tensor + 1000 for tensor in values]  # whose squares cancel
    expected = [oracle.bits(reduce(tensor, 1)) for tensor in values]
    library = native.load(Path(native.__file__).with_name(f"{level}.so"))
    assert library is not None
    monkeypatch.setattr(native, "library", lambda: library)
    assert [oracle.bits(reduce(tensor, 1)) for tensor in values] == expected


def test_the_library_is_built_from_the_sources_beside_it() -> None:
    """A kernel that was edited and not compiled again is noticed: python hatch_build.py."""
    build: dict[str, Any] = runpy.run_path(str(PROJECT / "hatch_build.py"))
    assert native.library().modelhealth_source().decode() == build["checksum"]()


def test_a_library_of_another_system_or_of_other_sources_is_not_taken(tmp_path: Path) -> None:
    """A stale build may take other arguments, which would crash the interpreter."""
    (tmp_path / "base.so").write_bytes(b"for another system")
    assert native.load(tmp_path / "base.so") is None
    built = Path(native.__file__).with_name("base.so")
    checksum = native.load(built).modelhealth_source()
    stale = built.read_bytes().replace(checksum, checksum[::-1])
    (tmp_path / "base.so").write_bytes(stale)
    assert native.load(tmp_path / "base.so") is None


# ---- on several threads --------------------------------------------------------------------------

needs_openmp = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "GOMP_parallel"),
    reason="torch brought no OpenMP runtime that the kernel can call",
)
THREADS = (1, 2, 5)

SHARED = [
    ((300, 700), 1),
    ((16, 9000), 1),
    ((200_000,), 0),
    ((8, 1100, 5, 5), 1),
    ((9, 16, 30, 30), 1),
    ((5, 3, 9001), 0),
    ((170_003,), None),
]
"""Tensors that threads share, and the dimension of their units."""


def reduced(values: Tensor, dim: int | None, threads: int | None) -> tuple[object, ...]:
    """Return all that is found with this many threads, comparable to the last bit."""
    results = Results(threads=threads)
    found = results.read(values, dim)
    assert found >= 0
    return oracle.bits(results.statistics(None, found & native.PLACE))


def with_holes(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random values with a mean far from zero in places, zeros, NaNs and infinities."""
    values = noise(*shape)
    flat = values.view(-1)
    flat[: len(flat) // 3] += 100
    flat[3::5003] = math.nan
    flat[len(flat) // 2 :: 2501] = math.inf
    flat[4::7001] = -math.inf
    return values.to(dtype)


@needs_openmp
@pytest.mark.parametrize(("shape", "dim"), SHARED)
def test_any_number_of_threads_gives_the_same_bits(shape: tuple[int, ...], dim: int | None) -> None:
    """However many threads share a tensor, no bit depends on them: dense, strided, not finite."""
    strided = with_holes((2 * shape[0], *shape[1:]))[::2]
    finite = with_holes(shape, torch.float64).nan_to_num(2.0, 3.0, -4.0)
    for tensor in (strided, finite):
        alone, *shared = (reduced(tensor, dim, threads) for threads in THREADS)
        assert all(found == alone for found in shared)


@needs_openmp
@given(tensor=st.sampled_from([*FLOATS]).flatmap(tensors), part=st.integers(1, 24), data=st.data())
def test_threads_find_what_is_there_in_any_small_tensor(
    tensor: Tensor, part: int, data: st.DataObject
) -> None:
    """With parts of few elements, for any content and stride, threads find what one finds."""
    tensor = tensor.resolve_neg()
    dim = data.draw(st.none() | st.integers(0, tensor.ndim - 1)) if tensor.ndim else None
    with patch.object(native, "PART", part):
        if Results().read(tensor, dim) >= 0:
            alone, *shared = (reduced(tensor, dim, threads) for threads in THREADS)
            assert all(found == alone for found in shared)


def threads_made(values: Tensor, threads: int | None) -> int:
    """Return how many threads a runtime that has none makes for a tensor.

    The least of three counts: a thread that pytest or torch starts meanwhile only adds to one.
    """

    def running() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    def count() -> int:
        before = running()
        reduced(values, None, threads)
        return len(running() - before)

    def alone() -> int:
        with ThreadPoolExecutor(1) as fresh:  # OpenMP has other threads for each that calls it
            fresh.submit(int).result()
            return fresh.submit(count).result()

    return min(alone() for _ in range(3))


@needs_openmp
def test_a_large_tensor_is_shared_by_the_threads_that_torch_uses() -> None:
    """Without a number, as many threads as torch has; a small one is read by one alone.

    Under ``OMP_NUM_THREADS=1``, as usual beside pytest-xdist, the kernel has no more either.
    """
    values = torch.ones(2 * native.PART)
    assert threads_made(values, 5) == 4
    assert threads_made(values[1:], 5) == 0
    before = torch.get_num_threads()
    try:
        for threads in (4, 1):
            torch.set_num_threads(threads)
            assert threads_made(values, None) == threads - 1
    finally:
        torch.set_num_threads(before)


@needs_openmp
def test_threads_that_call_at_once_do_not_disturb_each_other() -> None:
    """Python threads that each have a tensor read by several get the bits that one alone gets."""
    values = with_holes((9, 16, 30, 30))
    alone = reduced(values, 1, 1)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda threads: reduced(values, 1, threads), [2, 3] * 10)
        assert all(each == alone for each in found)


@needs_openmp
@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_in_a_call_is_raised_after_it() -> None:
    """Ctrl-C stops a run at once, and leaves the kernel as it was."""
    values = with_holes((300, 7000))
    alone = reduced(values, 1, 1)

    def interrupted() -> None:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        while True:
            reduced(values, 1, 2)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reduced(values, 1, 2) == alone


def in_child(values: Tensor, answer: Any) -> None:
    """Say what is found in `values`."""
    answer.send(reduced(values, 1, 2))


@needs_openmp
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads by then
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_child_process_never_waits_for_its_parents_threads(way: str) -> None:
    """A child of a process that used threads gets the same bits, forked or spawned."""
    values = with_holes((300, 700))
    expected = reduced(values, 1, 2)
    context: Any = multiprocessing.get_context(way)
    here, there = context.Pipe()
    child = context.Process(target=in_child, args=(values, there))
    child.start()
    try:
        assert here.poll(60), "the child hangs"
        assert here.recv() == expected
    finally:
        child.kill()
        child.join()


@needs_openmp
@pytest.mark.slow
def test_a_process_forked_before_the_kernel_was_loaded_does_not_wait_either() -> None:
    """Threads of torch may have been used, and lost, before anybody imported this package.

    Under a limit of OpenMP the kernel makes do with the threads that it gets.
    """
    script = (
        "import os, signal, torch\n"
        "torch.set_num_threads(2)\n"
        "values = torch.ones(1 << 20).add_(1)\n"  # in the child torch itself would hang
        "if os.fork():\n"
        "    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "signal.alarm(60)\n"
        "from tests.statistics.test_native import reduced\n"
        "reduced(values, None, 2)\n"
        "assert reduced(values, None, 7) == reduced(values, None, 1)\n"
        "os._exit(0)\n"
    )
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=90)
