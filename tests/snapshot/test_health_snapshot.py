"""The fixture in real test runs: record, compare, refuse, explain."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

MODEL = """
import os
import pytest
import torch
from torch import nn
from pytest_modelhealth import Inspector

def net(scale=1.0, *, broken=False, wrapped=False, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        model[2].weight.mul_(scale * float(os.environ.get("SCALE", 1)))
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

ONE_TEST = """
from model import *

def test_drift(health_snapshot):
    assert inspect() == health_snapshot
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with a tiny model in `model.py`."""
    pytester.makepyfile(model=MODEL)
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # tests are rewritten within a second
    monkeypatch.delenv("CI", raising=False)
    # syrupy leaves its report to the controller where this is set: ours may be a worker
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    return Project(pytester, monkeypatch)


class Project:
    """Runs the tests of a project, and edits it between runs."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pytester = pytester
        self._monkeypatch = monkeypatch
        self.path = pytester.path

    def write(self, test: str) -> None:
        """Write the test file."""
        self._pytester.makepyfile(test_net=test)

    def scale(self, factor: float) -> None:
        """Multiply the weights of the last layer by `factor`."""
        self._monkeypatch.setenv("SCALE", str(factor))

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
        return {path.name: path.read_text(encoding="utf-8") for path in found}

    def file(self, name: str = "test_drift.health") -> Path:
        """The path of one snapshot file."""
        return self.path / "__snapshots__" / "test_net" / name


def test_record_compare_drift_accept(project: Project) -> None:
    """The life of a snapshot: missing, recorded, equal, drifted, accepted."""
    project.write(ONE_TEST)

    missing = project.run()
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(
        [
            "E * there is no snapshot 'test_drift' yet",
            "E * To record *test_net/test_drift.health: pytest --snapshot-update test_net.py::*",
        ]
    )
    assert project.files() == {}

    project.update().stdout.fnmatch_lines(["1 snapshot generated.", "1 passed*"])
    recorded = project.files()
    project.run().stdout.fnmatch_lines(["1 snapshot passed.", "1 passed*"])

    project.scale(1.001)
    drifted = project.run()
    drifted.assert_outcomes(failed=1)
    drifted.stdout.fnmatch_lines(
        [
            "E * drift in 2.weight (parameters): rms * is now *",
            "E *2: same input, other weights",
            "E *layer * role * statistic * snapshot * now * moved",
            "E *2.weight * parameters * rms *",
            "E *To accept * new __snapshots__/test_net/test_drift.health: pytest --snapshot-u*",
            "FAILED test_net.py::test_drift - *drift in 2.weight*",
        ],
    )
    assert project.files() == recorded

    project.update().stdout.fnmatch_lines(["1 snapshot updated.", "1 passed*"])
    assert project.files() != recorded
    project.run().assert_outcomes(passed=1)


def test_the_failure_shows_no_line_of_syrupy_or_of_the_plugin(project: Project) -> None:
    """A failure is the line of the test and the table: no traceback, and no file in the margin."""
    project.write(ONE_TEST)
    project.update()
    project.scale(2)
    lines = project.run().outlines
    failure = lines[: next(i for i, line in enumerate(lines) if "snapshot report" in line)]
    assert len(failure) < 30
    assert not [line for line in failure if "syrupy" in line or "extension.py" in line]
    assert "health_snapshot = <health snapshot of test_net.py::test_drift>" in failure


def test_within_tolerance_an_update_leaves_the_file(project: Project) -> None:
    """--snapshot-update rewrites nothing where nothing drifted, so re-recording makes no diff."""
    project.write(ONE_TEST)
    project.update()
    recorded = project.files()
    project.scale(1.0000003)
    project.update().stdout.fnmatch_lines(["1 snapshot passed.*"])
    assert project.files() == recorded


def test_an_unhealthy_report_is_never_recorded(project: Project) -> None:
    """--snapshot-update refuses a NaN, names the layer, and keeps the old file."""
    project.write(ONE_TEST)
    project.update()
    recorded = project.files()
    project.write(ONE_TEST.replace("inspect()", "inspect(broken=True)"))
    for result in (project.update(), project.run()):
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["E *unhealthy*0*", "E *An unhealthy report equals no snapshot*"]
        )
        result.stdout.no_fnmatch_line("*syrupy*")
        assert project.files() == recorded


def test_an_unhealthy_report_leaves_no_file_behind(project: Project) -> None:
    """Nothing is written where there was no baseline either."""
    project.write(ONE_TEST.replace("inspect()", "inspect(broken=True)"))
    project.update().assert_outcomes(failed=1)
    assert not (project.path / "__snapshots__").exists()


def test_comparing_asks_for_the_verdict(project: Project) -> None:
    """Comparing a report with a snapshot asks for its verdict."""
    project.write(
        ONE_TEST
        + """
def test_asked(health_snapshot):
    report = inspect()
    assert not report.verdict_asked
    assert report == health_snapshot
    assert report.verdict_asked
"""
    )
    project.update().assert_outcomes(passed=2)


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
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_parameters_classes_and_names(project: Project, workers: tuple[str, ...]) -> None:
    """Each parameter, method, name and repetition has its own file, under xdist too."""
    project.write(MANY)
    options = ("-W", "error::UserWarning", *workers)
    project.update(*options).assert_outcomes(passed=5)
    tests = {
        name: re.search("^test: (.*)$", text, re.MULTILINE)[1]
        for name, text in project.files().items()
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
    }
    again = project.run()
    again.assert_outcomes(passed=5)
    again.stdout.fnmatch_lines(["8 snapshots passed.*"])
    assert not list(project.path.rglob("*.tmp"))


@pytest.mark.parametrize("selection", [(), ("-n", "2", "test_net.py")], ids=["all", "xdist"])
def test_an_unused_snapshot_is_named_with_its_file(
    project: Project, selection: tuple[str, ...]
) -> None:
    """A file whose test is gone fails the run, and an update deletes it and no other."""
    project.write(ONE_TEST + ONE_TEST.replace("test_drift", "test_other"))
    project.update()
    assert len(project.files()) == 2
    project.write(ONE_TEST)
    unused = project.run(*selection)
    assert unused.ret != 0
    unused.stdout.fnmatch_lines(
        ["*1 snapshot unused.*", "modelhealth: snapshot *test_net/test_other.health: unused, *"]
    )
    project.update(*selection).stdout.fnmatch_lines(["Deleted *test_net/test_other.health*"])
    assert list(project.files()) == ["test_drift.health"]


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_an_update_says_what_drifted_file_by_file(
    project: Project, workers: tuple[str, ...]
) -> None:
    """What was recorded, what drifted by how much and in how many layers; nothing of the rest."""
    test = ONE_TEST.replace("test_drift", "test_{0}").replace("inspect()", "inspect({1})")
    project.write(test.format("old", "1.0"))
    project.update()
    project.write(
        "\n".join(test.format(*one) for one in (("old", "1.0"), ("new", "1.0"), ("same", "1.0")))
    )
    project.update("-k", "same")
    project.write(
        "\n".join(test.format(*one) for one in (("old", "1.5"), ("new", "1.0"), ("same", "1.0")))
    )
    lines = project.update(*workers).outlines
    named = [line for line in lines if line.startswith("modelhealth: snapshot")]
    assert len(named) == 2
    assert named[0].endswith("test_net/test_new.health: recorded for cpu float32")
    assert "test_net/test_old.health: drift in 2.weight (parameters): rms 0." in named[1]
    assert re.search(
        r"moved [\d,.e+]+ times its noise, first of \d+ drifts .* in 4 layers$", named[1]
    )
    assert not [line for line in project.run().outlines if line.startswith("modelhealth")]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "1: 'modelhealth snapshot, format 3' should be here, not ''"),
        (lambda text: text[: len(text) // 2], "the file is truncated"),
        (lambda text: '{"a": 1}', "1: 'modelhealth snapshot, format 3' should be here, not"),
        (lambda text: text.replace("format 3", "format 2"), "1: format 2 is that of an earlier"),
        (
            lambda text: text.replace("2 Linear", "<<<<<<< HEAD\n2 Linear", 1),
            "13: a merge was not resolved, there is the marker '<<<<<<< HEAD'",
        ),
        (lambda text: text.replace("16x8", "16xx8"), "11: a shape such as 64x10, or () should be"),
        (lambda text: text.replace("64x16", "64x16 1"), "11: *mean, std, min..max*"),
    ],
    ids=["empty", "truncated", "foreign", "format", "merge conflict", "shape", "edited"],
)
def test_a_damaged_file_is_explained_and_replaced(
    project: Project, damage: Callable[[str], str], message: str
) -> None:
    """The failure names file and line, nothing is overwritten, and an update records anew."""
    project.write(ONE_TEST)
    project.update()
    whole = project.files()
    project.file().write_text(damage(project.file().read_text()))
    broken = project.files()
    assert broken != whole
    failed = project.run()
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(
        [
            f"E *the snapshot cannot be read: __snapshots__/test_net/test_drift.health:*{message}*",
            "E *Restore the file from version control, or record it anew.",
            "E *__snapshots__/test_net/test_drift.health: pytest --snapshot-update *",
        ]
    )
    assert project.files() == broken
    updated = project.update()
    updated.assert_outcomes(passed=1)
    updated.stdout.fnmatch_lines(["modelhealth: *: recorded anew, as it could not be read: line *"])
    assert project.files() == whole


def test_a_future_file_is_explained_and_kept(project: Project) -> None:
    """What a later version recorded is not overwritten; deleting it and recording works."""
    project.write(ONE_TEST)
    project.update()
    project.file().write_text(project.file().read_text().replace("format 3", "format 7", 1))
    future = project.files()
    for result in (project.run(), project.update()):
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "E *test_drift.health:1: format '7' is that of a later version of the plugin*",
                "E *Upgrade pytest-modelhealth to compare *, or delete it and record anew with *",
            ]
        )
        result.stdout.no_fnmatch_line("*To accept this*")
        assert project.files() == future
    project.file().unlink()
    project.update().assert_outcomes(passed=1)


def test_another_dtype_gets_a_section_of_its_own(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile without a section is said to have none; recording it keeps the others."""
    project.write(
        ONE_TEST.replace("inspect()", "inspect(dtype=getattr(torch, os.environ['DTYPE']))")
    )
    monkeypatch.setenv("DTYPE", "float32")
    project.update()
    first = project.files()["test_drift.health"]
    monkeypatch.setenv("DTYPE", "float64")
    missing = project.run()
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(
        [
            "E *there is no snapshot for cpu float64 yet; the file has cpu float32",
            "E *To record *test_drift.health: pytest --snapshot-update test_net.py::test_drift",
        ]
    )
    project.update("-n", "2").assert_outcomes(passed=1)
    both = project.files()["test_drift.health"]
    assert both.startswith(first.removesuffix("\nend\n"))
    assert re.findall("^=== (.*) ===$", both, re.MULTILINE) == ["cpu float32", "cpu float64"]
    for dtype in ("float32", "float64"):
        monkeypatch.setenv("DTYPE", dtype)
        project.run().assert_outcomes(passed=1)


def test_a_rename_passes_with_a_note_unless_names_are_strict(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapped model passes with a warning, fails where names are strict, and can be accepted."""
    project.write(ONE_TEST.replace("inspect()", "inspect(wrapped='WRAP' in os.environ)"))
    project.update()
    recorded = project.files()
    monkeypatch.setenv("WRAP", "1")
    passed = project.run("-W", "default")
    passed.assert_outcomes(passed=1, warnings=1)
    passed.stdout.fnmatch_lines(["*ModelHealthWarning: all * agree *renamed 0 to inner.0 and 2*"])
    strict = project.run("-o", "modelhealth_strict_names=true")
    strict.assert_outcomes(failed=1)
    strict.stdout.fnmatch_lines(["E *not the names of the snapshot (strict_names; *renamed 0 *"])
    assert project.files() == recorded
    project.update().stdout.fnmatch_lines(["1 snapshot updated.*"])
    project.run().assert_outcomes(passed=1)


def test_a_file_that_is_no_text_is_replaced(project: Project) -> None:
    """Bytes that are no UTF-8 do not keep --snapshot-update from recording."""
    project.write(ONE_TEST)
    project.update()
    whole = project.files()
    project.file().write_bytes(bytes(range(256)))
    project.run().stdout.fnmatch_lines(["E *the snapshot cannot be read: *test_drift.health:1: *"])
    project.update().assert_outcomes(passed=1)
    assert project.files() == whole


def test_windows_line_ends_are_read(project: Project) -> None:
    """A checkout that converts line ends changes nothing."""
    project.write(ONE_TEST)
    project.update()
    project.file().write_bytes(project.file().read_bytes().replace(b"\n", b"\r\n"))
    project.run().assert_outcomes(passed=1)


def test_the_file_of_another_test_is_noticed(project: Project) -> None:
    """Two ids that share a file name do not share a baseline unseen."""
    project.write(
        """
from model import *

@pytest.mark.parametrize("name", ["a/b", "ab"])
def test_drift(name, health_snapshot):
    assert inspect() == health_snapshot
"""
    )
    project.update("-k", "a/b")
    result = project.run("-k", "ab")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "E *the snapshot is of another test: *test_drift[[]a/b], not *test_drift[[]ab]",
            "E *give each an id of its own*",
        ]
    )
    recorded = project.files()
    result.stdout.no_fnmatch_line("*To accept this*")
    project.update("-k", "ab").assert_outcomes(failed=1, deselected=1)
    assert project.files() == recorded
    project.file("test_drift[ab].health").unlink()
    project.update("-k", "ab").assert_outcomes(passed=1, deselected=1)


def test_a_moved_folder_keeps_its_snapshots(project: Project) -> None:
    """The id in the file holds no folder: where pytest starts, or the tests lie, is no drift."""
    project.write(ONE_TEST)
    project.update()
    folder = project.path / "moved"
    folder.mkdir()
    for name in ("model.py", "test_net.py", "__snapshots__"):
        (project.path / name).rename(folder / name)
    project.run().assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("comparison", "message"),
    [
        ("torch.ones(2) == health_snapshot", "TypeError: *HealthReport, not with Tensor*"),
        ("{} == health_snapshot", "TypeError: *HealthReport, not with dict*"),
        ("inspect() == health_snapshot(exclude=lambda **_: 1)", "TypeError: exclude and include*"),
    ],
)
def test_misuse_is_a_type_error(project: Project, comparison: str, message: str) -> None:
    """What is no report, or a filter, is refused with the way out; the file stays."""
    project.write(ONE_TEST)
    project.update()
    recorded = project.files()
    project.write(ONE_TEST.replace("inspect() == health_snapshot", comparison))
    for result in (project.update(), project.run()):
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"E *{message}"])
        assert project.files() == recorded


OBSTACLES = {
    "read-only folder": """
    def mkdir(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))
    monkeypatch.setattr("pathlib.Path.mkdir", mkdir)
""",
    "read-only file system": """
    def write_text(path, *_, **__):
        raise OSError(30, "Read-only file system", str(path))
    monkeypatch.setattr("pathlib.Path.write_text", write_text)
    monkeypatch.setattr("pathlib.Path.unlink", write_text)
""",
    "full disk": """
    def write_text(path, text, **_):
        path.write_bytes(text[:99].encode())
        raise OSError(28, "No space left on device", str(path))
    monkeypatch.setattr("pathlib.Path.write_text", write_text)
""",
    "locked file": """
    def replace(path, target):
        raise PermissionError(13, "Permission denied", str(path))
    monkeypatch.setattr("pathlib.Path.replace", replace)
""",
}


@pytest.mark.parametrize(
    ("obstacle", "recorded_before"),
    [
        ("read-only folder", False),
        ("read-only file system", True),
        ("full disk", False),
        ("full disk", True),
        ("locked file", True),
    ],
)
def test_a_failed_write_keeps_what_there_was(
    project: Project, obstacle: str, recorded_before: bool
) -> None:
    """The error names file and folder, no file is half written, and recording later works."""
    project.write(ONE_TEST)
    if recorded_before:
        project.update()
    recorded = project.files()
    fixture = f"@pytest.fixture(autouse=True)\ndef obstacle(monkeypatch):{OBSTACLES[obstacle]}"
    project.write(f"{ONE_TEST}\n{fixture}")
    project.scale(2)
    result = project.update()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *the snapshot *test_net/test_drift.health could not be written: *(__snapshots__/*",
            "E *Nothing was changed*",
            "E *pytest --snapshot-update test_net.py::test_drift",
        ]
    )
    result.stdout.no_fnmatch_line("modelhealth: snapshot*")
    assert project.files() == recorded
    assert not list(project.path.rglob("*.tmp"))
    project.write(ONE_TEST)
    project.update().assert_outcomes(passed=1)


STOPPED = """
from model import *

def test_drift(health_snapshot):
    report = inspect()
    if "STOP" in os.environ:
        raise {error}
    assert report == health_snapshot

def test_later(health_snapshot):
    assert inspect() == health_snapshot
    assert inspect(2.0) == health_snapshot(name="after")
"""


@pytest.mark.parametrize(
    ("error", "arguments"),
    [("ValueError", ()), ("ValueError", ("-x",)), ("KeyboardInterrupt", ())],
    ids=["fails", "fails with -x", "Ctrl-C"],
)
def test_an_update_that_is_cut_short_loses_no_baseline(
    project: Project, monkeypatch: pytest.MonkeyPatch, error: str, arguments: tuple[str, ...]
) -> None:
    """A test that fails before it compares, or never runs, keeps its snapshots."""
    project.write(STOPPED.format(error=error))
    project.update().assert_outcomes(passed=2)
    recorded = project.files()
    assert len(recorded) == 3
    monkeypatch.setenv("STOP", "1")
    stopped = project.update(*arguments, no_reraise_ctrlc=True)
    assert project.files() == recorded
    stopped.stdout.fnmatch_lines(
        ["modelhealth: the snapshot of test_net.py::test_drift is kept, not deleted: the test *"]
    )
    assert not list(project.path.rglob("*.tmp"))


def test_without_syrupy_the_fixture_says_so(project: Project) -> None:
    """`-p no:syrupy` gives one clear line, and only to tests that use the fixture."""
    project.write(ONE_TEST + "\ndef test_other():\n    inspect().assert_healthy()\n")
    result = project.run("-p", "no:syrupy")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["health_snapshot needs the pytest plugin syrupy, *"])


def test_another_fixture_called_snapshot_is_named(project: Project) -> None:
    """A project or plugin that gives its own `snapshot` gets one clear line, not a TypeError."""
    fixture = "\n@pytest.fixture\ndef snapshot():\n    return {}\n"
    project.write("import pytest\n" + fixture + ONE_TEST)
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["health_snapshot needs syrupy's * (a builtins.dict): rename *"])


def test_the_extension_works_with_syrupy_s_own_fixture(project: Project) -> None:
    """`snapshot.use_extension` records the same file and explains drift in its first lines."""
    project.write(
        """
from model import *
from pytest_modelhealth.snapshot import HealthSnapshotExtension

def test_drift(snapshot):
    assert inspect() == snapshot.use_extension(HealthSnapshotExtension)
"""
    )
    project.update().assert_outcomes(passed=1)
    project.run().assert_outcomes(passed=1)
    project.scale(1.5)
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *drift in 2.weight (parameters): rms *"])
