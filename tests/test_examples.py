"""The examples outside the suite: the script runs, and each broken model fails as it should."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BROKEN = ROOT / "examples" / "broken"

# The worst layer and the check that the headline has to name, by file.
CULPRITS = {
    "test_dead_relu.py": ("act1", "dead_units"),
    "test_detached_branch.py": ("author_encoder.2", "missing_gradients"),
    "test_exploding_gradient.py": ("hidden.0", "initial_weights"),
    "test_float16_overflow.py": ("pool", "finite"),
    "test_nan_masked_softmax.py": ("attention.softmax", "finite"),
    "test_vanishing_gradient.py": ("hidden.0", "grad_norm"),
}

# Those that compare two models, with what their headline has to say of the place.
DIVERGENCES = {"test_refactored_attention.py": "attentions.0.scaled_dot_product_attention"}

# What takes each refactor back: what stands in the file, and what stood there before.
REPAIRS = {
    "test_dead_relu.py": ("self.apply(self._init)", "self._init(self.head)"),
    "test_detached_branch.py": ("(author).detach()", "(author)"),
    "test_exploding_gradient.py": ("nn.init.normal_(linear", "nn.init.kaiming_normal_(linear"),
    "test_float16_overflow.py": (
        "scaled.exp().sum(dim=(2, 3)).log()",
        "scaled.logsumexp(dim=(2, 3))",
    ),
    "test_nan_masked_softmax.py": ('float("-inf")', "-1e9"),
    "test_refactored_attention.py": ("scale=x.shape[-1]", "scale=query.shape[-1]"),
    "test_vanishing_gradient.py": ("torch.sigmoid(", "F.relu("),
}


def run_pytest(folder: Path, *arguments: str) -> str:
    """Return what pytest prints in `folder`, started as a user would."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        env=environment | {"COLUMNS": "80", "PYTHONUTF8": "1"},
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return run.stdout + run.stderr


@pytest.fixture(scope="module")
def output():
    """What pytest prints for all of `examples/broken`."""
    files = sorted(str(path.relative_to(ROOT)) for path in BROKEN.glob("test_*.py"))
    return run_pytest(ROOT, *files)


@pytest.fixture(scope="module")
def headlines(output):
    """The first line of each failure, by the name of its file."""
    failure = (
        r"^E +((?:unhealthy|not equivalent): .*?)$.*?^examples/broken/(\S+):\d+: ModelHealthError$"
    )
    return {file: line for line, file in re.findall(failure, output, re.MULTILINE | re.DOTALL)}


def test_every_broken_example_fails(output, headlines):
    """Each file in `examples/broken` has one test, which fails; nothing else goes wrong."""
    assert set(headlines) == set(REPAIRS), output
    assert re.search(rf"^=+ {len(REPAIRS)} failed in", output, re.MULTILINE)


@pytest.mark.parametrize("file", CULPRITS)
def test_headline_names_the_culprit(file, headlines):
    """The first line of the failure names the layer where the fault begins, and the check."""
    layer, check = CULPRITS[file]
    assert headlines[file].startswith(f"unhealthy: {layer} ({check}): ")


@pytest.mark.parametrize("file", DIVERGENCES)
def test_headline_names_where_two_models_part(file, headlines):
    """The first line of the failure names the layer that a refactor changed."""
    assert headlines[file].startswith(f"not equivalent: {DIVERGENCES[file]}: ")


def test_repaired_examples_pass(tmp_path):
    """With its one fault taken back, each broken example is healthy: nothing else is to blame."""
    for file, (fault, repair) in REPAIRS.items():
        source = (BROKEN / file).read_text(encoding="utf-8")
        assert source.count(fault) == 1
        (tmp_path / file).write_text(source.replace(fault, repair), encoding="utf-8")
    output = run_pytest(tmp_path)
    assert f"{len(REPAIRS)} passed in" in output, output


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/first-test.md"])
def test_pages_show_real_output(page, output):
    """A failure on these pages is what the dead ReLU prints, character for character."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert shown in output


def test_script(tmp_path, monkeypatch, capsys):
    """``python -m examples.script`` prints the report and saves the histogram as a picture."""
    picture = tmp_path / "histogram.png"
    monkeypatch.setattr(sys, "argv", ["script.py", str(picture)])
    runpy.run_module("examples.script", run_name="__main__")
    output = capsys.readouterr().out
    assert "healthy" in output.splitlines()[0]
    assert "fc1: mean" in output
    assert picture.read_bytes().startswith(b"\x89PNG")
