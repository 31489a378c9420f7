"""Results of the compiled kernel: many tensors in one call, read out when asked for."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_modelhealth.statistics import native, reduce
from pytest_modelhealth.statistics.kernels import fused, plain
from pytest_modelhealth.statistics.kernels.kernel import KernelResult
from pytest_modelhealth.statistics.native import Found, Job, PackedJob, Results
from pytest_modelhealth.statistics.units import UnitStatistics
from tests.statistics import oracle
from tests.statistics.tensors import tensors

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="the kernel is not compiled: python hatch_build.py"
)

KINDS = [
    ((32, 32), 1),
    ((32,), 0),
    ((7, 5, 3), None),
    ((3000,), 0),
    ((2, 9, 4, 4), 1),
    ((1,), None),
]


def job(values: Tensor, dim: int | None) -> Job:
    """Return the job of a tensor that the kernel reads."""
    wanted = fused.job(values, dim)
    assert wanted is not None
    return wanted


def place_of(results: Results, wanted: Job) -> int:
    """Reduce one tensor; return the place of its result."""
    return results.reduce_packed(PackedJob(wanted.layout), wanted.address)[0]


def many(results: Results, jobs: list[Job]) -> list[tuple[int, int]]:
    """Reduce in one call; return places and remarks."""
    return results.reduce_many(
        [PackedJob(wanted.layout) for wanted in jobs], [wanted.address for wanted in jobs]
    )


def assert_found(found: Found, values: Tensor, dim: int | None) -> None:
    """Assert that `found` is what the plain kernel finds in `values`, liveliness included."""
    result, extremes = fused.decode(found)
    expected = plain.summarize(values)
    for name in KernelResult.__slots__:
        if name not in ("moments", "exponents"):
            assert oracle.same(getattr(result, name), getattr(expected, name)), name
    assert result.moments.count == expected.moments.count
    scale = max(abs(expected.min), abs(expected.max))
    assert oracle.close(result.moments.mean, expected.moments.mean, scale)
    assert oracle.close(result.moments.std, expected.moments.std, scale)
    assert result.exponents.lowest == expected.exponents.lowest
    assert np.array_equal(result.exponents.counts, expected.exponents.counts)
    if dim is None:
        assert extremes is found.alive is None
        return
    assert extremes is not None
    assert found.alive is not None
    minimum, maximum = plain.unit_extremes(values, dim)
    units = UnitStatistics.of_extremes(minimum, maximum, 1, scale)
    assert np.array_equal(extremes[0], minimum, equal_nan=True)
    assert np.array_equal(extremes[1], maximum, equal_nan=True)
    assert np.array_equal(found.alive, units.alive)


def examples(count: int) -> list[tuple[Tensor, int | None]]:
    """Return tensors of several shapes and dtypes, with dead units and what is not finite."""
    generator = torch.Generator().manual_seed(count)
    made: list[tuple[Tensor, int | None]] = []
    for number in range(count):
        shape, dim = KINDS[number % len(KINDS)]
        dtype = [torch.float32, torch.float64, torch.bfloat16, torch.float16][number % 4]
        values = torch.randn(shape, generator=generator)
        if dim is not None and shape[dim] > 8:
            values.select(dim, number % shape[dim]).zero_()
            values.select(dim, 3).mul_(2.0**-30)
            values.select(dim, 5).flatten()[:1] = math.nan
        made.append((values.to(dtype), dim))
    return made


@pytest.mark.parametrize("words", [8, 1 << 16], ids=["small-pages", "one-page"])
def test_results_are_read_out_in_any_order(words: int) -> None:
    """Results stay as they were written, however many follow and wherever they lie."""
    results, seen = Results(words), examples(60)
    places = [place_of(results, job(*example)) for example in seen[:20]]
    places += [place for place, _ in many(results, [job(*example) for example in seen[20:]])]
    assert results.reduce_many([], []) == []
    for place, (values, dim) in reversed(list(zip(places, seen, strict=True))):
        assert_found(results[place], values, dim)


def test_results_are_of_the_moment() -> None:
    """What is written to a tensor after it was reduced changes nothing."""
    results, values = Results(), torch.arange(100.0)
    place = place_of(results, job(values, 0))
    values.zero_()
    assert_found(results[place], torch.arange(100.0), 0)


def test_a_found_outlives_its_results() -> None:
    """Arrays are views of memory that they keep alive."""
    values = torch.arange(100.0)
    results = Results()
    found = results[place_of(results, job(values, 0))]
    del results
    assert_found(found, values, 0)


def test_memory_is_written_to_again_after_clear() -> None:
    """One `Results` serves any number of tensors without growing."""
    results = Results()
    for values, dim in examples(12):
        place = place_of(results, job(values, dim))
        assert place == 0
        assert_found(results[place], values, dim)
        results.clear()


@given(drawn=st.lists(tensors(), max_size=6), data=st.data())
def test_many_tensors_are_each_what_they_are_alone(drawn: list[Tensor], data: Any) -> None:
    """One call for many tensors gives the bits of a call for each."""
    jobs = []
    drawn = [tensor.resolve_neg() for tensor in drawn]  # which is a copy for some
    for tensor in drawn:
        dim = data.draw(st.none() | st.integers(0, tensor.ndim - 1)) if tensor.ndim else None
        wanted = fused.job(tensor, dim)
        if wanted is not None:
            jobs.append(wanted)
    alone, together = Results(), Results()
    singles = [bits(alone[place_of(alone, wanted)]) for wanted in jobs]
    assert [bits(together[place]) for place, _ in many(together, jobs)] == singles


def bits(found: Found) -> list[bytes]:
    """Return all that was found, comparable to the last bit."""
    return [np.asarray(field).tobytes() for field in found if field is not None]


def reduced(_: int = 0) -> list[tuple[object, ...]]:
    """Return all that is found in some tensors, one of them of several parts."""
    seen = [*examples(24), (torch.randn(3, 40_000, 9, generator=torch.Generator()), 1)]
    return [oracle.bits(reduce(values, dim)) for values, dim in seen]


def test_threads_do_not_disturb_each_other() -> None:
    """Threads that reduce at once get the bits that one alone gets."""
    alone = reduced()
    with ThreadPoolExecutor(4) as pool:
        assert all(found == alone for found in pool.map(reduced, range(12)))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads by then
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_child_process_reduces_as_its_parent(way: str) -> None:
    """A child, forked after the kernel was used or spawned, gets the same bits and never hangs."""
    if way not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system does not {way}")
    alone = reduced()
    with ProcessPoolExecutor(1, multiprocessing.get_context(way)) as pool:
        assert pool.submit(reduced).result(timeout=60) == alone
