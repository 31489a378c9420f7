"""What there is to say of a result, made once, and written as text, as HTML or as Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pytest_modelhealth.rendering.notation import Column, printable, shorten, table
from pytest_modelhealth.rendering.template import environment

_TEMPLATES = environment(Path(__file__).parent / "templates")


class Note(NamedTuple):
    """What stands below a row: a check, what it objects to; in HTML also why."""

    check: str
    text: str
    asides: Sequence[str] = ()
    warns: bool = False


class Row(NamedTuple):
    """A row of the table."""

    cells: Sequence[str]
    kind: str = ""  # a word of ours for how it is shown: "violated", "unseen"
    help: str = ""  # what hovering shows, such as a reason
    name: str = ""  # the whole name, where the first cell has a part of it
    mark: str = ""  # a sign before it, in text
    notes: Sequence[Note] = ()


@dataclass(frozen=True)
class Document:
    """What there is to say of a result."""

    headline: str  # one line that stands alone
    verdict: str = ""  # the first word of the headline, where that is one
    facts: Sequence[str] = ()  # what was run and what else a reader should know, above the table
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()
    rest: str = ""  # how many rows are left out
    code: Sequence[str] = ()  # lines that are aligned, below the table
    remarks: Sequence[str] = ()
    narrowest: Sequence[tuple[int, int]] = ()  # columns that give way in text, and how far
    names: int | None = None  # the column whose names are abbreviated rather than cut
    indent: str | None = ""  # of the table in text; `None` stands for a column of marks

    def text(self, *, width: int = 100) -> str:
        """Return it for a terminal; the table takes `width` characters, where that can be."""
        lines = [self.headline, *self.facts]
        lines += ["", *self._table(width)] if self.rows else []
        lines += [self.rest] if self.rest else []
        lines += ["", *self.code] if self.code else []
        return "\n".join([*lines, *self.remarks])

    def _table(self, width: int) -> list[str]:
        """Return the rows as lines, with their notes below; a column of marks stands first."""
        shift, indent = int(self.indent is None), self.indent or ""
        cells = [["", *(column.title for column in self.columns)][1 - shift :]]
        cells += [[row.mark, *row.cells][1 - shift :] for row in self.rows]
        texts = [number + shift for number, column in enumerate(self.columns) if column.is_text]
        head, *body = table(
            cells,
            [*range(shift), *texts],
            width=width - len(indent),
            narrowest=[(column + shift, least) for column, least in self.narrowest],
            names=None if self.names is None else self.names + shift,
        )
        lines = [head]
        for row, aligned in zip(self.rows, body, strict=True):
            notes = (f"    {'warning: ' * n.warns}{n.check}: {n.text}" for n in row.notes)
            lines += [aligned, *notes]
        return [f"{indent}{line}" for line in lines]

    def html(self) -> str:
        """Return a self-contained ``<div>``; whatever comes from a model is escaped."""
        html: str = _TEMPLATES.get_template("document.html").render(
            document=self,
            reason=self.headline.removeprefix(f"{self.verdict}: "),
            remarks=[printable(remark) for remark in self.remarks],
        )
        return html

    def markdown(self) -> str:
        """Return it for GitHub and GitLab.

        Whatever may come from a model stands in code, where nothing is markup, a mention or a link.
        """
        parts = [
            f"**{_span(self.headline)}**",
            "\n".join(f"- {_span(fact)}" for fact in self.facts),
        ]
        if self.rows:
            titles = [column.title for column in self.columns]
            cells = [titles, ["---"] * len(titles)]
            cells += [[_cell(cell) for cell in row.cells] for row in self.rows]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in cells))
        notes = [f"{row.cells[0]}: {n.check}: {n.text}" for row in self.rows for n in row.notes]
        lines = [*notes, self.rest, *self.remarks]
        parts.append("\n".join(f"- {_span(line)}" for line in lines if line))
        if self.code:
            code = "\n".join(map(printable, self.code))
            fence = "`" * max(3, _longest_run(code) + 1)
            parts.append(f"{fence}text\n{code}\n{fence}")
        return "\n\n".join(filter(None, parts)) + "\n"


_WIDEST = 300
"""Longer lines and cells are cut in Markdown."""


def _span(text: str) -> str:
    """Return `text` as a code span on one line."""
    shown = shorten(printable(text[: _WIDEST + 1]), _WIDEST)
    fence = "`" * (_longest_run(shown) + 1)
    pad = " " if shown[:1] in ("`", " ") or shown[-1:] in ("`", " ") else ""
    return f"{fence}{pad}{shown}{pad}{fence}" if shown else ""


def _cell(text: str) -> str:
    """Return the same for a table.

    A cell ends at a bar even in a code span. There "\\|" is a bar, and "\\\\|" an end again.
    """
    return _span(text).replace("\\|", "\\¦").replace("|", "\\|")


def _longest_run(text: str) -> int:
    """Return how many backticks stand in a row: the fence of a code is longer."""
    return max(map(len, re.findall("`+", text)), default=0)
