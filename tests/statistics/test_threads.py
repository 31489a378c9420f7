"""The compiled kernel on several of torch's threads: the same bits, and no harm around it."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_modelhealth.statistics import native
from pytest_modelhealth.statistics.native import Results
from tests.statistics import oracle
from tests.statistics.tensors import FLOATS, tensors

pytestmark = [
    pytest.mark.skipif(
        native.library() is None, reason="the kernel is not compiled: python hatch_build.py"
    ),
    pytest.mark.skipif(
        sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "GOMP_parallel"),
        reason="torch brought no OpenMP runtime that the kernel can call",
    ),
]

THREADS = (1, 2, 5)

SHAPES = [
    pytest.param((300, 700), 1, id="features"),
    pytest.param((16, 9000), 1, id="wide-rows"),
    pytest.param((40_000, 3), 1, id="few-features"),
    pytest.param((200_000,), 0, id="every-element-a-unit"),
    pytest.param((8, 1100, 5, 5), 1, id="small-channels"),
    pytest.param((9, 16, 30, 30), 1, id="channels"),
    pytest.param((3, 1, 100_000), 1, id="one-unit"),
    pytest.param((5, 3, 9001), 0, id="first-dimension"),
    pytest.param((170_003,), None, id="no-units"),
]


def reduced(values: Tensor, dim: int | None, threads: int | None) -> tuple[object, ...]:
    """Return all that is found with this many threads, comparable to the last bit."""
    results = Results(threads=threads)
    found = results.read(values, dim)
    assert found >= 0
    return oracle.bits(results.statistics(None, found & native.PLACE))


def noise(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random values with a mean far from zero in places, zeros, NaNs and infinities."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))
    flat = values.view(-1)
    flat[: len(flat) // 3] += 100
    flat[::7] = 0.0
    flat[3::5003] = math.nan
    flat[len(flat) // 2 :: 2501] = math.inf
    flat[4::7001] = -math.inf
    return values.to(dtype)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_any_number_of_threads_gives_the_same_bits(shape: tuple[int, ...], dim: int | None) -> None:
    """However many threads share a tensor, no bit depends on them: dense, strided, not finite."""
    strided = noise((2 * shape[0], *shape[1:]))[::2]
    finite = noise(shape, torch.float64).nan_to_num(2.0, 3.0, -4.0)
    for tensor in (strided, finite):
        alone, *shared = (reduced(tensor, dim, threads) for threads in THREADS)
        assert all(found == alone for found in shared)


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
    """Return how many threads a runtime that has none makes for a tensor."""

    def running() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    def count() -> int:
        before = running()
        reduced(values, None, threads)
        return len(running() - before)

    with ThreadPoolExecutor(1) as fresh:  # OpenMP has other threads for each that calls it
        fresh.submit(int).result()
        return fresh.submit(count).result()


def test_a_large_tensor_is_shared_by_the_threads_that_torch_uses() -> None:
    """Without a number, as many threads as torch has; and no fewer, which would end some."""
    values = torch.ones(2 * native.PART)
    assert threads_made(values, 5) == 4
    with patch.object(torch, "get_num_threads", lambda: 4):
        assert threads_made(values, None) == 3


def test_a_small_tensor_is_read_by_one_thread() -> None:
    """Where handing over takes longer than reading, nothing is handed over."""
    assert threads_made(torch.ones(2 * native.PART - 1), 5) == 0


def test_torch_on_one_thread_leaves_the_kernel_on_one() -> None:
    """Under ``OMP_NUM_THREADS=1``, as usual beside pytest-xdist, the kernel has no more either."""
    with patch.object(torch, "get_num_threads", lambda: 1):
        assert threads_made(torch.ones(4 * native.PART), None) == 0


def test_threads_that_call_at_once_do_not_disturb_each_other() -> None:
    """Python threads that each have a tensor read by several get the bits that one alone gets."""
    values = noise((9, 16, 30, 30))
    alone = reduced(values, 1, 1)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda threads: reduced(values, 1, threads), [2, 3] * 10)
        assert all(each == alone for each in found)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_in_a_call_is_raised_after_it() -> None:
    """Ctrl-C stops a run at once, and leaves the kernel as it was."""
    values = noise((300, 7000))
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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch has threads by then
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_child_process_never_waits_for_its_parents_threads(way: str) -> None:
    """A child of a process that used threads gets the same bits, forked or spawned."""
    values = noise((300, 700))
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
        "from tests.statistics.test_threads import reduced\n"
        "reduced(values, None, 2)\n"
        "assert reduced(values, None, 7) == reduced(values, None, 1)\n"
        "os._exit(0)\n"
    )
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=90)
