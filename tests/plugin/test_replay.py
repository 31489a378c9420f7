"""`--modelhealth-replay`: what is saved, when, how it is run again, and that it harms no result."""

from __future__ import annotations

import errno
import json
import shlex
import signal
from pathlib import Path

import pytest
import torch

from pytest_modelhealth.bundles.data import read

OPTIONS = ("--modelhealth-replay=out", "-p", "no:cacheprovider")

CHANCE = '''
import nets, torch
import torch.nn.functional as F

def chance():
    """Return a model that nothing but its own random numbers decides on."""
    torch.seed()
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))

def test_chance(inspector):
    """Fails by a row that is another one each time, in its second inspection."""
    inspector(nets.healthy()).run_inspection(nets.BATCH)
    model = chance()
    batch = torch.randn(64, 4)
    batch[int(torch.randint(64, ())), 1] = float("nan")
    report = inspector(model).run_inspection(batch, torch.randint(2, (64,)), loss=lambda o, t: F.cross_entropy(o, t))
    print(f"loss {report.loss!r} {report['0'].activations.mean!r} {report['1'].activations.nan_count}")
    report.assert_healthy()
'''  # noqa: E501


def bundles(pytester: pytest.Pytester) -> list[Path]:
    """Return the files in the directory; nothing is left beside them."""
    return sorted(pytester.path.joinpath("out").iterdir())


def replay(pytester: pytest.Pytester, path: Path, *tests: str) -> pytest.RunResult:
    """Run tests on a bundle."""
    options = (f"--modelhealth-replay-from={path}", "-p", "no:cacheprovider")
    return pytester.runpytest_inprocess(*options, *tests)


def test_a_failure_is_saved_and_run_again(nets: pytest.Pytester) -> None:
    """By the command in its text: the test's second inspection, with the batch of then."""
    nets.makepyfile(test_it=CHANCE)
    result = nets.runpytest(*OPTIONS, "--modelhealth-json=run.json")
    result.assert_outcomes(failed=1)
    (path,) = bundles(nets)
    command = f"pytest --modelhealth-replay-from=out/{path.name} test_it.py::test_chance"
    result.stdout.fnmatch_lines(["*- modelhealth: replay -*", f"{command} *MB)"])
    result.stdout.fnmatch_lines([f"modelhealth: 1 failing inspection saved; *: {command}"])
    assert read(path)["test"] == {"id": "test_it.py::test_chance", "number": 2}
    (told,) = json.loads((nets.path / "run.json").read_text("ascii"))["tests"]
    assert told["replay"] == command

    def printed(result: pytest.RunResult) -> list[str]:
        return [line for line in result.outlines if line.startswith("loss ")]

    moved = path.rename(nets.mkdir("elsewhere") / "moved")
    again = replay(nets, moved, "test_it.py::test_chance")
    assert again.ret == 1
    assert printed(again) == printed(result)
    again.stdout.fnmatch_lines(["modelhealth: replayed: the same verdict and numbers as then, *"])
    assert bundles(nets) == []


@pytest.mark.slow
def test_wherever_a_test_inspects(nets: pytest.Pytester) -> None:
    """In a fixture, a test with an odd name or a directory of its own, under the project's options.

    The commands run as they are printed.
    """
    nets.makeini("[pytest]\naddopts = --modelhealth-replay=out -n 1 -p no:cacheprovider")
    nets.makepyfile(
        test_it="""
        import nets, pytest

        @pytest.fixture
        def model(inspector):
            inspector(nets.with_nan()).run_inspection(nets.BATCH).assert_healthy()

        def test_fixture(model): ...

        @pytest.mark.parametrize("name", ["a/b <i>\x1b[31m $(x) 'y'"])
        def test_elsewhere(inspector, name, tmp_path, monkeypatch):
            monkeypatch.chdir(tmp_path)
            inspector(nets.with_nan()).run_inspection(nets.BATCH)
        """
    )
    result = nets.runpytest_subprocess()
    result.assert_outcomes(failed=1, errors=1)
    commands = [line for line in result.outlines if line.startswith("pytest --modelhealth-replay")]
    assert len(commands) == len(bundles(nets)) == 2
    for command in commands:
        _, *arguments = shlex.split(command.rpartition("   (")[0])
        again = nets.runpytest_subprocess(*arguments)
        assert again.ret == 1
        again.stdout.fnmatch_lines(["modelhealth: replayed: the same *, bit for bit"])


def test_a_fault_that_was_mended_passes(nets: pytest.Pytester) -> None:
    """The replay runs the code of now on the batch of then, and exits with 0.

    What fails by limits of an assertion alone is saved when it does.
    """
    broken = """
        import nets, torch
        from torch import nn

        class Net(nn.Linear):
            def forward(self, x):
                return torch.log(super().forward(x))

        def test_it(inspector):
            inspector(Net(4, 4)).run_inspection(torch.randn(64, 4))

        def test_limit(inspector):
            report = inspector(nets.healthy()).run_inspection(nets.BATCH)
            torch.rand(9)
            report.assert_healthy(max_grad_norm=1e-9)
    """
    nets.makepyfile(test_it=broken)
    nets.runpytest(*OPTIONS).assert_outcomes(failed=2)
    mended, limit = bundles(nets)
    again = replay(nets, limit)
    assert again.ret == 1
    again.stdout.fnmatch_lines(["*1e-09  argument of assert_healthy*", "*as then, bit for bit"])
    nets.makepyfile(test_it=broken.replace("torch.log(", "torch.tanh("))
    again = replay(nets, mended, "test_it.py::test_it")
    assert again.ret == 0
    again.stdout.fnmatch_lines(["*: replayed, and not as then: verdict was unhealthy, is healthy*"])


def test_without_a_failure_nothing_stays(nets: pytest.Pytester) -> None:
    """Nor of a test that passes with an unhealthy report, is expected to fail, or is skipped."""
    nets.makepyfile(
        """
        import nets, pytest

        def test_healthy(inspector):
            inspector(nets.healthy()).run_inspection(nets.BATCH)

        def test_expects_it(inspector):
            assert not inspector(nets.with_nan()).run_inspection(nets.BATCH).healthy

        @pytest.mark.xfail
        def test_xfail(inspector):
            inspector(nets.with_nan()).run_inspection(nets.BATCH)

        def test_skip(inspector):
            inspector(nets.with_nan()).run_inspection(nets.BATCH)
            pytest.skip("after all")
        """
    )
    result = nets.runpytest(*OPTIONS)
    result.assert_outcomes(passed=2, xfailed=1, skipped=1)
    assert bundles(nets) == []
    assert "replay" not in result.stdout.str().partition("collected")[2]


def test_the_inspection_is_saved_that_the_test_failed_by(
    nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several that fail; the first of them where another assertion failed it.

    Another run replaces the files; started by torchrun, each process has files of its own.
    """
    nets.makepyfile(
        """
        import nets

        def test_1_fails_by_its_second(inspector):
            inspector(nets.with_nan()).run_inspection(nets.BATCH)
            inspector(nets.with_nan()).run_inspection(nets.BATCH[:20]).assert_healthy()

        def test_2_unasked(inspector):
            for _ in range(3):
                inspector(nets.with_nan()).run_inspection(nets.BATCH)

        def test_3_by_another_assertion(inspector):
            assert inspector(nets.healthy()).run_inspection(nets.BATCH)
            for _ in range(3):
                report = inspector(nets.with_nan()).run_inspection(nets.BATCH)
            assert report.healthy
        """
    )
    for _ in range(2):
        result = nets.runpytest(*OPTIONS)
        result.assert_outcomes(failed=3)
        assert [read(path)["test"]["number"] for path in bundles(nets)] == [2, 1, 2]
    monkeypatch.setenv("RANK", "3")
    nets.runpytest(*OPTIONS, "-k", "unasked")
    assert [path.stem[-6:] for path in bundles(nets)].count("-rank3") == 1
    result.stdout.fnmatch_lines(["modelhealth: 3 failing inspections saved; run it again: *"])


def test_why_nothing_was_saved(nets: pytest.Pytester) -> None:
    """A bundle of something else than what failed is worse than none.

    A comparison, a training step and a run over batches cannot be replayed.
    """
    nets.makepyfile(
        """
        import nets, pytest, torch

        CHANGES = {
            "written": lambda inspector, model: torch.nn.init.ones_(model[0].weight),
            "another": lambda inspector, model: inspector(model).run_inspection(nets.BATCH),
        }

        @pytest.mark.parametrize("change", CHANGES)
        def test_between(inspector, change):
            model = nets.healthy()
            report = inspector(model).run_inspection(nets.BATCH)
            CHANGES[change](inspector, model)
            report.assert_healthy(max_grad_norm=1e-9)

        def test_comparison(inspector):
            inspector.compare(nets.healthy(), nets.with_nan(), nets.BATCH).assert_equivalent()

        def test_batches(inspector):
            inspector(nets.with_nan()).run_batches([nets.BATCH]).assert_healthy()
        """
    )
    result = nets.runpytest(*OPTIONS)
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            f"no bundle of this failure: {why} *"
            for why in (
                "its model or batch was written",
                "it is of no run_inspection, or another one followed",
                "it is of no run_inspection, or another one followed",
                "it is of no run_inspection, or another one followed",
            )
        ]
    )
    assert bundles(nets) == []


UNHEALTHY = """
    import nets, pytest, shutil

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_it(inspector, n):
        if WHAT == "lost":
            shutil.rmtree("out", True)
            open("out", "w").close()
        inspector(nets.with_nan()).run_inspection(nets.BATCH)
"""


@pytest.mark.parametrize("what", ["full", "full under -W error", "lost"])
def test_what_cannot_be_written_costs_one_warning(
    nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each test fails as it would, and nothing half-written stays."""
    nets.makepyfile(UNHEALTHY.replace("WHAT", repr(what)))
    full = OSError(errno.ENOSPC, "No space left on device")

    def save(*_: object) -> None:
        raise full

    if what != "lost":
        monkeypatch.setattr(torch, "save", save)
    filters = "error" if "error" in what else "default"
    result = nets.runpytest(*OPTIONS, "-W", filters)
    result.assert_outcomes(failed=3, warnings=filters == "default")
    assert result.stdout.str().count("\nno bundle of this failure: it could not be written: ") == 3
    assert result.stdout.str().count("E   unhealthy: 2 (finite)") == 3
    if what != "lost":
        assert bundles(nets) == []


def test_ctrl_c_leaves_nothing_behind(nets: pytest.Pytester, ctrl_c: None) -> None:
    """A bundle that waited for the end of its test is removed."""
    nets.makepyfile(
        """
        import nets, os, signal

        def test_it(inspector):
            report = inspector(nets.with_nan()).run_inspection(nets.BATCH)
            assert len(os.listdir("out")) == 1
            signal.raise_signal(signal.SIGINT)
        """
    )
    result = nets.runpytest(*OPTIONS, no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert bundles(nets) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_replays_nothing_is_wrong_use(nets: pytest.Pytester) -> None:
    """Exit status 4, and the reason: another model, fewer inspections, another test."""
    nets.makepyfile(test_it=CHANCE)
    nets.runpytest(*OPTIONS)
    (path,) = bundles(nets)

    def refused(told: str) -> None:
        result = replay(nets, path)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert told in result.stdout.str()

    nets.makepyfile(test_it=CHANCE.replace("inspector(nets.healthy())", "inspector.settings #"))
    refused("nothing was replayed of inspection 2 of test_it.py::test_chance, which began 1 here")
    nets.makepyfile(
        test_it=CHANCE.replace("Linear(4, 8)", "Linear(4, 9)").replace("(8, 2)", "(9, 2)")
    )
    refused("is of another model, Sequential: '0.weight' was 8x4 float32, is 9x4 float32")
    nets.makepyfile(test_it=CHANCE.replace("test_chance", "test_other"))
    refused("nothing was replayed of inspection 2 of test_it.py::test_chance, which began 0 here")
