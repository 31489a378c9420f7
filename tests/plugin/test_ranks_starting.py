"""How ranks are started and ended: nothing of them is left, however the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLEEPING = """
import os, subprocess, sys, time
from pathlib import Path
import pytest

def test_none(): pass  # xdist gives a worker one test at least

@pytest.mark.modelhealth_ranks(2)
def test_sleeps(rank):
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    processes = [os.getpid(), os.getppid(), started.pid]
    part = Path(f"part{rank}")
    part.write_text(" ".join(map(str, processes)))
    part.rename(f"processes{rank}")
    time.sleep(60)
"""
WAYS = {
    "Ctrl-C": ("whole group", signal.SIGINT, []),
    "SIGTERM": ("pytest", signal.SIGTERM, []),
    "SIGKILL": ("pytest", signal.SIGKILL, []),
    "SIGKILL of a rank": ("rank", signal.SIGKILL, []),
    "SIGKILL under xdist": ("pytest", signal.SIGKILL, ["-n2"]),
}


class Run:
    """A run of `SLEEPING` in a process group of its own."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        folder.mkdir()
        folder.joinpath("test_sleeping.py").write_text(SLEEPING)
        folder.joinpath("pytest.ini").write_text("[pytest]\n")
        self.folder = folder
        with (folder / "output").open("w") as output:
            self.pytest = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_asleep(self) -> bool:
        return all((self.folder / f"processes{rank}").exists() for rank in range(2))

    def processes(self) -> list[list[int]]:
        """The rank, the server and what the rank started, of each rank."""
        files = (self.folder / f"processes{rank}" for rank in range(2))
        return [[int(number) for number in file.read_text().split()] for file in files]

    def end(self, who: str, number: int) -> None:
        (rank, *_), _ = self.processes()
        if who == "whole group":
            os.killpg(self.pytest.pid, number)
        else:
            os.kill(self.pytest.pid if who == "pytest" else rank, number)


def _is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's list of processes")
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.slow
def test_no_rank_outlives_pytest(tmp_path: Path) -> None:
    """Nor what a rank started, nor the process that ranks are forked from."""
    runs = {way: Run(tmp_path / way, options) for way, (*_, options) in WAYS.items()}
    try:
        _until(lambda: all(run.is_asleep() for run in runs.values()), seconds=90)
        processes = {way: run.processes() for way, run in runs.items()}
        for way, (who, number, _) in WAYS.items():
            runs[way].end(who, number)
        for way, run in runs.items():
            run.pytest.wait(30)
            started = [process for one in processes[way] for process in one]
            _until(lambda started=started: not any(map(_is_alive, started)), seconds=10)  # type: ignore[misc]
    finally:
        for run in runs.values():
            run.pytest.kill()
            run.pytest.wait()
    assert "KeyboardInterrupt" in (runs["Ctrl-C"].folder / "output").read_text()
    killed = (runs["SIGKILL of a rank"].folder / "output").read_text()
    assert "rank 0 of 2: killed by SIGKILL" in killed


def _until(holds: object, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def test_nothing_is_started_for_tests_that_do_not_run(pytester: pytest.Pytester) -> None:
    """Neither for those that are deselected or skipped, nor to collect."""
    marked = "import pytest\npytestmark = pytest.mark.modelhealth_ranks(2)\n"
    pytester.makepyfile(
        test_skipped=marked + "@pytest.mark.skip\ndef test_skipped(rank): pass\n",
        test_marked=marked + "def test_marked(rank): pass\n",
        test_plain="""
        import sys

        def test_plain():
            started = [name for name in sys.modules if ".several_ranks." in name]
            assert not started
            assert "torch" not in sys.modules
        """,
    )
    assert pytester.runpytest_subprocess("-k", "plain").ret == pytest.ExitCode.OK
    assert pytester.runpytest_subprocess("--collect-only").ret == pytest.ExitCode.OK


# ---- under torchrun ------------------------------------------------------------------------------


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


@pytest.mark.slow
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


@pytest.mark.slow
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
