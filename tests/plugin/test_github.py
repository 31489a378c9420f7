"""What GitHub's runner reads of a run: commands in the log, and the step's summary.

The commands are read by the rules of the runner (`ActionCommand.TryParseV2` in
https://github.com/actions/runner/blob/main/src/Runner.Common/ActionCommand.cs), the summary by
markdown-it with GitHub's tables.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from pytest_modelhealth.plugin.attachments import github
from pytest_modelhealth.runs import faults
from pytest_modelhealth.runs.faults import summary

MODELS = """
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), float("nan")))

    def forward(self, x):
        return x * self.weight

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.scale = Scale()

    def forward(self, x):
        return self.scale(self.first(x))  # the call
"""
SUITE = """
import nets, pytest, torch
from models import Net, Scale
from torch import nn

def run(inspector, model, batch=nets.BATCH):
    return inspector(model).run_inspection(batch)  # any model

def test_healthy(inspector):
    run(inspector, nets.healthy())

def test_called(inspector):
    run(inspector, Net())

def test_class(inspector):
    run(inspector, Scale(), torch.randn(64, 8))

def test_plain(inspector):  # the test
    inspector(nn.Sequential(*nets.with_dead_relu())).run_inspection(nets.BATCH)  # the line

def test_different(inspector):
    inspector.compare(nets.healthy(), nets.with_nan(), nets.BATCH)  # the comparison

@pytest.mark.modelhealth(min_samples=65, inconclusive="fail")
def test_inconclusive(inspector):
    inspector(nets.with_dead_relu()).run_inspection(nets.BATCH)  # too few

@pytest.mark.parametrize("name", ["a,b:c%0A::error::x"])
def test_hostile(inspector, name):
    model = nn.Sequential()
    model.add_module("@octocat <b>|`*\\n::error::x\\n#1 50%", nets.with_nan()[2])
    run(inspector, model, torch.randn(64, 8))

@pytest.mark.xfail
def test_expected(inspector):
    run(inspector, nets.with_nan())

def test_own_reason(inspector):
    run(inspector, nets.healthy())
    assert 1 == 2

def test_without():
    assert 1 == 2
"""


class Command(NamedTuple):
    name: str
    properties: dict[str, str]
    message: str


def commands(output: str) -> list[Command]:
    """The commands that the runner finds in the lines of a log."""
    return [command for line in output.splitlines() if (command := parsed(line))]


def parsed(line: str) -> Command | None:
    """Read one line as `ActionCommand.TryParseV2` does."""
    line = line.lstrip()
    if not line.startswith("::"):
        return None
    end = line.find("::", 2)
    if end < 0:
        return None
    name, _, given_properties = line[2:end].partition(" ")
    properties = {}
    for one in filter(None, given_properties.strip().split(",")):
        key, sign, value = one.partition("=")
        if sign and key and value:
            properties[key] = unescaped(value, _PROPERTY)
    return Command(name, properties, unescaped(line[end + 2 :], _DATA))


_DATA = {"%0D": "\r", "%0A": "\n", "%25": "%"}
_PROPERTY = {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ",", "%25": "%"}


def unescaped(text: str, signs: dict[str, str]) -> str:
    """Replace one sign after the other, ``%25`` last, as the runner does."""
    for escape, sign in signs.items():
        text = text.replace(escape, sign)
    return text


@given(st.text(), st.text())
def test_what_is_escaped_is_read_as_it_was(title: str, message: str) -> None:
    """No text ends its line, its property or the command, nor is changed."""
    line = f"::error title={github._escaped(title, ':,')},line=1::{github._escaped(message)}"
    expected = {"line": "1"} | ({"title": title} if title else {})
    assert len(line.split("\n")) == len(line.split("\r")) == 1
    assert parsed(line) == Command("error", expected, message)


def line(text: str, mark: str) -> str:
    """The number of the line that ends in a mark."""
    return str(next(n for n, one in enumerate(text.splitlines(), 1) if one.endswith(f"# {mark}")))


@pytest.fixture
def on_github(nets: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder below a checkout, where pytest believes to run under GitHub Actions."""
    folder = nets.mkdir("project")
    (folder / "nets.py").write_text((nets.path / "nets.py").read_text())
    (folder / "models.py").write_text(MODELS)
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    nets.syspathinsert(folder)
    nets.chdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(nets.path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(nets.path / "summary.md"))
    return nets


FAULTS = {
    "test_called": ("project/models.py", line(MODELS, "the call"), "scale", "finite"),
    "test_class": ("project/models.py", "5", "Scale", "finite"),
    "test_plain": ("project/test_suite.py", line(SUITE, "the line"), "1", "dead_units"),
    "test_different": ("project/test_suite.py", line(SUITE, "the comparison"), "2", "comparison"),
    "test_inconclusive": ("project/test_suite.py", line(SUITE, "too few"), "1", "dead_units"),
    "test_hostile": (
        "project/test_suite.py",
        line(SUITE, "any model"),
        r"@octocat <b>|`*\n::error::x\n#1 50%",
        "finite",
    ),
}
"""Where the failing tests are annotated, the culprit and the check."""


def test_each_failing_test_is_annotated_and_in_the_summary(on_github: pytest.Pytester) -> None:
    """Once, at the call, the class or the inspection; no name is obeyed."""
    (on_github.path / "summary.md").write_text("what an earlier command of the step wrote")
    result = on_github.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=8, xfailed=1)
    found = {}
    for name, properties, message in commands(result.stdout.str()):
        assert name == "error"
        test = properties["title"].split("::")[1].partition("[")[0].partition(":")[0]
        assert test not in found
        found[test] = (properties["file"], properties["line"], message, properties["title"])
    assert found.keys() == FAULTS.keys()
    for test, (path, number, culprit, check) in FAULTS.items():
        assert found[test][:2] == (path, number), test
        assert found[test][2].partition(": ")[2].startswith(f"{culprit} ({check}): ")
        assert found[test][3].endswith(f"{culprit} ({check})")
    assert "\nlikely cause: " in found["test_plain"][2]

    text = (on_github.path / "summary.md").read_text(encoding="utf-8")
    page = Page.of(text)
    assert page.heading == "Model health: 6 of 9 tests with a model failed"
    assert [row[0].partition("::")[2].partition("[")[0] for row in page.rows] == [
        row.partition("::")[2].partition("[")[0] for row in page.summaries
    ]
    rows = {row[0].partition("::")[2].partition("[")[0]: row for row in page.rows}
    assert rows.keys() == FAULTS.keys()
    for test, (_, _, culprit, check) in FAULTS.items():
        assert rows[test][2:4] == [culprit, check]
    assert rows["test_inconclusive"][1] == "inconclusive"
    for body, row in zip(page.bodies, page.rows, strict=True):
        assert body.startswith(row[1].replace("different", "not equivalent"))
    assert page.strange == set()


class Page(NamedTuple):
    """What markdown-it makes of a summary."""

    heading: str
    rows: list[list[str]]
    summaries: list[str]
    bodies: list[str]
    strange: set[str]
    """Tags that are none of ours, and text outside of code."""

    @classmethod
    def of(cls, text: str) -> Page:
        """Read a summary as GitHub shows it."""
        shown = MarkdownIt("gfm-like", {"linkify": False}).enable("table").render(text)
        tags = set(re.findall(r"<(\w+)[^>]*>", shown))
        rows = [
            [read(cell) for cell in re.findall(r"<td>(.*?)</td>", row, re.DOTALL)]
            for row in re.findall(r"<tr>\s*(<td>.*?)</tr>", shown, re.DOTALL)
        ]
        bare = re.sub(r"<code[^>]*>.*?</code>", "", shown, flags=re.DOTALL)
        heading, *titles = re.findall(r"<strong>(.*?)</strong>", shown, re.DOTALL)
        bodies = re.findall(r"<pre><code[^>]*>(.*?)</code></pre>", shown, re.DOTALL)
        return cls(
            read(heading),
            rows,
            [read(one) for one in titles],
            [html.unescape(one) for one in bodies],
            (tags - _TAGS) | set(re.findall(r"@\w+|#\d+", bare)),
        )


_TAGS = {"strong", "p", "table", "thead", "tbody", "tr", "th", "td", "em"}
_TAGS |= {"code", "pre", "ul", "li"}


def read(shown: str) -> str:
    """The text of a piece of HTML in which only `code` is a tag."""
    inner = re.sub(r"</?code>", "", shown)
    assert "<" not in inner
    return html.unescape(inner)


def a_test(name: str, *, label: str = "fc", message: str = "is bad", text: str = "") -> Any:
    """A failing test as the file of a run has it."""
    finding = {"label": label, "check": "finite", "message": message, "cause": ""}
    finding |= {"layer": label, "role": "activations", "called_at": "", "defined_at": ""}
    result = {"kind": "inspection", "verdict": "unhealthy", "violations": [finding]}
    result |= {"warnings": [], "place": "", "text": text or f"unhealthy: {label}"}
    return {
        "id": name, "file": "test_it.py", "line": 1, "outcome": "failed", "message": "",
        "results": [result],
    }  # fmt: skip


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1))
def test_no_text_becomes_markup(name: str, label: str, text: str) -> None:
    """Whatever stands in names and messages is shown as it is, in code."""
    page = Page.of(summary([a_test(name, label=label, message=text, text=text)], 10**6))
    assert page.strange == set()
    assert len(page.rows) == len(page.bodies) == 1
    assert len(page.rows[0]) == 5


def test_a_summary_is_never_longer_than_github_takes() -> None:
    """What does not fit is left out, and how much that is is said."""
    tests = [a_test(f"test_{n}", text="é" * 5000) for n in range(300)]
    whole = summary(tests, 10**9)
    page = Page.of(whole)
    assert len(page.bodies) == 300
    assert len(page.rows) == faults._MOST_ROWS
    for most in (github.MOST_BYTES, 100_000, 60_000, 500, 200, 10, 0, -5):
        text = summary(tests, most)
        assert len(text.encode()) <= max(0, most)
        if most >= 60_000:
            page = Page.of(text)
            left_out = 300 - len(page.bodies)
            assert f"The texts of {left_out} failing tests are left out" in text
            assert page.strange == set()


def test_a_few_annotations_stand_for_many() -> None:
    """GitHub shows ten of a step; the summary has all."""
    tests = [a_test(f"test_{n}") for n in range(12)]
    lines = list(github.commands(tests, Path(), Path()))
    assert len(commands("\n".join(lines))) == len(lines) == 10
    assert "file" not in commands(lines[0])[0].properties  # no such file in the checkout
    assert list(github.commands([], Path(), Path())) == []


def test_what_cannot_be_written_costs_a_line(
    on_github: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure and its annotation stand, and the line names the file."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(on_github.path))  # root may write any file
    result = on_github.runpytest("-k", "test_plain")
    result.assert_outcomes(failed=1, deselected=9)
    assert len(commands(result.stdout.str())) == 1
    result.stdout.fnmatch_lines("modelhealth: the summary for GitHub could not be written: *")


@pytest.mark.parametrize("why", ["switched off", "elsewhere", "no model"])
def test_otherwise_nothing_is_written(
    on_github: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Without GitHub, without this plugin and without inspections there is no line and no file."""
    if why == "elsewhere":
        monkeypatch.setenv("GITHUB_ACTIONS", "false")
    options = ["-p", "no:modelhealth.github"] if why == "switched off" else []
    result = on_github.runpytest("-k", "without" if why == "no model" else "plain", *options)
    result.assert_outcomes(failed=1, deselected=9)
    assert commands(result.stdout.str()) == []
    path = on_github.path / "summary.md"
    assert not path.exists() or path.read_text() == ""
