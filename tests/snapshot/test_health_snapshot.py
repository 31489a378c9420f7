"""The fixture in real test runs: record, compare, refuse, explain.

Each inner run costs more than all that it is asked here, so one holds many tests: a story is a
file of tests that is run as it was recorded, and again when `STAGE` says that something changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.json import JSONSnapshotExtension
from torch import nn

from pytest_modelhealth import Inspector

MODEL = """
import os
import pytest
import torch
from torch import nn
from pytest_modelhealth import Inspector

CHANGED = os.environ.get("STAGE") == "changed"

def net(scale=1.0, *, broken=False, wrapped=False, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        model[2].weight.mul_(scale)
        if broken:
            model[0].weight[0, 0] = float("nan")
    if wrapped:
        inner, model = model, nn.Sequential()
        model.add_module("inner", inner)
    return model.to(dtype)

def inspect(*args, dtype=torch.float32, **kwargs):
    batch = torch.linspace(-1, 1, 512).reshape(64, 8).to(dtype)
    kwargs["dtype"] = dtype
    return Inspector(net(*args, **kwargs)).run_inspection(batch)
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with a tiny model in `model.py`."""
    pytester.makepyfile(model=MODEL)
    monkeypatch.delenv("CI", raising=False)
    # syrupy leaves its report to the controller where this is set: ours may be a worker
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return Project(pytester, monkeypatch)


class Project:
    """Runs the tests of a project at one stage of its story after the other."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pytester, self.path = pytester, pytester.path
        self.write = lambda test: pytester.makepyfile(test_net=test)
        self.stage = lambda name: monkeypatch.setenv("STAGE", name)

    def run(self, *arguments: str, **options: bool) -> pytest.RunResult:
        """Run pytest with the plugin."""
        installed = "modelhealth" in entry_points(group="pytest11").names
        plugin = () if installed else ("-p", "pytest_modelhealth.plugin")
        return self._pytester.runpytest(*plugin, "-q", *arguments, **options)

    def update(self, *arguments: str, **options: bool) -> pytest.RunResult:
        """Run pytest with --snapshot-update."""
        return self.run("--snapshot-update", *arguments, **options)

    def files(self) -> dict[str, str]:
        """The text of each snapshot file by its name."""
        found = sorted(self.path.rglob("__snapshots__/**/*.health"))
        return {path.name: path.read_bytes().decode("utf-8", "replace") for path in found}

    def file(self, name: str) -> Path:
        """The path of one snapshot file."""
        return self.path / "__snapshots__" / "test_net" / name


def failure(result: pytest.RunResult, test: str) -> pytest.LineMatcher:
    """What stands below the title of one failing test."""
    titles = [
        n for n, line in enumerate(result.outlines) if re.match("(_+|=+|-+) .* [_=-]+$", line)
    ]
    (start,) = [n for n in titles if result.outlines[n].strip("_ ") == test]
    return pytest.LineMatcher(result.outlines[start : next(n for n in titles if n > start)])


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """The tests whose files differ."""
    names = [name for name in before | after if before.get(name) != after.get(name)]
    return {name.removesuffix(".health") for name in names}


LIFE = """
from model import *

def test_drift(health_snapshot):
    assert inspect(1.001 if CHANGED else 1.0) == health_snapshot

def test_within_tolerance(health_snapshot):
    assert inspect(1.0000003 if CHANGED else 1.0) == health_snapshot

def test_turned_unhealthy(health_snapshot):
    assert inspect(broken=CHANGED) == health_snapshot

def test_never_healthy(health_snapshot):
    assert inspect(broken=True) == health_snapshot

def test_renamed(health_snapshot):
    assert inspect(wrapped=CHANGED) == health_snapshot

def test_other_dtype(health_snapshot):
    assert inspect(dtype=torch.float64 if CHANGED else torch.float32) == health_snapshot

def test_tensor(health_snapshot):
    assert (torch.ones(2) if CHANGED else inspect()) == health_snapshot

def test_dict(health_snapshot):
    assert ({} if CHANGED else inspect()) == health_snapshot

def test_filter(health_snapshot):
    filters = {"exclude": lambda **_: 1} if CHANGED else {}
    assert inspect() == health_snapshot(**filters)

def test_asked(health_snapshot):
    report = inspect()
    assert not report._verdict_asked
    assert report == health_snapshot
    assert report._verdict_asked

class TestOwnFixture:
    @pytest.fixture
    def snapshot(self):
        return {}

    def test_named(self, health_snapshot):
        assert inspect() == health_snapshot
"""


def test_record_compare_drift_accept(project: Project) -> None:
    """The life of a snapshot: missing, recorded, equal, drifted, accepted, moved.

    What is no report, an unhealthy report, a filter, or a fixture `snapshot` of somebody else is
    refused at every stage, and the file stays.
    """
    project.write(LIFE)
    missing = project.run()
    missing.assert_outcomes(failed=10, errors=1)
    failure(missing, "test_drift").fnmatch_lines(
        [
            "E * there is no snapshot 'test_drift' yet",
            "E * To record *test_net/test_drift.health: pytest --snapshot-update test_net.py::*",
        ]
    )
    assert project.files() == {}

    recording = project.update()
    recording.assert_outcomes(passed=9, failed=1, errors=1)
    recording.stdout.fnmatch_lines(["* 9 snapshots generated."])
    failure(recording, "test_never_healthy").fnmatch_lines(["E *unhealthy*0*"])
    recorded = project.files()
    assert len(recorded) == 9
    assert "test_never_healthy.health" not in recorded

    equal = project.run()
    equal.assert_outcomes(passed=9, failed=1, errors=1)
    equal.stdout.fnmatch_lines(["*9 snapshots passed."])

    project.stage("changed")
    drifted = project.run("-W", "default")
    drifted.assert_outcomes(passed=3, failed=7, errors=1, warnings=1)
    assert_explained(drifted)
    strict = project.run("-k", "renamed", "-W", "error::UserWarning")
    strict.assert_outcomes(failed=1, deselected=10)
    strict.stdout.fnmatch_lines(["E *ModelHealthWarning: all * agree *renamed 0 *"])
    assert project.files() == recorded

    accepting = project.update()
    accepting.assert_outcomes(passed=4, failed=6, errors=1)
    assert_refused(accepting)
    accepting.stdout.fnmatch_lines(["* 2 snapshots updated.*"])
    accepted = project.files()
    assert changed(recorded, accepted) == {"test_drift", "test_renamed"}

    # the id in a file holds no folder: where pytest starts, or the tests lie, is no drift
    folder = project.path / "moved"
    folder.mkdir()
    for name in ("model.py", "test_net.py", "__snapshots__"):
        (project.path / name).rename(folder / name)
    project.run().assert_outcomes(passed=4, failed=6, errors=1)


def assert_explained(drifted: pytest.RunResult) -> None:
    """Do nothing if the failures tell the drift, and show no line of syrupy or of the plugin."""
    assert_refused(drifted)
    drift = failure(drifted, "test_drift")
    drift.fnmatch_lines(
        [
            "E * drift in 2.weight (parameters): rms * is now *",
            "E *2: same input, other weights, other output: *",
            "E *layer * role * statistic * snapshot * now * moved",
            "E *2.weight * parameters * rms *",
            "E *To accept * new __snapshots__/test_net/test_drift.health: pytest --snapshot-u*",
        ]
    )
    assert len(drift.lines) < 30
    assert not [line for line in drift.lines if "syrupy" in line or "extension.py" in line]
    assert "health_snapshot = <health snapshot of test_net.py::test_drift>" in drift.lines
    drifted.stdout.fnmatch_lines(["FAILED test_net.py::test_drift - *drift in 2.weight*"])
    drifted.stdout.fnmatch_lines(
        ["*ModelHealthWarning: all * agree *renamed 0 to inner.0 and 2*"],
    )


def assert_refused(result: pytest.RunResult) -> None:
    """Do nothing if what equals no snapshot is refused with the way out."""
    for name in ("test_turned_unhealthy", "test_never_healthy"):
        failure(result, name).fnmatch_lines(
            ["E *unhealthy*0*", "E *An unhealthy report equals no snapshot*"]
        )
        failure(result, name).no_fnmatch_line("*syrupy*")
    failure(result, "test_other_dtype").fnmatch_lines(
        [
            "E *the snapshot is of cpu float32, the report of cpu float64",
            'E *Give each a name, health_snapshot(name="cpu float64"), or delete the file *',
        ]
    )
    for name, message in (
        ("test_tensor", "TypeError: *HealthReport, not with Tensor*"),
        ("test_dict", "TypeError: *HealthReport, not with dict*"),
        ("test_filter", "TypeError: exclude and include*"),
    ):
        failure(result, name).fnmatch_lines([f"E *{message}"])
    failure(result, "ERROR at setup of TestOwnFixture.test_named").fnmatch_lines(
        ["health_snapshot needs syrupy's * (a builtins.dict): rename *"]
    )


MANY = """
from model import *

@pytest.mark.parametrize("name", ["google/bert", "a b", "plain"])
def test_parameter(name, health_snapshot):
    assert inspect(1 + len(name)) == health_snapshot

class TestNet:
    def test_method(self, health_snapshot):
        assert health_snapshot == inspect()

def test_several(health_snapshot):
    assert inspect(1.0) == health_snapshot(name="before")
    assert inspect(2.0) == health_snapshot(name="after")
    assert inspect(3.0) == health_snapshot
    assert inspect(4.0) == health_snapshot

def test_old(health_snapshot):
    assert inspect(1.5 if CHANGED else 1.0) == health_snapshot

if "STAGE" not in os.environ:
    def test_gone(health_snapshot):
        assert inspect() == health_snapshot

if CHANGED:
    def test_new(health_snapshot):
        assert inspect() == health_snapshot
"""


SHARED = pytest.param(("-n", "2", "test_net.py"), marks=pytest.mark.slow)


WARNED = """
from model import *
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self, idle):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 3)
        for name in idle:
            setattr(self, name, nn.Linear(2, 2))

    def forward(self, x):
        return self.fc(x)

def inspected(idle):
    batch = torch.linspace(-1, 1, 512).reshape(64, 8)
    return Inspector(Net(idle)).run_inspection(batch, torch.arange(64) % 3, loss=F.cross_entropy)

@pytest.mark.parametrize("before, now", [("a", "a"), ("a", "ab"), ("", "b"), ("a", "")])
def test_idle(before, now, health_snapshot):
    assert inspected(now if CHANGED else before) == health_snapshot
"""


def test_a_warning_is_accepted_once(project: Project) -> None:
    """One that the file does not have fails; one that is gone, or of an old file, is told."""
    project.write(WARNED)
    project.update().assert_outcomes(passed=4)
    recorded = project.files()
    assert [sum("warning: wiring a never called" in text for text in recorded.values())] == [3]
    project.run().assert_outcomes(passed=4)
    project.stage("changed")
    changed = project.run("-W", "default")
    changed.assert_outcomes(passed=2, failed=2, warnings=1)
    changed.stdout.fnmatch_lines_random(
        [
            "E * new warning: b (wiring): 'a', 'b' are never called, *",
            "E * new warning: b (wiring): 'b' is never called, *",
            "*ModelHealthWarning: all * agree *no longer warned of: a (wiring): never called*",
        ]
    )
    for name, text in recorded.items():
        lines = (line for line in text.splitlines(True) if not line.startswith("warning: "))
        project.file(name).write_text("".join(lines))
    old = project.run("-W", "default")
    old.assert_outcomes(passed=4, warnings=4)
    old.stdout.fnmatch_lines(["*recorded no warnings. pytest --snapshot-update takes them over*"])
    project.update().assert_outcomes(passed=4)
    assert all("\nwarning: " in text for text in project.files().values())


@pytest.mark.parametrize("workers", [(), SHARED], ids=["alone", "xdist"])
def test_many_files(project: Project, workers: tuple[str, ...]) -> None:
    """Each test has its own files: unused ones fail, and an update says what became of each.

    Under xdist each worker sees a part of them, and the controller adds up.
    """
    project.write(MANY)
    project.update().assert_outcomes(passed=7)
    recorded = project.files()
    tests = {
        name: re.search("^test: (.*)$", text, re.MULTILINE)[1] for name, text in recorded.items()
    }
    assert tests == {
        "test_parameter[googlebert].health": "test_net.py::test_parameter[google/bert]",
        "test_parameter[a b].health": "test_net.py::test_parameter[a b]",
        "test_parameter[plain].health": "test_net.py::test_parameter[plain]",
        "TestNet.test_method.health": "test_net.py::TestNet::test_method",
        "test_several[before].health": "test_net.py::test_several name='before'",
        "test_several[after].health": "test_net.py::test_several name='after'",
        "test_several.2.health": "test_net.py::test_several number 3",
        "test_several.3.health": "test_net.py::test_several number 4",
        "test_old.health": "test_net.py::test_old",
        "test_gone.health": "test_net.py::test_gone",
    }

    project.stage("a test less")
    unused = project.run(*workers)
    unused.assert_outcomes(passed=6)
    assert unused.ret == pytest.ExitCode.TESTS_FAILED
    unused.stdout.fnmatch_lines(
        [
            "9 snapshots passed. 1 snapshot unused.*",
        ]
    )

    project.stage("changed")
    updated = project.update("-W", "error::UserWarning", *workers)
    updated.assert_outcomes(passed=7)
    updated.stdout.fnmatch_lines(["Deleted *test_net/test_gone.health*"])
    told = [line for line in updated.outlines if line.startswith("modelhealth: snapshot")]
    assert len(told) == 2
    assert told[0].endswith("test_net/test_new.health: recorded for cpu float32")
    assert "test_net/test_old.health: drift in 2.weight (parameters): rms 0." in told[1]
    assert re.search(r"moved [\d,.e+]+ times its noise, first of \d+ drifts ", told[1])
    assert changed(recorded, project.files()) == {"test_new", "test_old", "test_gone"}
    assert not list(project.path.rglob("*.tmp"))

    again = project.run()
    again.assert_outcomes(passed=7)
    assert again.ret == pytest.ExitCode.OK
    again.stdout.fnmatch_lines(["10 snapshots passed."])
    assert not [line for line in again.outlines if line.startswith("modelhealth")]


# what is done to a file, and what the failure says of it; test_file_format.py has every damage
DAMAGES: dict[str, tuple[Callable[[str], str], str]] = {
    "truncated": (lambda text: text[: len(text) // 2], "the file is truncated"),
    "merge": (
        lambda text: text.replace("layer=2 ", "<<<<<<< HEAD\nlayer=2 ", 1),
        "should be here, not '<<<<<<< HEAD'",
    ),
    "binary": (lambda text: text, "1: "),  # its bytes are written below
}
DAMAGED = f"""
from model import *

@pytest.mark.parametrize("how", {list(DAMAGES)})
def test_damaged(how, health_snapshot):
    assert inspect() == health_snapshot

def test_of_the_future(health_snapshot):
    assert inspect() == health_snapshot

def test_with_line_ends_of_windows(health_snapshot):
    assert inspect() == health_snapshot

@pytest.mark.parametrize("name", ["ab" if CHANGED else "a/b"])
def test_shares(name, health_snapshot):
    assert inspect() == health_snapshot
"""


def test_a_file_that_is_not_as_recorded_is_explained(project: Project) -> None:
    """The failure names file and line, nothing is overwritten, and an update records anew.

    But for the file of a later version, or of another test whose id makes the same file name:
    neither is overwritten, and deleting it and recording works. Converted line ends are read.
    """
    project.write(DAMAGED)
    project.update()
    whole = project.files()
    for how, (damage, _) in DAMAGES.items():
        path = project.file(f"test_damaged[{how}].health")
        path.write_bytes(
            bytes(range(256)) if how == "binary" else damage(whole[path.name]).encode()
        )
    future = project.file("test_of_the_future.health")
    future.write_text(whole[future.name].replace("format 5", "format 7", 1))
    windows = project.file("test_with_line_ends_of_windows.health")
    windows.write_bytes(windows.read_bytes().replace(b"\n", b"\r\n"))
    broken = project.files()
    assert len(changed(whole, broken)) == len(DAMAGES) + 2
    project.stage("changed")

    failed = project.run()
    failed.assert_outcomes(failed=len(DAMAGES) + 2, passed=1)
    for how, (_, message) in DAMAGES.items():
        file = f"__snapshots__/test_net/test_damaged[[]{how}].health"
        failure(failed, f"test_damaged[{how}]").fnmatch_lines(
            [
                f"E *the snapshot cannot be read: {file}:*{message}*",
                "E *Restore the file from version control, or record it anew.",
                f"E *{file}: pytest --snapshot-update *",
            ]
        )
    assert_kept(failed)
    assert project.files() == broken

    updated = project.update()
    updated.assert_outcomes(failed=2, passed=len(DAMAGES) + 1)
    anew = [line for line in updated.outlines if "recorded anew, as it could not be read" in line]
    assert len(anew) == len(DAMAGES)
    assert_kept(updated)
    after = project.files()
    assert changed(whole, after) == {"test_of_the_future", "test_with_line_ends_of_windows"}
    assert after[future.name] == broken[future.name]

    future.unlink()
    project.file("test_shares[ab].health").unlink()
    project.update().assert_outcomes(passed=len(DAMAGES) + 3)


def assert_kept(result: pytest.RunResult) -> None:
    """Do nothing if a file of the future or of another test is explained, and not offered."""
    future = failure(result, "test_of_the_future")
    future.fnmatch_lines(
        [
            "E *_future.health:1: format '7' is that of a later version of the plugin*",
            "E *Recording would overwrite it: *, or delete it and record anew with *",
        ]
    )
    future.no_fnmatch_line("*To accept this*")
    shared = failure(result, "test_shares[ab]")
    shared.fnmatch_lines(
        [
            "E *the snapshot is of another test: *test_shares[[]a/b], not *test_shares[[]ab]",
            "E *give each an id of its own*",
        ]
    )
    shared.no_fnmatch_line("*To accept this*")


OBSTACLES = """
from pathlib import Path
from model import *

def denied(path, *_, **__):
    raise PermissionError(13, "Permission denied", str(path))

OPEN = Path.open

def read_only(path, mode="r", *args, **options):
    if mode == "x":
        raise OSError(30, "Read-only file system", str(path))
    return OPEN(path, mode, *args, **options)

def full(path, mode="r", *args, **options):
    if mode == "x":
        path.write_bytes(b"modelhealth")
        raise OSError(28, "No space left on device", str(path))
    return OPEN(path, mode, *args, **options)

KINDS = {
    "read_only_folder": {"mkdir": denied},
    "read_only_file_system": {"open": read_only, "unlink": denied},
    "full_disk": {"open": full},
    "locked_file": {"replace": denied},
}

@pytest.fixture(autouse=True)
def obstacle(kind, monkeypatch):
    for name, function in KINDS[kind].items() if CHANGED else ():
        monkeypatch.setattr(f"pathlib.Path.{name}", function)

@pytest.mark.parametrize("kind", ["read_only_file_system", "full_disk", "locked_file"])
def test_old(kind, health_snapshot):
    assert inspect(2.0 if "STAGE" in os.environ else 1.0) == health_snapshot

if "STAGE" in os.environ:
    @pytest.mark.parametrize("kind", ["read_only_folder", "full_disk"])
    def test_new(kind, health_snapshot):
        assert inspect() == health_snapshot
"""


def test_a_failed_write_keeps_what_there_was(project: Project) -> None:
    """The error names file and folder, no file is half written, and recording later works."""
    project.write(OBSTACLES)
    project.update().assert_outcomes(passed=3)
    recorded = project.files()
    project.stage("changed")
    result = project.update()
    result.assert_outcomes(failed=5)
    failed = re.findall(r"^FAILED test_net.py::(\S+)", "\n".join(result.outlines), re.MULTILINE)
    assert len(failed) == 5
    for test in failed:
        named = test.replace("[", "[[]")
        failure(result, test).fnmatch_lines(
            [
                f"E *snapshot *test_net/{named}.health could not be written: *(__snapshots__/*",
                "E *Nothing was changed*",
                f"E *pytest --snapshot-update *test_net.py::{named}*",
            ]
        )
    result.stdout.no_fnmatch_line("modelhealth: snapshot*")
    assert project.files() == recorded
    assert not list(project.path.rglob("*.tmp"))
    project.stage("without the obstacles")
    project.update().assert_outcomes(passed=5)


STOPPED = """
import pytest
from model import *

STAGE = os.environ.get("STAGE", "")
if STAGE == "no GPU":
    pytest.skip("no GPU", allow_module_level=True)
if STAGE == "import":
    raise ImportError

def test_drift(health_snapshot):
    report = inspect()
    if STAGE in ("fails", "Ctrl-C"):
        raise {"fails": ValueError, "Ctrl-C": KeyboardInterrupt}[STAGE]
    assert report == health_snapshot

if STAGE != "gone":
    def test_drift_later(health_snapshot):
        assert inspect() == health_snapshot
        assert inspect(2.0) == health_snapshot(name="after")
"""


def test_only_what_a_whole_file_left_unused_is_told_and_deleted(project: Project) -> None:
    """Where a test failed, was left out or never ran, nothing is said of snapshots, nor deleted."""
    project.write(STOPPED)
    (project.path / "test_other.py").write_text("def test_other(): pass")
    (project.path / "conftest.py").write_text(
        "def pytest_collection_modifyitems(config, items):\n"
        "    if config.getoption('markexpr') == 'not gpu':\n"
        "        config.hook.pytest_deselected(items=[items.pop(0)])\n"
    )
    project.update().assert_outcomes(passed=3)
    recorded = project.files()
    assert len(recorded) == 3
    for stage, *arguments in (
        ("fails", "-x"), ("Ctrl-C",), ("none", "--collect-only"),
        ("import", "--continue-on-collection-errors"), ("no GPU",), ("gone", "-k", "other"),
        ("gone", "test_net.py::test_drift"), ("gone", "-m", "not gpu"),
    ):  # fmt: skip
        project.stage(stage)
        is_green = stage in ("no GPU", "gone")
        for run in (project.update, project.run)[: 1 + is_green]:
            stopped = run(*arguments, no_reraise_ctrlc=True)
            assert not re.search("snapshots? (unused|deleted)", stopped.stdout.str())
            assert not is_green or stopped.ret == 0
            assert project.files() == recorded
    project.run().stdout.fnmatch_lines(["1 snapshot passed. 2 snapshots unused.*"])
    project.update().stdout.fnmatch_lines(["1 snapshot passed. 2 unused snapshots deleted.*"])
    assert project.files().keys() == {"test_drift.health"}


def test_a_report_is_no_line(snapshot: SnapshotAssertion) -> None:
    """Syrupy's own formats would keep its verdict alone, and pass whatever its numbers are."""
    report = Inspector(nn.Linear(4, 3)).run_inspection(torch.randn(8, 4))
    for plain in (snapshot, snapshot.use_extension(JSONSnapshotExtension)):
        with pytest.raises(TypeError, match="assert report == health_snapshot"):
            _ = report == plain
    assert report == report
    assert report != Inspector(nn.Linear(4, 3)).run_inspection(torch.randn(8, 4))
    assert {report: 1}[report]


def test_without_syrupy_the_fixture_says_so(project: Project) -> None:
    """`-p no:syrupy` gives one clear line, and only to tests that use the fixture."""
    project.write("def test_uses_it(health_snapshot):\n    pass\n\ndef test_other():\n    pass\n")
    result = project.run("-p", "no:syrupy")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["health_snapshot needs the pytest plugin syrupy, *"])
