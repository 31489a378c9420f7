"""Runs a function on several ranks: processes with a process group of gloo."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
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
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, size, folder, function, arguments))
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        try:
            _wait(ranks, seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        outcomes = [_outcome(Path(folder), number, rank) for number, rank in enumerate(ranks)]
    problems = [text for failed, text in outcomes if failed]
    if problems:
        raise RanksFailedError("\n".join(problems))
    return [result for _, result in outcomes]


def _wait(ranks: list[BaseProcess], seconds: float) -> None:
    end = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))


def _outcome(folder: Path, number: int, rank: BaseProcess) -> tuple[bool, Any]:
    path = folder / f"outcome{number}"
    if path.exists():
        failed, result = pickle.loads(path.read_bytes())
        return failed, f"rank {number}: {result}" if failed else result
    stacks = folder / f"stacks{number}"
    said = stacks.read_text() if stacks.exists() else ""
    return True, f"rank {number}: ended with exit code {rank.exitcode}\n{said}"


def _rank(
    rank: int, size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with (Path(folder) / f"stacks{rank}").open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.dump_traceback_later(60, file=stacks)
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
        try:
            outcome = (False, function(*arguments))
        except BaseException:  # noqa: BLE001 - it is reported by the parent
            outcome = (True, traceback.format_exc())
        written = Path(folder) / f"outcome{rank}.part"
        written.write_bytes(pickle.dumps(outcome))
        written.rename(Path(folder) / f"outcome{rank}")
        sys.stdout.flush()
        # one that waits to be destroyed waits for the others; give them time to read what is sent
        time.sleep(0.05)
        os._exit(0)
