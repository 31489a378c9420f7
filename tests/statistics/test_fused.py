"""The compiled kernel against the plain one, on what the common kernel tests leave out.

`test_kernels.py` holds every kernel against values counted one by one, on small tensors.
"""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_modelhealth.statistics import kinds, native, reduce
from pytest_modelhealth.statistics.kernels import fused, plain
from tests.statistics import oracle
from tests.statistics.tensors import FLOATS, arranged, tensors

PROJECT = Path(__file__).parents[2]

needs_library = pytest.mark.skipif(
    native.library() is None, reason="the kernel is not compiled: python hatch_build.py"
)


def assert_same(values: Tensor, dim: int | None, *, sampled: bool = False) -> None:
    """Assert that the fused kernel finds in `values` what the plain one does."""
    assert native.library() is None or fused.summarize_compiled(values, dim) is not None
    found, extremes = fused.summarize_units(values, dim)
    expected = plain.summarize(values)
    for name in ("nan_count", "positive_inf_count", "negative_inf_count", "zero_count"):
        assert getattr(found, name) == getattr(expected, name), name
    assert oracle.same(found.min, expected.min)
    assert oracle.same(found.max, expected.max)
    assert found.moments.count == expected.moments.count
    scale = max(abs(expected.min), abs(expected.max))
    close = oracle.close(found.moments.mean, expected.moments.mean, scale)
    assert close, (found.moments, expected.moments)
    assert found.moments.std == pytest.approx(expected.moments.std, rel=1e-12, nan_ok=True)
    assert found.histogram_sampled is sampled
    if not sampled:
        assert found.exponents.lowest == expected.exponents.lowest
        assert np.array_equal(found.exponents.counts, expected.exponents.counts)
    if dim is not None:
        assert extremes is not None
        for ours, theirs in zip(extremes, plain.unit_extremes(values, dim), strict=True):
            assert np.array_equal(ours, theirs, equal_nan=True)


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
    pytest.param((200_000,), 0, id="every-element-a-unit"),
    pytest.param((3, 9, 2, 2), 1, id="tiny-channels"),
    pytest.param((8, 96, 5, 5), 1, id="small-channels"),
    pytest.param((2, 3000, 5, 5), 1, id="many-small-channels"),
    pytest.param((3, 70, 7, 7), 1, id="channels-of-49"),
    pytest.param((2, 9, 30, 30), 1, id="several-channels-a-block"),
    pytest.param((11, 3001), 1, id="strips-of-four-rows"),
    pytest.param((3, 1, 300_000), 1, id="several-parts"),
    pytest.param((4, 16, 20, 20), 1, id="channels"),
    pytest.param((2, 5, 70, 70), 1, id="channels-longer-than-a-block"),
    pytest.param((50, 40, 30), 0, id="first-dimension"),
    pytest.param((40_000, 1), 1, id="one-unit"),
]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every value in the histogram, however many there are."""
    monkeypatch.setattr(fused, "EXACT_HISTOGRAM", 1 << 40)
    monkeypatch.setattr(fused, "_layout", fused._layout.__wrapped__)


@needs_library
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_tensors_of_many_blocks_agree(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    """However units lie in memory, the fused kernel finds what the plain one finds."""
    values = noise(*shape, dtype=dtype)
    assert_same(values, dim)
    assert_same(values, None)


@needs_library
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_values_that_are_not_finite_spoil_nothing(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype
) -> None:
    """NaNs and infinities are counted, stay with their unit, and leave the rest as it is."""
    values = noise(*shape, dtype=dtype)
    flat = values.view(-1)
    flat[::5003] = math.nan
    flat[3::2501] = math.inf
    flat[4::7001] = -math.inf
    assert_same(values, dim)
    flat[:9000] = math.nan  # a whole block, and the first
    assert_same(values, dim)


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
@given(tensor=tensors(), data=st.data())
def test_units_agree_on_any_small_tensor(tensor: Tensor, data: st.DataObject) -> None:
    """One pass gives the extremes of units and everything else, for any content and stride."""
    tensor = tensor.resolve_neg()
    if tensor.dtype not in FLOATS or not tensor.numel() or not tensor.ndim:
        return
    if tensor.dtype is torch.float64:
        tensor = tensor.clamp(-1e120, 1e120)  # beyond 2**500 the plain kernel takes over
        tensor = tensor.where(tensor.abs() > 1e-120, 0.0)
    assert_same(tensor, data.draw(st.integers(0, tensor.ndim - 1)))


@needs_library
@pytest.mark.parametrize("mean", [0.0, 1000.0, 1e6])
def test_the_variance_survives_a_large_mean(mean: float) -> None:
    """Where a float32 sum of squares has no digit left, the kernel has twelve."""
    values = noise(1000, 300) + mean
    exact = values.double().numpy()
    found = fused.summarize(values)
    assert found.moments.mean == pytest.approx(exact.mean(), rel=1e-14, abs=1e-14)
    assert found.moments.std == pytest.approx(exact.std(), rel=1e-12)


@needs_library
def test_a_first_value_far_from_all_others_costs_no_precision() -> None:
    """The first value, from which deviations are measured at first, may be an outlier."""
    values = noise(100_000)
    values[0] = 1e30
    assert_same(values[:4000], None)
    assert fused.summarize(values).moments.std == pytest.approx(
        values.double().numpy().std(), rel=1e-12
    )


@needs_library
@pytest.mark.parametrize("first", [0.0, 7.5, -1e4])
def test_a_mean_far_from_zero_costs_no_precision_in_any_block(first: float) -> None:
    """Blocks whose squares cancel are read from a better pivot, and those after them as well."""
    values = noise(600_000) + 1e5
    values[:9000] = first
    exact = values.double().numpy()
    found = fused.summarize(values)
    assert found.moments.mean == pytest.approx(exact.mean(), rel=1e-14)
    assert found.moments.std == pytest.approx(exact.std(), rel=1e-12)


@needs_library
@pytest.mark.parametrize("constant", [0.1, 1e-30, 3e38])
def test_a_constant_has_no_deviation_at_all(constant: float) -> None:
    """The standard deviation of equal values is exactly zero."""
    found = fused.summarize(torch.full((9999,), constant))
    assert found.moments.std == 0.0
    assert found.moments.mean == found.min == found.max


@needs_library
@pytest.mark.parametrize("value", [1e200, 1e-200, 5e-324, -1.7e308])
def test_squares_beyond_float64_are_left_to_the_plain_kernel(value: float) -> None:
    """A float64 whose square would overflow or vanish still has its moments."""
    values = torch.tensor([value, 0.0, value / 2], dtype=torch.float64)
    assert fused.summarize_compiled(values, None) is None
    mean, std = oracle.moments(values.tolist())
    found = fused.summarize(values).moments
    assert oracle.close(found.mean, mean, abs(value))
    assert oracle.close(found.std, std, abs(value))


@needs_library
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_large_histogram_is_a_sample_and_says_so(dtype: torch.dtype) -> None:
    """Bins are right to sampling noise, their total and their first and last bin exactly."""
    values = noise(1000, 1000, dtype=dtype)
    assert_same(values, 1, sampled=True)
    statistics, expected = reduce(values), plain.summarize(values).exponents
    assert statistics.histogram_sampled
    assert statistics.histogram.counts.sum() == statistics.finite_count
    kept = oracle.kept_bins(statistics)
    share = 1 / fused._layout(0, values.shape, None, None, 0).words[7]
    for (row, sign), count in np.ndenumerate(expected.counts):
        guess = kept[sign == 0, expected.lowest + row] * share
        assert abs(guess - count * share) <= 6 * math.sqrt(count * share) + 1
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
    monkeypatch.setattr(fused, "_own", fused._Own())  # the other has its library already
    assert [oracle.bits(reduce(tensor, 1)) for tensor in values] == expected


def test_kernel_imports_without_the_library() -> None:
    """Nothing is asked of the library before a tensor is, so a machine without it can import."""
    code = """
import ctypes, torch
def refuse(path):
    raise OSError(path)
ctypes.CDLL = refuse
from pytest_modelhealth import statistics
print(statistics.reduce(torch.ones(3)).mean)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr, run.returncode) == ("1.0\n", "", 0)


def test_without_the_library_the_plain_kernel_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler gets the same numbers, more slowly and never sampled."""
    values = noise(300, 300)
    expected = reduce(values, 1)
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(kinds, "_kinds", {})
    found = reduce(values, 1)
    assert not found.histogram_sampled
    assert found.zero_count == expected.zero_count
    assert found.mean == pytest.approx(expected.mean, rel=1e-13)
    assert np.array_equal(found.units.alive, expected.units.alive)


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
def test_a_library_built_from_other_sources_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale build may take other arguments, which would crash the interpreter."""
    built = Path(native.__file__).with_name("base.so")
    assert native.load(built) is not None
    monkeypatch.setattr(native, "_checksum", lambda: "another")
    assert native.load(built) is None
