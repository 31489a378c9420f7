"""`--modelhealth-replay`: what is saved, when, how it is run again, and that it harms no result."""

from __future__ import annotations

import contextlib
import errno
import io
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from pytest_modelhealth.bundles.file import allowed, read
from pytest_modelhealth.commands import main

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
    """Return the folders in the directory; nothing is left beside them."""
    return sorted(pytester.path.joinpath("out").iterdir())


def number(folder: Path) -> int:
    """Return which inspection of its test a bundle is."""
    return read(folder).content["test"]["number"]


def replayed(pytester: pytest.Pytester, *arguments: object) -> SimpleNamespace:
    """Run the command in this process, and the test that it starts, too."""

    def run(command: list[str], *, check: bool) -> SimpleNamespace:
        assert command[:3] == [sys.executable, "-m", "pytest"]
        return SimpleNamespace(returncode=pytester.runpytest_inprocess(*command[3:]).ret)

    output, errors = io.StringIO(), io.StringIO()
    given: dict[str, Any] = {"stdout": output, "stderr": errors}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(mock.patch.object(subprocess, "run", run))
        status = main(["replay", *map(str, arguments)])
    for name, module in list(sys.modules.items()):  # what --model imported may be another next time
        if str(getattr(module, "__file__", "")).startswith(str(pytester.path)):
            del sys.modules[name]
    return SimpleNamespace(returncode=status, **{k: v.getvalue() for k, v in given.items()})


def test_a_failure_is_saved_and_run_again(nets: pytest.Pytester) -> None:
    """By the command in its text: the test's second inspection, with the batch of then."""
    nets.makepyfile(test_it=CHANCE)
    result = nets.runpytest(*OPTIONS)
    result.assert_outcomes(failed=1)
    (folder,) = bundles(nets)
    command = f"python -m pytest_modelhealth replay out/{folder.name}"
    result.stdout.fnmatch_lines(["*- modelhealth: replay -*", f"{command} *MB)"])
    result.stdout.fnmatch_lines([f"modelhealth: 1 failing inspection saved; *: {command}"])
    assert sorted(path.name for path in folder.iterdir()) == [
        "failure.txt", "inspection.pt",
    ]  # fmt: skip
    assert read(folder).content["test"] == {
        "id": "test_it.py::test_chance", "number": 2, "place": "test_it.py:15",
    }  # fmt: skip
    assert "(finite)" in (folder / "failure.txt").read_text()

    def printed(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith("loss ")]

    command = command.replace("python", sys.executable, 1).rstrip()
    whole = nets.run(*command.split())
    assert whole.ret == 1
    assert printed(whole.stdout.str()) == printed(result.stdout.str())
    assert "bit for bit: replayed " in whole.stdout.str()
    assert bundles(nets) == [folder]

    alone = replayed(nets, f"out/{folder.name}", "--model", "test_it:chance")
    assert alone.returncode == 2
    assert "test_it.py:15), which no bundle holds" in alone.stderr
    moved = folder.rename(nets.mkdir("elsewhere") / "moved")
    alone = replayed(
        nets, moved, "--model=test_it:chance", "--loss=torch.nn.functional:cross_entropy"
    )
    assert alone.returncode == 1, alone.stderr
    assert "bit for bit" in alone.stdout


@pytest.mark.slow
def test_wherever_a_test_inspects(nets: pytest.Pytester) -> None:
    """In a fixture, a subtest or a directory of its own, under options of the project."""
    nets.makeini("[pytest]\naddopts = --modelhealth-replay=out -n 2 -m 'not slow'")
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
    result = nets.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, errors=1)
    folders = bundles(nets)
    assert len(folders) == 2
    for folder in folders:
        again = replayed(nets, folder)
        assert again.returncode == 1, again.stdout
        assert "bit for bit" in again.stdout


def test_a_fault_that_was_mended_passes(nets: pytest.Pytester) -> None:
    """The replay runs the code of now on the batch of then, and exits with 0."""
    broken = """
        import torch
        from torch import nn

        class Net(nn.Linear):
            def forward(self, x):
                return torch.log(super().forward(x))

        def test_it(inspector):
            inspector(Net(4, 4)).run_inspection(torch.randn(64, 4))
    """
    nets.makepyfile(test_it=broken)
    nets.runpytest(*OPTIONS).assert_outcomes(failed=1)
    (folder,) = bundles(nets)
    nets.makepyfile(test_it=broken.replace("torch.log(", "torch.tanh("))
    again = replayed(nets, folder)
    assert again.returncode == 0, again.stdout
    assert "not as then: verdict was unhealthy, is healthy" in again.stdout


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


def test_several_failures_of_one_test(nets: pytest.Pytester) -> None:
    """Each has a folder, that of the error first; another run replaces them, not other files.

    Of a loop the first three are kept and the latest, on which it ends.
    """
    nets.makepyfile(
        """
        import nets

        def test_a(inspector):
            inspector(nets.with_nan()).run_inspection(nets.BATCH)
            inspector(nets.with_nan()).run_inspection(nets.BATCH[:20]).assert_healthy()

        def test_loop(inspector):
            for _ in range(9):
                report = inspector(nets.with_nan()).run_inspection(nets.BATCH)
            report.assert_healthy()
        """
    )
    for _ in range(2):
        result = nets.runpytest(*OPTIONS, "--modelhealth-artifacts=out")
        result.assert_outcomes(failed=2)
        first, second, *loop = bundles(nets)
        assert second.name == f"{first.name}-2"
        assert [number(folder) for folder in (first, second)] == [2, 1]
        assert [number(folder) for folder in loop] == [9, 1, 2, 3]
        assert (first / "culprit.png").exists()
    result.stdout.fnmatch_lines(["modelhealth: 6 inspections saved in */out; run it again: *"])


def test_limits_of_an_assertion_are_saved(nets: pytest.Pytester) -> None:
    """What fails by them alone is saved when it does, under them."""
    nets.makepyfile(
        """
        import nets, torch

        def test_it(inspector):
            report = inspector(nets.healthy()).run_inspection(nets.BATCH)
            torch.rand(9)
            report.assert_healthy(max_grad_norm=1e-9)
        """
    )
    nets.runpytest(*OPTIONS).assert_outcomes(failed=1)
    (folder,) = bundles(nets)
    again = replayed(nets, folder, "--model=nets:healthy")
    assert again.returncode == 1, again.stderr
    assert "1e-09  argument of assert_healthy" in again.stdout
    assert "bit for bit" in again.stdout


def test_why_nothing_was_saved(nets: pytest.Pytester) -> None:
    """A bundle of something else than what failed is worse than none.

    A comparison, a training step and a monitor cannot be replayed.
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

        def test_step(inspector):
            model = nets.with_nan()
            optimizer = torch.optim.SGD(model.parameters())
            inspector(model).run_step(None, optimizer, inputs=nets.BATCH).assert_healthy()
        """
    )
    result = nets.runpytest(*OPTIONS)
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            f"no bundle of this failure: {why} *"
            for why in (
                "model or batch changed between",
                "another inspection followed it",
                "a comparison of two models",
                "run_step, monitors and removable",
            )
        ]
    )
    assert bundles(nets) == []


UNHEALTHY = """
    import nets, pytest

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_it(inspector, n):
        inspector(nets.with_nan()).run_inspection(nets.BATCH)
"""


@pytest.mark.parametrize("filters", ["default", "error"])
def test_a_full_disk_costs_one_warning(
    nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, filters: str
) -> None:
    """Each test fails as it would, and nothing half-written stays."""
    nets.makepyfile(UNHEALTHY)
    full = OSError(errno.ENOSPC, "No space left on device")

    def save(*_: object) -> None:
        raise full

    monkeypatch.setattr(torch, "save", save)
    result = nets.runpytest(*OPTIONS, "-W", filters)
    result.assert_outcomes(failed=3, warnings=filters == "default")
    lines = [line for line in result.outlines if line.startswith("no bundle of this failure")]
    assert len(lines) == 3
    assert all("No space left on device" in line for line in lines)
    assert result.stdout.str().count("E   unhealthy: 2 (finite)") == 3
    assert bundles(nets) == []


def test_a_directory_lost_meanwhile(nets: pytest.Pytester) -> None:
    """As a full disk: nothing of the failure is lost."""
    lost = "shutil.rmtree('out', True); open('out', 'w').close()"
    code = UNHEALTHY.replace("nets, pytest", "nets, pytest, shutil")
    nets.makepyfile(code.replace("inspector(nets", f"{lost}\n        inspector(nets"))
    result = nets.runpytest(*OPTIONS, "-W", "default")
    result.assert_outcomes(failed=3, warnings=1)
    result.stdout.fnmatch_lines(["no bundle of this failure: it could not be written: *"])


def test_parts_left_out_are_told(nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, in the failure; the test gives the replay what it makes itself.

    Started by torchrun, each process writes to folders of its own.
    """
    nets.makepyfile(UNHEALTHY)
    monkeypatch.setenv("RANK", "3")
    result = nets.runpytest(*OPTIONS, "--modelhealth-replay-without=weights,inputs", "-k", "1")
    result.stdout.fnmatch_lines(
        ["*without weights: left out as *", "*without inputs: left out as *"]
    )
    (folder,) = bundles(nets)
    assert folder.name.endswith("-rank3")
    assert (folder / "inspection.pt").stat().st_size < 40_000  # random state alone
    again = replayed(nets, folder)
    assert again.returncode == 1, again.stderr
    result = nets.runpytest(*OPTIONS, "--modelhealth-replay-limit=0.0005", "-k", "1")
    result.stdout.fnmatch_lines(["*without weights: * over its limit of 0 MB *"])


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
    result = nets.runpytest_subprocess(*OPTIONS)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert bundles(nets) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_replays_nothing_is_wrong_use(nets: pytest.Pytester) -> None:
    """Exit status 2, and the reason: another model, fewer inspections, no test, no bundle."""
    nets.makepyfile(test_it=CHANCE)
    nets.runpytest(*OPTIONS)
    (folder,) = bundles(nets)

    def refused(*arguments: object) -> str:
        done = replayed(nets, *arguments)
        assert done.returncode == 2, done.stdout
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    nets.makepyfile(test_it=CHANCE.replace("inspector(nets.healthy())", "inspector.settings #"))
    assert "of inspection 2 of its test, which made 1" in refused(folder)
    nets.makepyfile(
        test_it=CHANCE.replace("Linear(4, 8)", "Linear(4, 9)").replace("(8, 2)", "(9, 2)")
    )
    assert "is of another model" in refused(folder)
    nets.path.joinpath("test_it.py").unlink()
    assert "is not here: start this in the project's folder" in refused(folder)
    assert "no bundle can be read at none" in refused("none")
    assert "MODULE:NAME" in refused(folder, "--model=nets")
    assert "no attribute 'nothing'" in refused(folder, "--model=nets:nothing")


def test_a_bundle_brings_no_code(nets: pytest.Pytester) -> None:
    """An id that leads out of the project, or to a test inside the bundle, is refused."""
    nets.makepyfile(test_it=CHANCE)
    nets.runpytest(*OPTIONS)
    (folder,) = bundles(nets)
    (folder / "test_evil.py").write_text("open('executed', 'w')\ndef test_e(inspector): ...")
    with torch.serialization.safe_globals(allowed()):
        content = torch.load(folder / "inspection.pt", weights_only=True)
    inside = f"out/{folder.name}/test_evil.py::test_e"
    for nodeid in ("-p evil::x", "../test_it.py::x", "/tmp/test_it.py::x", inside):
        content["test"]["id"] = nodeid
        torch.save(content, folder / "inspection.pt")
        done = replayed(nets, folder)
        assert done.returncode == 2
        assert "is no id of a test" in done.stderr or "is not here" in done.stderr
        assert not nets.path.joinpath("executed").exists()
