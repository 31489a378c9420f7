"""What a run of tests costs with each destination, as a ratio to the run that asks for none.

Usage: ``python -m benchmarks.destinations [--tests 60] [--rounds 7]``

The tests each inspect an MLP of 30 layers; one in ten fails. Every round runs pytest once for each
destination, in turns, in processes of their own; timed is what is between the collection and the
end of the session, so without the start of Python and torch. In the base, the parts of the plugin
that this is about are switched off; ``nothing asked for`` has them, and no option.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.timing import machine

CONFTEST = """
import time

def pytest_collection_finish(session):
    session.began = time.perf_counter()

def pytest_unconfigure(config):
    began = config.pluginmanager.get_plugin("session").began
    with open("seconds", "w") as file:
        file.write(str(time.perf_counter() - began))
"""
TESTS = """
import pytest, torch
import torch.nn.functional as F
from torch import nn

def net(seed):
    torch.manual_seed(seed)
    layers = [m for _ in range(15) for m in (nn.Linear(64, 64), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(64, 3))
    if not seed % 10:
        torch.nn.init.constant_(net[10].bias, -50.0)
    return net

@pytest.mark.parametrize("seed", range({tests}))
def test_net(inspector, seed):
    inspector(net(seed)).run_inspection(
        torch.randn(256, 64), torch.randint(3, (256,)), loss=F.cross_entropy
    )
"""
PARTS = ("recording", "page", "run_json", "github", "gitlab", "junit", "allure", "replay")
DESTINATIONS: dict[str, Sequence[str]] = {
    "base": [argument for part in PARTS for argument in ("-p", f"no:modelhealth.{part}")],
    "nothing asked for": (),
    "--modelhealth-json": ("--modelhealth-json=run.json",),
    "--modelhealth-html": ("--modelhealth-html=page.html",),
    "--modelhealth-replay": ("--modelhealth-replay=bundles",),
    "--modelhealth-codequality": ("--modelhealth-codequality=quality.json",),
    "--junitxml": ("--junitxml=junit.xml",),
    "--modelhealth-artifacts": ("--modelhealth-artifacts=figures",),
}


def seconds(folder: Path, options: Sequence[str]) -> float:
    """Return how long the tests of a folder take under `options`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout.decode() + done.stderr.decode())
    return float((folder / "seconds").read_text())


def measure(tests: int, rounds: int) -> Mapping[str, list[float]]:
    """Return the ratios of each destination to the base, one a round."""
    ratios: dict[str, list[float]] = {name: [] for name in DESTINATIONS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "test_nets.py").write_text(TESTS.replace("{tests}", str(tests)))
        for _ in range(rounds):
            taken = {name: seconds(folder, options) for name, options in DESTINATIONS.items()}
            for name, one in taken.items():
                ratios[name].append(one / taken["base"])
    return ratios


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each destination."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    print(machine())
    for name, ratios in measure(given.tests, given.rounds).items():
        print(f"{name:28} {median(ratios):5.2f}  ({min(ratios):.2f} .. {max(ratios):.2f})")


if __name__ == "__main__":
    main()
