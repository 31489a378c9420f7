"""Writes a test file as a person would, laid out as ``ruff format`` has it."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pytest_modelhealth.guessing.guess import WIDTH

_WORD_ENDS = re.compile(
    r"(?<=[a-zA-Z])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z]{2,}(?![a-z]))|(?<=[0-9])(?=[A-Z])"
)
_LAMBDA = re.compile(r"lambda (?P<names>[^:]+): (?P<body>.+)")


@dataclass(frozen=True)
class TestText:
    """A test file.

    Args:
        name: of the model.
        imports: the import lines of all that it says.
        statements: the body of ``make``, up to its return.
        returned: what it returns.
        loss: the expression of the loss, where it is a function to be written.
        attributes: class attributes, each as a line with the comments above it.
    """

    __test__ = False

    name: str
    imports: tuple[str, ...]
    statements: tuple[str, ...]
    returned: str
    loss: str = ""
    attributes: tuple[tuple[tuple[str, ...], str], ...] = field(default=())

    def __str__(self) -> str:
        parts = [
            f'"""Is {self.name} healthy? pytest --modelhealth-explain says what is checked."""'
        ]
        parts += ["", *_sorted((*self.imports, "from pytest_modelhealth import ModelHealthSuite"))]
        parts += ["", ""]
        written = _LAMBDA.fullmatch(self.loss)
        if written is not None:
            parts += [f"def loss({written['names']}):", f"    return {written['body']}", "", ""]
        parts.append(f"class {self.class_name}(ModelHealthSuite):")
        for comments, line in self.attributes:
            parts += [f"    {text}" for comment in comments for text in _comment(comment)]
            parts += [textwrap.indent(line, "    "), ""]
        parts.append("    def make(self):")
        body = [*self.statements, f"return {self.returned}"]
        parts += [textwrap.indent(line, "        ") for line in body]
        return "\n".join(parts) + "\n"

    @property
    def class_name(self) -> str:
        """The name of the class."""
        words = re.split(r"[^0-9A-Za-z]+", self.name)
        joined = "".join(word[:1].upper() + word[1:] for word in words)
        return f"Test{joined}"

    @property
    def file_name(self) -> str:
        """The name of the file, where none was given."""
        spaced = _WORD_ENDS.sub("_", self.name)
        return f"test_{re.sub(r'[^0-9A-Za-z]+', '_', spaced).lower()}_health.py"


def returned(loss: str, *, has_target: bool) -> str:
    """Return what ``make`` returns."""
    parts = ["model", "inputs"]
    if has_target:
        parts.append("target")
    if loss:
        parts.append("loss" if _LAMBDA.fullmatch(loss) else loss)
    return ", ".join(parts)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def _sorted(lines: Iterable[str]) -> list[str]:
    """Return import lines in groups: of others, then of this project; plain ones first."""
    groups: tuple[set[str], set[str]] = set(), set()
    for line in _merged(lines):
        groups[_is_of_project(line.split()[1])].add(line)
    written: list[str] = []
    for group in filter(None, groups):
        if written:
            written.append("")
        written += sorted(
            group, key=lambda line: (line.startswith("from"), line.split()[1].lower())
        )
    return written


def _merged(lines: Iterable[str]) -> list[str]:
    """Return import lines in which each module stands once."""
    names: dict[str, set[str]] = {}
    plain = []
    for line in lines:
        if line.startswith("from "):
            _, module, _, listed = line.split(" ", 3)
            names.setdefault(module, set()).update(listed.split(", "))
        else:
            plain.append(line)
    joined = (f"from {m} import {', '.join(sorted(n, key=_order))}" for m, n in names.items())
    return [*plain, *joined]


def _order(name: str) -> tuple[int, str]:
    """Sort as linters do: constants, classes, functions."""
    if name.isupper() and len(name) > 1:
        return 0, name
    return (1, name) if name[:1].isupper() else (2, name)


def _is_of_project(module: str) -> bool:
    """Whether a module lies below the current directory, and in no environment there."""
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return False
    places = [found.origin] if found and found.origin else []
    places += list(found.submodule_search_locations or ()) if found else []
    here = Path.cwd()
    return any(
        Path(place).is_relative_to(here) and "site-packages" not in place for place in places
    )
