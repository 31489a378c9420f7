"""Runs a function on several ranks: processes with a process group of gloo."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

_PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "pytest_modelhealth.inspector",
]


class RanksFailedError(AssertionError):
    """A rank raised, crashed or took too long; the text has what each said."""


def on_ranks(
    size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 90.0
) -> list[Any]:
    """Return what `function` returns on each rank, in order of ranks.

    Args:
        size: how many ranks.
        function: an importable function; it runs with the process group initialised.
        arguments: what it is called with, picklable.
        seconds: end all ranks after so long.

    Raises:
        RanksFailedError: one of them did not return.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, context) as pool:
        ranks = [
            pool.submit(_rank, rank, size, folder, seconds, function, arguments)
            for rank in range(size)
        ]
        try:
            outcomes = [(rank.exception(seconds + 10), rank) for rank in ranks]
            problems = [f"rank {n}: {e}" for n, (e, _) in enumerate(outcomes) if e is not None]
        finally:
            # one that ends by itself destroys its process group, and waits for the others
            for process in [*pool._processes.values()]:
                process.kill()
    if problems:
        raise RanksFailedError("\n".join(problems))
    return [rank.result() for _, rank in outcomes]


def _rank(
    rank: int,
    size: int,
    folder: str,
    seconds: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(seconds, exit=True)
    store = dist.FileStore(f"{folder}/store", size)
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    try:
        return function(*arguments)
    except BaseException:  # noqa: BLE001 - it is reported by the parent
        raise RuntimeError(traceback.format_exc()) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
