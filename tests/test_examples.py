"""The examples outside the suite: the script runs, and each broken model fails as it should."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BROKEN = ROOT / "examples" / "broken"

# What the first line of each failure begins with: the worst layer and the check, or for two models
# the place where they part.
HEADLINES = {
    "test_dead_relu.py": "unhealthy: act1 (dead_units): ",
    "test_detached_branch.py": "unhealthy: author_encoder.2 (missing_gradients): ",
    "test_exploding_gradient.py": "unhealthy: hidden.0 (initial_weights): ",
    "test_float16_overflow.py": "unhealthy: pool (finite): ",
    "test_leaking_batch.py": "unhealthy: Centred (sample_independence): ",
    "test_leaking_future.py": "unhealthy: blocks.0.attn (causality): ",
    "test_nan_masked_softmax.py": "unhealthy: attention.softmax (finite): ",
    "test_refactored_attention.py": "not equivalent: attentions.0.scaled_dot_product_attention: ",
    "test_vanishing_gradient.py": "unhealthy: hidden.0 (grad_norm): ",
}

# What takes each refactor back: what stands in the file, and what stood there before.
REPAIRS = {
    "test_dead_relu.py": ("self.apply(self._init)", "self._init(self.head)"),
    "test_detached_branch.py": ("(author).detach()", "(author)"),
    "test_exploding_gradient.py": ("nn.init.normal_(linear", "nn.init.kaiming_normal_(linear"),
    "test_float16_overflow.py": (
        "scaled.exp().sum(dim=(2, 3)).log()",
        "scaled.logsumexp(dim=(2, 3))",
    ),
    "test_leaking_batch.py": ("features.mean(0, keepdim=True)", "features.mean(1, keepdim=True)"),
    "test_leaking_future.py": ("triu(diagonal=2)", "triu(diagonal=1)"),
    "test_nan_masked_softmax.py": ('float("-inf")', "-1e9"),
    "test_refactored_attention.py": ("scale=x.shape[-1]", "scale=query.shape[-1]"),
    "test_vanishing_gradient.py": ("torch.sigmoid(", "F.relu("),
}


@pytest.mark.slow
def test_broken_examples_fail_as_they_say_and_repaired_ones_pass(pytester, monkeypatch):
    """The first line of each failure names the culprit; with its one fault taken back each passes.

    The pages show what the dead ReLU prints, character for character.
    """
    monkeypatch.setenv("COLUMNS", "80")
    broken, repaired = Path("examples/broken"), Path("repaired")
    shutil.copytree(BROKEN, broken, ignore=shutil.ignore_patterns("__pycache__"))
    repaired.mkdir()
    for file, (fault, repair) in REPAIRS.items():
        source = (BROKEN / file).read_text(encoding="utf-8")
        assert source.count(fault) == 1
        (repaired / file).write_text(source.replace(fault, repair), encoding="utf-8")
    result = pytester.runpytest("--import-mode=importlib", *sorted(broken.glob("*.py")), repaired)
    result.assert_outcomes(failed=len(REPAIRS), passed=len(REPAIRS))
    output = result.stdout.str()

    failure = (
        r"^E +((?:unhealthy|not equivalent): .*?: ).*?"
        r"^examples/broken/(\S+):\d+: ModelHealthError$"
    )
    found = re.findall(failure, output, re.MULTILINE | re.DOTALL)
    assert {file: headline for headline, file in found} == HEADLINES
    for page in ("README.md", "docs/tutorials/first-test.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert shown in output, page


def test_the_examples_run_without_pytest_timeout(pytester):
    """Its options in pyproject.toml are no unknown ones then, which --strict-config refuses."""
    options = ("-p", "no:timeout", "-p", "no:cacheprovider", f"--rootdir={ROOT}")
    example = ROOT / "examples" / "test_refactor.py"
    result = pytester.runpytest("-c", ROOT / "pyproject.toml", *options, "--collect-only", example)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["configfile: pyproject.toml", "*3 tests collected*"])


def test_script(tmp_path, monkeypatch, capsys):
    """``python -m examples.script`` prints the report and saves the histogram as a picture."""
    picture = tmp_path / "histogram.png"
    monkeypatch.setattr(sys, "argv", ["script.py", str(picture)])
    runpy.run_module("examples.script", run_name="__main__")
    output = capsys.readouterr().out
    assert "healthy" in output.splitlines()[0]
    assert "fc1: mean" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


TOOLS = ROOT / "examples" / "tools"


def tools_page(language: str) -> list[str]:
    """Return the blocks of the page on tools in a language."""
    page = (ROOT / "docs" / "how-to" / "tools.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def test_the_page_on_tools_shows_what_the_examples_run():
    """Its code is a piece of an example, and its failures are those that examples ask for."""
    sources = [file.read_text(encoding="utf-8") for file in sorted(TOOLS.glob("test_*.py"))]
    blocks, failures = tools_page("py"), tools_page("text")
    assert len(blocks) > 5
    assert [block for block in blocks if not any(block in source for source in sources)] == []
    asked = [ast.literal_eval(found) for source in sources for found in re.findall(_MATCH, source)]
    assert len(asked) == len(sources)
    assert [text for text in failures if not any(re.search(a, text) for a in asked)] == []


_MATCH = r"ModelHealthError, match=(r?\"[^\"]*\")"
