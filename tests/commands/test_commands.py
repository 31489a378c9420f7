"""``python -m pytest_modelhealth init`` and ``diff``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_modelhealth.commands import WRONG_USE, init, main
from tests.runs.difference import made
from tests.runs.difference.made import TOTALS, finding, inspection

PATH = os.pathsep.join(sys.path)

MODELS = """
from __future__ import annotations
import torch
from torch import Tensor, nn

class Net(nn.Module):
    def __init__(self, width: int, classes: int = 3, *, act: str = "relu", bias=True):
        super().__init__()
        self.fc, self.out = nn.Linear(9, width), nn.Linear(width, classes, bias)
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.fc(x)))

class Writer(nn.Module):
    def __init__(self):
        raise RuntimeError("is never made")
    def forward(self, ids, mask=None, targets=None):
        return ids

class Pair(nn.Module):
    def forward(self, a, b, /, *rest, scale=1.0, **more):
        return a

class Outer:
    class Inner(nn.Sequential):
        pass

def model(width: int = 4) -> Net:
    return Net(width)

net = model()
number = 3
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models in it, which is the current one."""
    (tmp_path / "zoo.py").write_text(MODELS)
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    return tmp_path


def test_a_file_is_written_as_a_person_would(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one place to fill in, and the command to run next; a second call leaves it alone."""
    assert main(["init", "zoo:Net"]) == 0
    path = project / "tests" / "test_net_health.py"
    assert path.read_text(encoding="utf-8") == (
        '''"""Is Net healthy? pytest --modelhealth-explain says what is checked."""

import torch
import torch.nn.functional as F
from pytest_modelhealth import ModelHealthSuite

from zoo import Net


class TestNet(ModelHealthSuite):
    strict = True  # warnings fail; what is meant so is waived with a reason: modelhealth_waive

    def make(self):
        # TODO: a batch of yours, some 32 samples, in place of each ... below
        # Net(width: int, classes: int = 3, act: str = 'relu', bias=True)
        model = Net(width=...)
        # forward(x: Tensor)
        inputs = ...
        # no target (None): a loss of the output alone; no loss: the model's own
        target = ...
        loss = ...
        return model, inputs, target, loss
'''
    )
    assert capsys.readouterr().out == (
        "written: tests/test_net_health.py\n"
        "fill in: tests/test_net_health.py:14 (TODO: a batch of yours)\n"
        "run:     python -m pytest tests/test_net_health.py\n"
    )
    written = path.stat()
    assert main(["init", "zoo:Net"]) == WRONG_USE
    assert "exists, and is never written over: name another" in capsys.readouterr().err
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (written.st_mtime_ns, written.st_ino)


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("zoo.py:Net", "from zoo import Net\n"),
        (
            "zoo:Writer",
            'model = Writer()\n*inputs = {"ids": ..., "targets": ...}\n*model, inputs\n',
        ),
        ("zoo:Pair", "# forward(a, b, *rest, scale=1.0)\n*inputs = (..., ...)"),
        ("zoo:Outer.Inner", "from zoo import Outer\n*class TestOuterInner(*Outer.Inner(*args)"),
        ("zoo:model", "import model as make_model\n*model = make_model()\n*# forward(x: Tensor)"),
    ],
)
def test_whatever_is_named_becomes_a_file(project: Path, name: str, holds: str) -> None:
    """Nothing is built for it."""
    assert main(["init", name, "--output", "new/test_it.py"]) == 0
    path = project / "new" / "test_it.py"
    text = path.read_text(encoding="utf-8")
    assert re.search("(.|\n)*".join(map(re.escape, holds.split("*"))), text), text
    assert text.count("TODO: a batch of yours") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("zoo",), "name a module and what in it makes the model"),
        (("zou:Net",), "there is no module 'zou' in .*: name it as import does"),
        (("zoo:Nett",), "zoo has no 'Nett'; did you mean 'Net'"),
        (
            ("zoo:number",),
            r"zoo:number is of type int: name a class of torch\.nn\.Module, or a function",
        ),
        (("zoo:net",), "zoo:net is of type Net: name a class"),
        (("zoo:Outer",), "zoo:Outer is another class: name a class"),
        (("zoo:Net", "--output", "zoo.py"), r"zoo\.py exists, and is never written over"),
        (("zoo:Net", "--output", "zoo.py/test_a.py"), r"zoo\.py exists, and is never"),
    ],
)
def test_what_cannot_be_done_says_what_to_do(
    project: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one message, and nothing is written."""
    before = sorted(project.rglob("*.py"))
    assert main(["init", *arguments]) == WRONG_USE
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert sorted(project.rglob("*.py")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_to(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named."""
    (project / "tests").chmod(0o500)
    assert main(["init", "zoo:Net"]) == WRONG_USE
    assert "cannot write tests/test_net_health.py: Permission denied" in capsys.readouterr().err
    (project / "tests").chmod(0o700)


def test_a_written_file_passes_once_it_has_a_batch(pytester: pytest.Pytester) -> None:
    """By the command that is printed, without what compiles."""
    pytester.makepyfile(zoo=MODELS)
    pytester.syspathinsert()
    assert main(["init", "zoo:Net"]) == 0
    unwritten = pytester.runpytest("-p", "no:cacheprovider", "test_net_health.py")
    unwritten.assert_outcomes(failed=1, skipped=12)
    unwritten.stdout.fnmatch_lines(["TestNet.make() has no batch yet: write it below*"])
    values = iter(("16", "torch.randn(32, 9)", "torch.randint(3, (32,))", "F.cross_entropy"))
    path = pytester.path / "test_net_health.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"(?<==)( ?)\.\.\.", lambda m: m[1] + next(values), text))
    ran = pytester.runpytest("-p", "no:cacheprovider", "-k", "not compiled", path.name)
    ran.assert_outcomes(passed=9, skipped=3, deselected=1)


READ = """
from __future__ import annotations
import torch
from torch import Tensor, nn
SIZE = 4

class Net(nn.Module):
    def __init__(self, width: int, size=SIZE, *, act: str = "relu", names: tuple[str] = ("a",)):
        super().__init__()
    def forward(self, x: Tensor, /, mask: torch.Tensor | None = None, *rest, labels=None, **more):
        return x

def net():
    return Net(SIZE)

class Own(nn.Module):
    def forward(self, x):
        return x

class Twice(nn.Module):
    def __init__(self, width): super().__init__()
    def forward(self, x): return x

if True:
    def Twice(depth: int = 3): return Own()
"""


def test_a_class_is_read_in_its_source_as_it_would_be_imported(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its module nor torch is imported; what the source does not tell by itself is."""
    (project / "read.py").write_text(READ)
    (project / "raising.py").write_text(READ + "\nraise RuntimeError")
    assert init._from_source("read", "Own") is init._from_source("read", "Twice") is None
    assert main(["init", "raising:Net", "--output", "read.txt"]) == 0
    monkeypatch.setattr(init, "_from_source", lambda *_: None)
    assert main(["init", "read:Net", "--output", "imported.txt"]) == 0
    read, imported = (Path(name).read_text() for name in ("read.txt", "imported.txt"))
    assert read == imported.replace("from read", "from raising").replace("size=4", "size=SIZE")
    code = (
        "import sys\nfrom pytest_modelhealth.commands import main\n"
        "assert main(['init', 'raising:Net', '--output', 'again.txt']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": PATH})


# ---- diff ----------------------------------------------------------------------------------------


HEALTHY = made.test(inspection())
UNHEALTHY = made.test(inspection(finding()))
CHANGED = made.test(inspection(totals={**TOTALS, "multiply_adds": 1}))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``healthy.json``, ``unhealthy.json``, ``changed.json`` and ``broken.json``."""
    for name, test in (("healthy", HEALTHY), ("unhealthy", UNHEALTHY), ("changed", CHANGED)):
        text = json.dumps(made.document(made.run(test)))
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "broken.json").write_text(text[:200])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("head", "fail_on", "status"),
    [
        ("healthy", "any", 0),
        ("changed", None, 0),
        ("changed", "any", 1),
        ("unhealthy", None, 1),
        ("unhealthy", "worse", 1),
        ("unhealthy", "never", 0),
    ],
)
def test_exit_status_is_that_of_the_gate(head: str, fail_on: str | None, status: int) -> None:
    """By default a change that is no worse passes."""
    gate = [] if fail_on is None else ["--fail-on", fail_on]
    assert main(["diff", "healthy.json", f"{head}.json", *gate]) == status


@pytest.mark.usefixtures("files")
def test_wrong_files_exit_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    """With one line that names the file, and nothing on the output."""
    Path("short.json").write_text(Path("healthy.json").read_text().replace('"tied"', '"t"'))
    for name in ("broken.json", "none.json", ".", "short.json"):
        assert main(["diff", "healthy.json", name, "--fail-on", "never"]) == 2
        output, error = capsys.readouterr()
        assert output == ""
        assert error.startswith("python -m pytest_modelhealth: ")
        assert f"{name}: " in error
        assert error.count("\n") == 1


def test_output_goes_to_a_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is shown then; a file that cannot be written is wrong use."""
    arguments = ["diff", "healthy.json", "unhealthy.json", "--format", "markdown", "--output"]
    assert main([*arguments, "comment.md"]) == 1
    assert (files / "comment.md").read_text().startswith("**`modelhealth: 1 test got worse")
    assert capsys.readouterr().out == ""
    assert main([*arguments, "none/comment.md"]) == 2
    assert "--output: cannot write none/comment.md" in capsys.readouterr().err


def test_it_runs_as_a_command(files: Path) -> None:
    """In a process of its own, in an encoding that has not every letter."""
    (files / "accent.json").write_text(
        (files / "unhealthy.json").read_text().replace("fc1 is dead", "caf\\u00e9 \\u2713")
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest_modelhealth", "diff", "healthy.json", "accent.json"],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"caf\xe9 \\u2713" in done.stdout


def test_help_loads_no_torch() -> None:
    """So it is there at once."""
    code = (
        "import sys\nfrom pytest_modelhealth.commands import main\n"
        "try: main(['diff', '--help'])\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False"
