"""The compiled kernel against NumPy, on what the common kernel tests leave out.

`test_kernels.py` holds each kernel against values counted one by one, on small tensors.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pytest_modelhealth.statistics import ledger, native, reduce
from tests.statistics import oracle
from tests.statistics.tensors import FLOATS, arranged

PROJECT = Path(__file__).parents[2]

needs_library = pytest.mark.skipif(
    native.library() is None, reason="the kernel is not compiled: python hatch_build.py"
)


def assert_same(values: Tensor, dim: int | None, *, sampled: bool = False) -> None:
    """Assert that the kernel reads `values` itself, and finds what NumPy does."""
    assert native.Results().read(values, dim) >= 0
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
    pytest.param((70, 1536), 1, id="four-rows-a-block"),
    pytest.param((9000, 3), 1, id="few-features"),
    pytest.param((500, 12), 1, id="features-fewer-than-lanes"),
    pytest.param((7, 5), 1, id="rows-fewer-than-lanes"),
    pytest.param((70_000,), 0, id="every-element-a-unit"),
    pytest.param((3, 9, 2, 2), 1, id="tiny-channels"),
    pytest.param((8, 96, 5, 5), 1, id="small-channels"),
    pytest.param((2, 3000, 5, 5), 1, id="many-small-channels"),
    pytest.param((3, 70, 7, 7), 1, id="channels-of-49"),
    pytest.param((2, 9, 30, 30), 1, id="several-channels-a-block"),
    pytest.param((11, 3001), 1, id="strips-of-four-rows"),
    pytest.param((4, 16, 20, 20), 1, id="channels"),
    pytest.param((2, 5, 70, 70), 1, id="channels-longer-than-a-block"),
    pytest.param((50, 40, 30), 0, id="first-dimension"),
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


@needs_library
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


@needs_library
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


@needs_library
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_is_widened_exactly(dtype: torch.dtype) -> None:
    """Each of the values that 16 bits can hold, subnormal ones included, is found as it is."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_same(values[values.isfinite()], 0)


@needs_library
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("mean", "first"), [(0.0, 1e30), (1000.0, 0.0), (1e6, -1e4), (1e5, 7.5)])
def test_a_mean_far_from_zero_costs_no_precision(mean: float, first: float) -> None:
    """Blocks whose squares cancel are read from a better pivot, wherever the first values lie."""
    values = noise(100_000) + mean
    values[: 1 if first > 1e6 else 9000] = first
    assert_same(values, None)


@needs_library
@pytest.mark.parametrize("constant", [0.1, 1e-30, 3e38])
def test_a_constant_has_no_deviation_at_all(constant: float) -> None:
    """The standard deviation of equal values is exactly zero."""
    found = reduce(torch.full((9999,), constant))
    assert found.std == 0.0
    assert found.mean == found.min == found.max


@needs_library
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


@needs_library
@pytest.mark.parametrize("outlier", [-1e20, 1e20])
def test_an_outlier_is_in_a_sampled_histogram(outlier: float) -> None:
    """The least and the greatest value have their bins, even where no sample met them."""
    values = noise(1_000_000).abs()
    values[123_457] = outlier
    kept = oracle.kept_bins(reduce(values))
    assert kept[outlier < 0, math.frexp(outlier)[1] - 1] == 1
    assert sum(kept.values()) == np.count_nonzero(values)


@needs_library
def test_a_sparse_tensor_is_counted_in_full() -> None:
    """Where a sample holds next to nothing but zeros, every value is counted."""
    values = torch.zeros(1_000_000)
    values[::5003] = 1.5
    values[7] = 1e-40
    assert_same(values, None)


@needs_library
@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, math.inf])
def test_a_large_tensor_without_any_bin(value: float) -> None:
    """Where nothing is finite and not zero there is nothing to sample."""
    assert_same(torch.full((100_000,), value), None)


@needs_library
def test_samples_are_the_same_every_time() -> None:
    """Sampling draws nothing at random: two looks at a tensor give the same bits."""
    values = noise(300_000)
    assert oracle.bits(reduce(values)) == oracle.bits(reduce(values.clone()))


def compiled_for() -> list[str]:
    """Return the levels of CPU, up to this one's, that the kernel is compiled for."""
    levels = native._LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("base",))
    folder = Path(native.__file__).parent
    return [level for level in levels if (folder / f"{level}.so").exists()]


@needs_library
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


def test_without_the_library_the_torch_kernel_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none was compiled the numbers are the same, and never sampled."""
    monkeypatch.setattr(ledger, "library", lambda: None)
    values = noise(300, 300)
    oracle.assert_agrees(reduce(values, 1), values, 1, sampled=False)


def test_a_library_for_another_system_is_none(tmp_path: Path) -> None:
    """A file that does not load counts as missing."""
    (tmp_path / "base.so").write_bytes(b"for another system")
    assert native.load(tmp_path / "base.so") is None


@needs_library
def test_the_library_is_built_from_the_sources_beside_it() -> None:
    """A kernel that was edited and not compiled again is noticed: python hatch_build.py."""
    build: dict[str, Any] = runpy.run_path(str(PROJECT / "hatch_build.py"))
    assert native.library().modelhealth_source().decode() == build["checksum"]()


@needs_library
def test_a_library_built_from_other_sources_is_not_taken(tmp_path: Path) -> None:
    """A stale build may take other arguments, which would crash the interpreter."""
    built = Path(native.__file__).with_name("base.so")
    checksum = native.load(built).modelhealth_source()
    stale = built.read_bytes().replace(checksum, checksum[::-1])
    (tmp_path / "base.so").write_bytes(stale)
    assert native.load(tmp_path / "base.so") is None
