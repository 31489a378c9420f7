"""Tests on several ranks where torchrun started pytest on each: they run where they are."""

from __future__ import annotations

import sys

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


def test_a_run_ends_where_a_rank_fails_alone(nets: pytest.Pytester) -> None:
    """All failing together it goes on; rank 0 shows and writes, the other one says its failure."""
    nets.makepyfile(test_t=TESTS + ALONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--snapshot-update", "--junitxml=junit.xml", "--modelhealth-artifacts=art"]
    result = nets.run(*command, "-m", "pytest", "-rs", *options)
    assert result.ret
    result.assert_outcomes(passed=3, failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED [[]1[]] test_t.py:*: is for 3 ranks, and WORLD_SIZE is 2",
            "!* rank 1 was before test_t.py::test_never_run, after *::test_alone failed while *",
        ]
    )
    errors = result.stderr.str()
    assert "FAILED test_t.py::test_unhealthy_on_all on rank 1 of 2\n>   inspector(" in errors
    assert "FAILED test_t.py::test_alone on rank 1 of 2" in errors
    assert len(list((nets.path / "art").iterdir())) == 2
    assert (nets.path / "junit.xml").read_text().count("<testcase") == 5
    assert (nets.path / "__snapshots__" / "test_t.ambr").read_text().count("# name:") == 1


def test_workers_of_xdist_are_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are processes for the tests already."""
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    pytester.makepyfile(
        "import pytest\n@pytest.mark.modelhealth_ranks(2)\ndef test_it(rank): pass\n"
    )
    result = pytester.runpytest_subprocess("-n1")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("test_it: under torchrun *: leave -n of pytest-xdist out")
