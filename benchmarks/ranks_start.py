"""What a test on several ranks costs beside a plain one.

Usage: ``python -m benchmarks.ranks_start [--rounds 5] [--ranks 2 4]``

Each test inspects a small model and takes a step of an optimizer; on several ranks each does, and
an all-reduce follows. The tests on ranks come first, so that the first of them waits for the
process that ranks are forked from; of the plain ones the first, which imports much, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.timing import digits, header, load, machine, row

CONFTEST = """
import json, time
import pytest

took = {}

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        took.setdefault(item.originalname, []).append(time.perf_counter() - began)

def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        with open("took.json", "w") as file:
            json.dump(took, file)
"""
TEST = """
import pytest, torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

def step(inspector):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    data, labels = torch.randn(256, 20), torch.randint(3, (256,))
    inspector(net).run_inspection(data, target=labels, loss=F.cross_entropy).assert_healthy()
    F.cross_entropy(net(data), labels).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()

@pytest.mark.modelhealth_ranks({ranks})
@pytest.mark.parametrize("number", range({tests}))
def test_on_ranks(rank, inspector, number):
    step(inspector)
    dist.all_reduce(torch.ones(1))

@pytest.mark.parametrize("number", range({tests}))
def test_plain(inspector, number):
    step(inspector)
"""
TESTS = 8


def run(folder: Path, ranks: int) -> dict[str, list[float]]:
    """Return the seconds of each test of a run, by its name."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TEST.format(ranks=ranks, tests=TESTS))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout.decode() + done.stderr.decode())
    took: dict[str, list[float]] = json.loads((folder / "took.json").read_text())
    return took


def measure(ranks: int, rounds: int) -> Mapping[str, list[float]]:
    """Return the seconds of plain tests, of the first on ranks, and of the further ones."""
    found: dict[str, list[float]] = {"plain": [], "first": [], "further": []}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(rounds):
            took = run(Path(name), ranks)
            found["plain"] += took["test_plain"][1:]
            found["first"].append(took["test_on_ranks"][0])
            found["further"] += took["test_on_ranks"][1:]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    print(f"{machine()}; {load()}\n")
    print(header(["ranks", "test", "median s", "least", "most"]))
    for ranks in arguments.ranks:
        for what, values in measure(ranks, arguments.rounds).items():
            ends = digits(median(values)), digits(min(values)), digits(max(values))
            print(row([ranks, what, *ends]), flush=True)
    print(f"\n{load()}")


if __name__ == "__main__":
    main()
