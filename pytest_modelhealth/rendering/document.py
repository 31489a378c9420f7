"""What there is to say of a result, made once, and written as text or as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pytest_modelhealth.rendering.notation import Column, printable, shorten, table
from pytest_modelhealth.rendering.template import template


class Note(NamedTuple):
    """What stands below a row: a check, what it objects to, and what follows; in HTML also why."""

    check: str
    text: str
    following: str = ""
    asides: Sequence[str] = ()
    warns: bool = False


class Row(NamedTuple):
    """A row of the table: a cell for each column, or one for all.

    Args:
        cells: their texts.
        kind: a word of ours for how it is shown: ``"violated"``, ``"unseen"``.
        help: what hovering shows, such as a reason.
        name: the whole name, where the first cell has a part of it.
        mark: a sign before it, in text.
        notes: what stands below.
    """

    cells: Sequence[str]
    kind: str = ""
    help: str = ""
    name: str = ""
    mark: str = ""
    notes: Sequence[Note] = ()


@dataclass(frozen=True)
class Document:
    """What there is to say of a result.

    Args:
        headline: one line that stands alone; in HTML it begins with `verdict`.
        verdict: its first word, where that is one.
        facts: what was run, and what else a reader should know; a line each, above the table.
        columns: of the table.
        rows: of the table.
        rest: how many rows are left out.
        code: lines that are aligned, below the table.
        remarks: a line each, at the end.
        narrowest: columns that give way in text, in this order, and how far.
        names: the column whose names are abbreviated rather than cut.
        indent: of the table in text; `None` stands for a column of marks.
    """

    headline: str
    verdict: str = ""
    facts: Sequence[str] = ()
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()
    rest: str = ""
    code: Sequence[str] = ()
    remarks: Sequence[str] = ()
    narrowest: Sequence[tuple[int, int]] = ()
    names: int | None = None
    indent: str | None = ""

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
        cells += [[row.mark, *row.cells][1 - shift :] for row in self.rows if len(row.cells) > 1]
        texts = [number + shift for number, column in enumerate(self.columns) if column.is_text]
        head, *body = table(
            cells,
            [*range(shift), *texts],
            width=width - len(indent),
            narrowest=[(column + shift, least) for column, least in self.narrowest],
            names=None if self.names is None else self.names + shift,
        )
        aligned, lines = iter(body), [head]
        for row in self.rows:
            lines.append(next(aligned) if len(row.cells) > 1 else shorten(row.cells[0], width))
            for note in row.notes:
                text = f"    {'warning: ' * note.warns}{note.check}: {note.text}"
                lines.append(f"{text} ({note.following})" if note.following else text)
        return [f"{indent}{line}" for line in lines]

    def html(self) -> str:
        """Return a self-contained ``<div>``; whatever comes from a model is escaped."""
        html: str = template("document.html").render(
            document=self,
            reason=self.headline.removeprefix(f"{self.verdict}: "),
            remarks=[printable(remark) for remark in self.remarks],
        )
        return html
