"""Where the class of a layer is written, and where the layer is called."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.rendering import places

SOURCE = '''
import functools
import torch
from torch import nn

class Scale(nn.Module):  # class: Scale, replaced below
    pass

text = """
class Bare(nn.Linear):
"""

class Bare(nn.Linear):  # class: Bare
    pass

def logged(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

def mark(kind):
    return kind

@mark
@mark
class Scale(nn.Module):  # class: Scale
    """The one that is used."""

    class Inner(nn.Module):  # class: Scale.Inner
        @logged
        def forward(self, x):
            return torch.relu(x)

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()
        self.weight = nn.Parameter(torch.full((4,), float("nan")))

    def forward(self, x):
        return self.inner(x) * self.weight  # call: inner

def make():
    if True:
        class Local(nn.Module):  # class: Local
            def forward(self, x): return x + 1
    return Local()

class Net(nn.Module):  # class: Net
    def __init__(self):
        super().__init__()
        self.scale = Scale()
        self.bare = Bare(4, 4)
        self.local = make()
        self.parametrized = nn.utils.parametrizations.weight_norm(Bare(4, 4))
        self.made = type("Made", (nn.Module,), {"forward": lambda self, x: x * 2})()
        self.plain = nn.Linear(4, 4)
        self.unused = Bare(4, 4)

    def forward(self, x):
        x = self.bare(x)  # call: bare
        x = self.parametrized(self.scale(x))
        return self.plain(self.made(self.local(x)))
'''
CLASSES = {
    "": "Net",
    "bare": "Bare",
    "local": "Local",
    "parametrized": "Bare",
    "scale": "Scale",
    "scale.inner": "Scale.Inner",
    "unused": "Bare",
}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The models of `SOURCE`, in a file of their own."""
    path = tmp_path / "models.py"
    path.write_text(SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("models_of_places", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    places._class_line.cache_clear()
    return module


def inspected(model: nn.Module) -> HealthReport:
    """A report that has been to another process and back."""
    return pickle.loads(pickle.dumps(Inspector(model).run_inspection(torch.randn(32, 4))))


def at(models: ModuleType, mark: str) -> str:
    """The place that is marked so in `SOURCE`."""
    lines = SOURCE.splitlines()
    (number,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"# {mark}")]
    return f"{models.__file__}:{number}"


def test_every_layer_leads_to_the_class_statement_and_to_its_call(models: ModuleType) -> None:
    """Nested, local, decorated, replaced, without functions and under a class that torch made.

    A functional layer, a class that a call of `type` made and a name that is no layer have none.
    The call is that of the user's code: what never ran, and the model itself, have no such line.
    """
    report = inspected(models.Net())
    for layer, name in CLASSES.items():
        assert places.defined_at(report, layer) == at(models, f"class: {name}"), layer
    torchs, line = places.defined_at(report, "plain").rsplit(":", 1)
    assert Path(torchs).samefile(inspect.getsourcefile(nn.Linear))
    assert int(line) == inspect.getsourcelines(nn.Linear)[1]
    for layer in ("scale.inner.relu", "made", "nowhere"):
        assert places.defined_at(report, layer) == ""
    called_at = report.observation.called_at
    assert called_at("bare") == at(models, "call: bare")
    assert called_at("scale.inner") == at(models, "call: inner")
    assert {called_at(layer) for layer in ("", "unused", "nowhere")} == {""}
    (first, *_) = report.to_dict()["violations"]  # who reads the JSON need not look them up
    assert (first["layer"], first["defined_at"]) == ("scale", at(models, "class: Scale"))
    assert first["called_at"].startswith(f"{models.__file__}:")


def test_a_script_leads_to_the_class_it_was_made_of_and_generated_code_nowhere(
    models: ModuleType,
) -> None:
    """TorchScript has classes of its own; the file name of a traced graph's code is none."""
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        script = torch.jit.script(models.Bare(4, 4))
    assert places.defined_at(inspected(script), "") == at(models, "class: Bare")
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    assert "<" not in places.defined_at(inspected(graph), "")


def test_without_the_source_it_is_a_line_of_the_class(models: ModuleType) -> None:
    """A file that is gone or cannot be parsed costs the exact line, and nothing else."""
    report = inspected(models.Net())
    path = Path(models.__file__)
    for text in ("def broken(:", None):
        path.unlink() if text is None else path.write_text(text)
        places._class_line.cache_clear()
        places.linecache.checkcache(str(path))
        file, line = places.defined_at(report, "scale").rsplit(":", 1)
        assert file == models.__file__
        assert int(line) == models.Scale.__init__.__code__.co_firstlineno
        assert places.defined_at(report, "bare").startswith(torch.__path__[0])  # all that is known


def test_the_failure_names_the_users_own_class_and_no_others(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line on the way says where it is written; of torch's own classes nothing is said."""
    monkeypatch.chdir(Path(models.__file__).parent)
    line = at(models, "class: Scale").rpartition(":")[2]
    text = inspected(models.Net()).render("failure", width=100)
    assert f", class at models.py:{line})" in text
    alone = inspected(models.Scale()).render("failure", width=100)  # no layer feeds the model
    assert f"\nclass:        models.py:{line}\n" in alone
    torchs = models.Net()
    torchs.scale = nn.Identity()
    nn.init.constant_(torchs.plain.weight, float("nan"))
    text = inspected(torchs).render("failure", width=100)
    assert "called at models.py" in text
    assert "class" not in text
    for of_a_library in (nn.Linear, functools):
        assert places.is_of_a_library(f"{inspect.getsourcefile(of_a_library)}:1")
    assert not places.is_of_a_library(f"{__file__}:1")
