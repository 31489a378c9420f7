"""Tests on several ranks where torchrun started pytest on each: they run where they are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each starts processes that import torch

TESTS = """
import os
import pytest, torch
import torch.distributed as dist
import nets

on_two = pytest.mark.modelhealth_ranks(2)

def total(rank):
    tensor = torch.tensor(float(rank + 1))
    dist.all_reduce(tensor)
    return tensor

@on_two
def test_sum(rank, snapshot):
    assert total(rank) == 3
    assert "all ranks" == snapshot

@pytest.mark.modelhealth_ranks(3)
def test_of_three(rank): raise AssertionError

@pytest.mark.modelhealth_ranks(1)
def test_of_one(rank): raise AssertionError

@on_two
def test_unhealthy_on_all(rank, inspector):
    inspector(nets.with_nan()).run_inspection(nets.BATCH)

@on_two
def test_sum_again(rank):
    assert total(rank) == 3
"""
ALONE = """
@on_two
def test_alone(rank):
    assert rank == 0

@on_two
def test_never_run(rank):
    assert total(rank) == 3
"""
WAITS = """
@on_two
def test_waits(rank):
    assert rank == 0
    total(rank)
"""


def test_a_run_ends_where_a_rank_fails_alone(nets: pytest.Pytester) -> None:
    """All failing together it goes on; rank 0 shows and writes, the other one says its failure."""
    nets.makepyfile(test_t=TESTS + ALONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--snapshot-update", "--junitxml=junit.xml", "--modelhealth-artifacts=art"]
    result = nets.run(*command, "-m", "pytest", "-rs", *options)
    assert result.ret
    text = result.stdout.str()
    assert text.count("test session starts") == 1
    result.assert_outcomes(passed=3, failed=1, skipped=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "needs 3 ranks, and WORLD_SIZE is 2: start torchrun --nproc-per-node 3 -m pytest, or *",
            "SKIPPED [[]1[]] test_t.py:*: is for 1 of the ranks, and WORLD_SIZE is 2",
            "!* rank 1 alone failed the last test (assert 1 == 0): the process group cannot be *!",
        ]
    )
    assert "test_never_run" not in text
    errors = result.stderr.str()
    assert "FAILED test_t.py::test_unhealthy_on_all on rank 1 of 2\n>   inspector(" in errors
    assert "FAILED test_t.py::test_alone on rank 1 of 2" in errors
    assert len(list((nets.path / "art").iterdir())) == 2
    assert (nets.path / "junit.xml").read_text().count("<testcase") == 6
    assert (nets.path / "__snapshots__" / "test_t.ambr").read_text().count("# name:") == 1


def test_a_rank_that_waits_for_one_that_failed_is_ended(nets: pytest.Pytester) -> None:
    """It says where it waited, and what pytest would have shown of the tests before."""
    nets.makepyfile(test_t=TESTS + WAITS)
    port = _free_port()
    ranks = [_started(rank, port, nets.path) for rank in range(2)]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert (
        "rank 0 of 2: test_t.py::test_waits: still waiting in all_reduce at test_t.py:" in said[0]
    )
    assert "5 s after rank 1: assert 1 == 0" in said[0]
    assert "FAILED test_t.py::test_unhealthy_on_all - unhealthy: 2 (finite)" in said[0]
    assert "FAILED test_t.py::test_waits on rank 1 of 2" in said[1]
    assert "test session starts" not in said[1]


INTERRUPTED = """
import signal
import pytest, torch
import torch.distributed as dist

@pytest.mark.modelhealth_ranks(2)
def test_interrupted(rank):
    if rank == 1:
        signal.raise_signal(signal.SIGINT)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.usefixtures("ctrl_c")
def test_a_rank_that_is_interrupted_keeps_nobody_waiting(pytester: pytest.Pytester) -> None:
    """It ends at once and says so; the other one after its seconds of grace."""
    pytester.makepyfile(test_t=INTERRUPTED)
    port = _free_port()
    ranks = [_started(rank, port, pytester.path) for rank in range(2)]
    said = [rank.communicate(timeout=50)[0] for rank in reversed(ranks)]
    assert ranks[1].returncode == pytest.ExitCode.INTERRUPTED, said[0]
    assert "rank 1 of 2: test_t.py::test_interrupted: interrupted by Ctrl-C" in said[0]
    assert ranks[0].returncode == 1
    is_ended = "5 s after rank 1: interrupted by Ctrl-C" in said[1]
    assert is_ended or "rank 1 was interrupted by Ctrl-C, and came no more" in said[1]


IN_THE_STORE = """
import datetime, signal
import pytest
import torch.distributed as dist
from pytest_modelhealth.plugin.several_ranks import torchrun

class AlwaysAsking:
    def __init__(self, store):
        self.store = store.clone()
    def check(self, keys):
        try:
            self.store.wait(["never"], datetime.timedelta(milliseconds=50))
        except dist.DistStoreError:
            return False

torchrun._another_client = AlwaysAsking
torchrun._WATCH = 0.001

@pytest.mark.modelhealth_ranks(2)
def test_interrupted(rank):
    signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.usefixtures("ctrl_c")
def test_no_thread_is_in_the_store_as_the_process_ends(pytester: pytest.Pytester) -> None:
    """Torch would abort it: "terminate called without an active exception"."""
    pytester.makepyfile(test_t=IN_THE_STORE)
    port = _free_port()
    ranks = [_started(rank, port, pytester.path) for rank in range(2)]
    for rank in ranks:
        said, _ = rank.communicate(timeout=50)
        assert rank.returncode == pytest.ExitCode.INTERRUPTED, said


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def _started(rank: int, port: int, folder: Path) -> subprocess.Popen[str]:
    """Start pytest as torchrun does, but for ending the others as soon as one has ended."""
    variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest"],
        cwd=folder,
        env=os.environ | {name: str(value) for name, value in variables.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_workers_of_xdist_are_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are processes for the tests already."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    pytester.makepyfile(
        "import pytest\n@pytest.mark.modelhealth_ranks(2)\ndef test_it(rank): pass\n"
    )
    result = pytester.runpytest_subprocess("-n1")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("test_it: under torchrun *: leave -n of pytest-xdist out")
