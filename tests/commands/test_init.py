"""``python -m pytest_modelhealth init``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_modelhealth.commands import WRONG_USE, main

MODELS = '''
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class NetConfig:
    width: int = 9

class Net(nn.Module):
    def __init__(self, config: NetConfig):
        super().__init__()
        self.fc, self.out = nn.Linear(config.width, 24), nn.Linear(24, 3)
    def forward(self, x):
        return self.out(torch.relu(self.fc(x)))

class Dead(Net):
    def __init__(self, hidden_dim: int, num_classes: int):
        super().__init__(NetConfig())
        nn.init.constant_(self.fc.bias, -30.0)

class Odd(nn.Module):
    def __init__(self, tokenizer, rules):
        super().__init__()
    def forward(self, x):
        return x

class Blind(nn.Module):
    def forward(self, order):
        return order.customer

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(self.width, 3)

class Named(Net):
    """Returns a mapping."""
    def __init__(self):
        super().__init__(NetConfig())
    def forward(self, x):
        return {"logits": super().forward(x)}

def make_net():
    return Net(NetConfig())

def make_all():
    return Net(NetConfig()), torch.randn(32, 9)

def make_batch():
    return torch.randn(32, 9), torch.randint(3, (32,)), nn.functional.cross_entropy

model = Net(NetConfig())
number = 3
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models in it, which is the current one."""
    (tmp_path / "zoo.py").write_text(MODELS)
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    return tmp_path


def _init(*arguments: str) -> int:
    return main(["init", *arguments, "--seeds", "2"])


def test_a_file_is_written_as_a_person_would(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command to run next; a second call leaves it alone."""
    assert _init("zoo:Net") == 0
    path = project / "tests" / "test_net_health.py"
    assert path.read_text(encoding="utf-8") == (
        '''"""Is Net healthy? pytest --modelhealth-explain says what is checked."""

import torch
import torch.nn.functional as F
from pytest_modelhealth import ModelHealthSuite

from zoo import Net, NetConfig


class TestNet(ModelHealthSuite):
'''
        + _attributes(path)
        + """    def make(self):
        model = Net(NetConfig())
        inputs = torch.randn(32, 9)
        target = torch.randint(3, (32,))
        return model, inputs, target, F.cross_entropy
"""
    )
    out = capsys.readouterr().out
    assert out.startswith(f"written: {Path('tests/test_net_health.py')}\n")
    assert "healthy under 2 seeds" in out
    assert out.endswith("run: python -m pytest tests/test_net_health.py\n")
    written = path.stat()
    assert _init("zoo:Net") == WRONG_USE
    assert "exists, and is never written over: name another" in capsys.readouterr().err
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (written.st_mtime_ns, written.st_ino)
    assert [p.name for p in (project / "tests").iterdir()] == ["test_net_health.py"]


def _attributes(path: Path) -> str:
    """Return the lines of settings, which seeds gave."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in _between(lines, "class Test", "    def make"))


def _between(lines: list[str], first: str, last: str) -> list[str]:
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    end = next(i for i, line in enumerate(lines) if line.startswith(last))
    return lines[start + 1 : end]


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        (("zoo:make_net",), "model = make_net()"),
        (("zoo:make_all",), "return make_all()"),
        (("zoo:model",), "from zoo import model as trained_model"),
        (("zoo:Net", "--batch", "zoo:make_batch"), "return model, *make_batch()"),
        (("zoo:Named",), 'return F.cross_entropy(output["logits"], target)'),
        (("zoo:Dead",), "model = Dead(hidden_dim=32, num_classes=4)"),
    ],
)
def test_whatever_is_named_becomes_a_file(
    project: Path, arguments: tuple[str, ...], holds: str
) -> None:
    """It is laid out as ruff has it, and its `make` runs."""
    assert _init(*arguments, "--output", "new/test_it.py") == 0
    path = project / "new" / "test_it.py"
    text = path.read_text(encoding="utf-8")
    assert holds in text
    formatted = [sys.executable, "-m", "ruff", "format", "--check", "--isolated", str(path)]
    assert subprocess.run(formatted, capture_output=True, check=False).returncode == 0
    names: dict[str, object] = {"__name__": "test_it"}
    exec(compile(text, str(path), "exec"), names)
    suite = next(v for n, v in names.items() if n.startswith("Test"))
    assert len(suite().make()) >= 2  # type: ignore[operator]


def test_an_unhealthy_model_is_told_first(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is written, and nothing in it hides the finding."""
    assert _init("zoo:Dead") == 0
    out = capsys.readouterr().out
    assert out.startswith("unhealthy: ")
    assert "dead_units" in out.partition("written:")[0]
    assert "the test will fail until this is mended" in out
    text = (project / "tests" / "test_dead_health.py").read_text(encoding="utf-8")
    assert "settings" not in text
    assert "waive" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("zoo",), "init takes MODULE:NAME"),
        (("zou:Net",), "there is no module 'zou', in .*did you mean 'zoo'"),
        (("zoo:Nett",), "zoo has no 'Nett'; did you mean 'Net'"),
        (("zoo:number",), "zoo:number is int, not a model"),
        (("zoo:NetConfig",), r"is a class, but no torch\.nn\.Module"),
        (("zoo:Odd",), r"needs tokenizer, rules.*\n    def make_model"),
        (("zoo:Broken",), r"raised, when called:(.|\n)*zoo\.py:\d+ in __init__"),
        (("zoo:Blind",), r"cannot guess what Blind\.forward takes(.|\n)*--batch"),
        (("zoo:Net", "--output", "zoo.py"), r"zoo\.py exists, and is never written over"),
        (("zoo:Net", "--output", "zoo.py/test_a.py"), "cannot write|is no folder"),
        (("zoo:Net", "--batch", "zoo:number"), "name a function that makes a batch"),
    ],
)
def test_what_cannot_be_done_says_what_to_do(
    project: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one message, and nothing is written."""
    before = sorted(project.rglob("*.py"))
    assert _init(*arguments) == WRONG_USE
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert sorted(project.rglob("*.py")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_to(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named."""
    (project / "tests").chmod(0o500)
    assert _init("zoo:Net") == WRONG_USE
    assert "cannot write tests/test_net_health.py: Permission denied" in capsys.readouterr().err
    (project / "tests").chmod(0o700)


def test_a_written_file_passes(project: Path) -> None:
    """By the command that is printed, without what compiles."""
    assert _init("zoo:Net") == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not compiled"]
    ran = subprocess.run(
        [*command, "tests/test_net_health.py"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout
    assert "passed" in ran.stdout
