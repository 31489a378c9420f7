"""Tests on several ranks: what a marked test does, and what one that fails says.

A run starts a process that imports torch, so each shows many things at once.
"""

from __future__ import annotations

import json
import os
import re

import pytest

from pytest_modelhealth.plugin.several_ranks import running
from tests.plugin.outcomes import properties

OF_PYTEST = """
import os, warnings
import pytest
import torch
import torch.distributed as dist

on_two = pytest.mark.modelhealth_ranks(2)
HERE = os.getpid()

@pytest.fixture(scope="module")
def made_here():
    yield os.getpid()
    print("torn down in", os.getpid())

def test_before(made_here):
    assert made_here == HERE

@on_two
@pytest.mark.parametrize("odd", ["a/b", "[c]", "d::e"])
def test_collective(rank, odd, made_here, tmp_path, capsys, monkeypatch):
    assert made_here == os.getpid() != os.getppid()
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    assert total == 3
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 2
    folders = [None, None]
    dist.all_gather_object(folders, (str(tmp_path), os.getpid()))
    assert len(set(folders)) == 2

@pytest.fixture(scope="session")
def number(rank):
    return rank

@pytest.mark.modelhealth_ranks(3)
class TestClass:
    def test_method(self, number):
        assert number == dist.get_rank()

@on_two
@pytest.mark.xfail(strict=True, reason="known")
def test_known(rank):
    assert rank == 0

@on_two
@pytest.mark.xfail(strict=True)
def test_better_than_known_on_rank_0(rank):
    assert rank == 0, "as expected"

@on_two
@pytest.mark.skip(reason="not here")
def test_skipped(rank): raise AssertionError

@on_two
def test_skips(rank):
    pytest.skip("found inside")

@on_two
def test_warns(rank):
    warnings.warn("from each rank")

@on_two
def test_fails_on_rank_1(rank, record_property):
    record_property("odd", torch.ones(2))
    print("printed on rank", rank)
    if rank == 1:
        assert [rank] == [2]
    dist.all_reduce(torch.ones(2))

@on_two
def test_fails_on_all(rank):
    assert rank < 0, "the same"

@on_two
def test_setup_fails(breaks): raise AssertionError

@pytest.fixture
def breaks(rank):
    if rank == 1:
        raise RuntimeError("no such file")
    dist.barrier()

@on_two
def test_teardown_fails(breaks_afterwards): pass

@pytest.fixture
def breaks_afterwards(rank):
    yield
    if rank == 1:
        raise RuntimeError("not closed")

@on_two
def test_crashes(rank):
    dist.barrier()
    if rank == 1:
        os._exit(3)
    dist.barrier()

@on_two
def test_forgets_a_rank(rank):
    if rank == 1:
        dist.barrier()

def test_after():
    assert os.getpid() == HERE
    assert not dist.is_initialized()
"""


def test_a_marked_test_is_run_on_its_ranks_and_says_one_thing(pytester: pytest.Pytester) -> None:
    """Fixtures, parameters, classes, marks and warnings are pytest's own; failures name the rank.

    Fixtures of tests before and after are set up in this process, and its own in the ranks.
    """
    pytester.makepyfile(test_ways=OF_PYTEST)
    result = pytester.runpytest("-rA")
    text = result.stdout.str()
    result.assert_outcomes(passed=8, failed=4, errors=2, skipped=2, xfailed=2, warnings=1)
    assert text.count("UserWarning: from each rank") == 1
    assert text.count(f"torn down in {os.getpid()}\n") == 1

    section = _section(text, "test_fails_on_rank_1")
    assert "assert [rank] == [2]" in section
    assert "E           assert [1] == [2]" in section
    assert "- rank 1 of 2 -" in section
    assert re.search(r"rank 0: lost its connection at \S+py:\d+", section)
    assert "printed on rank 1" in section
    assert "printed on rank 0" not in section

    assert "- rank 0 of 2 -\nrank 1: AssertionError: the same at " in _narrow(
        _section(text, "test_fails_on_all")
    )
    crashed = _section(text, "test_crashes")
    assert "rank 1 of 2: exit code 3" in crashed
    forgotten = _section(text, "test_forgets_a_rank")
    assert "rank 0: passed" in forgotten
    assert "A collective waits until all ranks" in forgotten

    result.stdout.fnmatch_lines_random(
        [
            "FAILED *::test_fails_on_rank_1 - rank 1 of 2: assert [[]1[]] == [[]2[]]",
            "FAILED *::test_fails_on_all - rank 0 of 2: AssertionError: the same*",
            "FAILED *::test_crashes - Failed: rank 1 of 2: exit code 3",
            "FAILED *::test_forgets_a_rank - rank 1 of 2: lost its connection at *",
            "ERROR *::test_setup_fails - rank 1 of 2: RuntimeError: no such file",
            "ERROR *::test_teardown_fails - rank 1 of 2: RuntimeError: not closed",
            "XFAIL *::test_known - known",
            "PASSED *::test_collective[[]d::e[]]",
            "PASSED *::TestClass::test_method",
        ]
    )


RESULTS = """
import pytest, torch
import nets

on_two = pytest.mark.modelhealth_ranks(2)

@on_two
def test_recorded(rank, inspector, health_snapshot, snapshot):
    assert inspector(nets.healthy()).run_inspection(nets.BATCH) == health_snapshot
    assert {"of": "all ranks"} == snapshot

def test_recorded_here(snapshot):
    assert "in the same file" == snapshot

@on_two
def test_unhealthy_on_rank_1(rank, inspector, record_property):
    record_property("tensor", torch.ones(2))
    inspector(nets.with_nan() if rank else nets.healthy()).run_inspection(nets.BATCH)

@on_two
def test_unhealthy_on_all(rank, inspector):
    inspector(nets.with_nan()).run_inspection(nets.BATCH)

@on_two
def test_crashes(rank):
    __import__("os")._exit(rank)
"""


@pytest.mark.slow
def test_every_destination_gets_the_results_of_the_rank_that_is_reported(
    nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots, HTML, JUnit, JSON, artifacts and bundles; those of other ranks are apart.

    Rank 0 alone records snapshots, and the next run finds none unused.
    """
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # by which syrupy says nothing
    nets.makepyfile(test_r=RESULTS)
    result = nets.runpytest(
        "--snapshot-update",
        "--html=page.html",
        "--self-contained-html",
        "--junitxml=junit.xml",
        "--modelhealth-json=run.json",
        "--modelhealth-artifacts=art",
        "--modelhealth-replay=bundles",
        "--pdb",
    )
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines_random(
        [
            "1 snapshot generated.",
            "modelhealth: snapshot __snapshots__/test_r/test_recorded.health: recorded for *",
            "modelhealth: figures of 2 tests in *",
            "FAILED *::test_unhealthy_on_rank_1 - rank 1 of 2: unhealthy: 2 (finite): *",
        ]
    )
    names = sorted(path.name.rpartition("-")[2] for path in (nets.path / "art").iterdir())
    assert names.count("rank1") == 2  # that of one test, and the second rank of the other
    assert len(names) == 3

    run = json.loads((nets.path / "run.json").read_text())
    made = {test["id"].rpartition("::")[2]: test for test in run["tests"]}
    assert {name: len(test["results"]) for name, test in made.items()} == {
        "test_recorded": 2,
        "test_unhealthy_on_rank_1": 1,
        "test_unhealthy_on_all": 1,
        "test_crashes": 0,
    }
    assert made["test_unhealthy_on_rank_1"]["outcome"] == "failed"
    assert made["test_unhealthy_on_rank_1"]["results"][0]["violations"]

    told = dict(properties(nets.path / "junit.xml")["test_unhealthy_on_rank_1"])
    assert (told["verdict"], told["tensor"]) == ("unhealthy", "tensor([1., 1.])")
    assert (nets.path / "page.html").read_text().count("data:image/png") >= 2

    again = nets.runpytest_subprocess("-n1", "-k", "recorded")
    again.assert_outcomes(passed=2)
    again.stdout.fnmatch_lines("1 snapshot passed.")
    assert "unused" not in again.stdout.str()


WRONG = ("", "2, 3", "'2'", "True", "0", "2, seconds=0", "2, seconds='x'", "2, second=3")


def test_a_wrong_mark_is_an_error_of_the_test_that_has_it(pytester: pytest.Pytester) -> None:
    """The others of its file run. So it is with the fixture without the mark."""
    for number, mark in enumerate(WRONG):
        path = pytester.path / f"test_wrong{number}.py"
        path.write_text(
            f"import pytest\n@pytest.mark.modelhealth_ranks({mark})\n"
            "def test_it(): pass\ndef test_other(): pass\n"
        )
    pytester.makepyfile(
        test_unmarked="def test_it(rank): pass",
        test_own="""
        import pytest

        @pytest.mark.parametrize("rank", [7])
        def test_parameter(rank): assert rank == 7

        def test_found_late(request):
            assert request.getfixturevalue("rank")

        class TestOwn:
            @pytest.fixture
            def rank(self): return 8

            def test_fixture(self, rank): assert rank == 8
        """,
    )
    result = pytester.runpytest("--strict-markers")
    result.assert_outcomes(errors=len(WRONG) + 1, passed=len(WRONG) + 2, failed=1)
    for mark in WRONG:
        text = f"@modelhealth_ranks({mark}) on test_it: it takes the number of ranks, a whole"
        assert text in result.stdout.str()
    needs = "the fixture rank is for tests marked with @pytest.mark.modelhealth_ranks(2)"
    assert result.stdout.str().count(needs) >= 2


def _section(text: str, name: str) -> str:
    """Return what is shown of a failing test."""
    return re.split(r"^_{3,} ", text.partition(f" {name} ___")[2], flags=re.MULTILINE)[0]


def _narrow(text: str) -> str:
    return re.sub("-{2,}", "-", text)


STUCK = """
import ctypes, time
import pytest, torch
import torch.distributed as dist
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Linear(4, 4)

    def forward(self, x):
        gathered = [torch.empty_like(x), torch.empty_like(x)]
        dist.all_gather(gathered, self.down(x))
        return x

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(60)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.blocks(x)

@pytest.mark.modelhealth_ranks(2, seconds=1.5)
def test_over_the_limit(rank):
    net = Net()
    if rank == 1:
        net.blocks[1].down = Slow()
    net(torch.ones(2, 4))

@pytest.mark.timeout(1.5)
@pytest.mark.modelhealth_ranks(2)
def test_in_native_code(rank):
    if rank == 1:
        ctypes.PyDLL(None).sleep(60)
    dist.barrier()

@pytest.mark.modelhealth_ranks(2)
def test_waits_for_nobody(rank):
    if rank == 1:
        raise ValueError("alone")
    time.sleep(60)
"""


@pytest.mark.slow
def test_ranks_that_wait_are_ended_and_say_where(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of the mark or of pytest-timeout, or some seconds after a rank failed alone."""
    monkeypatch.setattr(running, "GRACE", 0.5)
    pytester.makepyfile(test_stuck=STUCK)
    result = pytester.runpytest("--maxfail=3", "-p", "no:xdist")
    text = result.stdout.str()
    result.assert_outcomes(failed=3)

    limit = _section(text, "test_over_the_limit")
    line = STUCK.strip().splitlines().index("        time.sleep(60)") + 1
    first = r"rank 0 waiting in all_gather at test_stuck.py:\d+"
    second = rf"rank 1 at test_stuck.py:{line}"
    assert re.search(f"took longer than 1.5 s: {first}; {second}", limit)
    for rank in (0, 1):
        assert "in test_over_the_limit" in limit.partition(f"\nrank {rank}:\n")[2]

    native = _section(text, "test_in_native_code")
    line = r"rank 0 waiting in barrier at test_stuck.py:\d+; rank 1 at test_stuck.py:\d+"
    assert re.search(line, native)
    assert "/_pytest/" not in native

    alone = _section(text, "test_waits_for_nobody")
    assert "ValueError: alone" in alone
    assert re.search(r"rank 0: at test_stuck.py:\d+", alone)
