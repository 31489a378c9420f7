"""What GitHub's runner reads of a run: commands in the log, and the step's summary.

The commands are read by the rules of the runner (`ActionCommand.TryParseV2` in
https://github.com/actions/runner/blob/main/src/Runner.Common/ActionCommand.cs), the summary by
markdown-it with GitHub's tables.
"""

from __future__ import annotations

import html
import re
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from pytest_modelhealth.plugin.attachments import github
from pytest_modelhealth.runs import faults
from pytest_modelhealth.runs.faults import summary
from tests.runs.difference import made


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
    page = Page.of(
        summary(made.run(a_test(name, label=label, message=text, text=text), notes=[text]), 10**6)
    )
    assert page.strange == set()
    assert len(page.rows) == len(page.bodies) == 1
    assert len(page.rows[0]) == 5


def test_a_summary_is_never_longer_than_github_takes() -> None:
    """What does not fit is left out, and how much that is is said."""
    tests = made.run(*(a_test(f"test_{n}", text="é" * 5000) for n in range(300)), ran=301)
    whole = summary(tests, 10**9)
    page = Page.of(whole)
    assert page.heading.endswith("300 of 301 tests inspected a model, exit status 0")
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
