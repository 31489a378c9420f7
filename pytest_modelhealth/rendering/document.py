"""What there is to say of a result, made once, and written as text, as HTML or as Markdown."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, takewhile
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pytest_modelhealth.rendering.notation import Column, printable, readable, shorten, table

WIDTH = 100  # characters of a line, fewer where the terminal has fewer
NARROW = 80  # in fewer nothing is cut, and what does not fit goes on in the next line
LINES = 24  # a screen, which no failure is longer than


@cache
def templates(folder: Path) -> Environment:
    """Return what reads templates, which escape everything, hide nothing and miss no name."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        finalize=lambda value: readable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


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
    weight: float = 0  # the heaviest stay where there are too many


@dataclass(frozen=True)
class Document:
    """What there is to say of a result."""

    headline: str  # one line that stands alone
    verdict: str = ""  # the first word of the headline, where that is one
    facts: Sequence[str] = ()  # what was run and what else a reader should know, above the table
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()
    most: int | None = None  # so many rows are shown
    rest: Callable[[int], str] = "... and {:,} more".format  # how many rows are left out
    below: Sequence[str] = ()  # what else stands right below the table
    code: Sequence[str] = ()  # lines that are aligned, below the table
    remarks: Sequence[str] = ()
    narrowest: Sequence[tuple[int, int]] = ()  # columns that give way in text, and how far
    names: int | None = None  # the column whose names are abbreviated rather than cut
    indent: str = ""  # of the table in text
    marks: bool = False  # whether a column of marks stands first, in text

    def text(self, *, width: int | None = WIDTH, lines: int | None = None) -> str:
        """Return it for a terminal; rows are left out above so many `lines`.

        A width of `None` is the terminal's, of 56 to 100 characters; of a narrow one pytest takes
        four.
        """
        columns = shutil.get_terminal_size((WIDTH, LINES)).columns
        width = width or (min(columns, WIDTH) if columns >= NARROW else max(columns - 4, 56))
        above = [self.headline, *_folded(self.facts, width)]
        below = [*_folded(self.below, width), *[""] * bool(self.code)]
        below += _folded([*self.code, *self.remarks], width)
        most = len(self.rows[: self.most])
        while True:
            shown = ["", *self._table(width, most)] if most else []
            if most <= 1 or not lines or len([*above, *shown, *below]) <= lines:
                return "\n".join([*above, *shown, *below])
            most -= 1

    def _shown(self, most: int | None) -> tuple[list[Row], list[str]]:
        """Return the heaviest rows in their order, and the line on what is left out."""
        by_weight = sorted(range(len(self.rows)), key=lambda at: -self.rows[at].weight)
        left_out = len(by_weight[most:]) if most else 0
        rows = [self.rows[at] for at in sorted(by_weight[:most])]
        return rows, [f"{self.indent}{self.rest(left_out)}"] if left_out else []

    def _table(self, width: int, most: int) -> Iterator[str]:
        """Yield the rows as lines, with their notes below; a column of marks stands first.

        In a narrow terminal there is no table: each row is a sentence.
        """
        rows, rest = self._shown(most)
        titles = [column.title for column in self.columns]
        if width < NARROW:
            lines = []
            for row in rows:
                cells = (f"{t} {c}" for t, c in zip(titles[1:], row.cells[1:], strict=True) if c)
                lines.append(f"{row.mark} {row.cells[0]}: {', '.join(cells)}".lstrip())
        else:
            gap = 2 + any(row.mark for row in rows) if self.marks else 0
            head, *lines = table(
                [titles, *(row.cells for row in rows)],
                [at for at, column in enumerate(self.columns) if column.is_text],
                width=width - len(self.indent) - gap,
                narrowest=self.narrowest,
                names=self.names,
            )
            yield f"{self.indent}{'':{gap}}{head}"
            lines = [f"{row.mark:{gap}}{line}" for row, line in zip(rows, lines, strict=True)]
        for row, line in zip(rows, lines, strict=True):
            notes = (f"    {'warning: ' * n.warns}{n.check}: {n.text}" for n in row.notes)
            every = (f"{self.indent}{one}" for one in (line, *notes))
            yield from _folded(every, width)
        yield from rest

    def html(self) -> str:
        """Return a self-contained ``<div>``; whatever comes from a model is escaped."""
        rows, rest = self._shown(self.most)
        template = templates(Path(__file__).parent / "templates").get_template("document.html")
        html: str = template.render(
            document=self,
            rows=rows,
            below=[*rest, *self.below],
            reason=self.headline.removeprefix(f"{self.verdict}: "),
            remarks=[printable(remark) for remark in self.remarks],
        )
        return html

    def markdown(self) -> str:
        """Return it for GitHub and GitLab.

        Whatever may come from a model stands in code, where nothing is markup, a mention or a link.
        """
        rows, rest = self._shown(self.most)
        parts = [f"**{_span(self.headline)}**", _items(self.facts)]
        if rows:
            cells = [[column.title for column in self.columns], ["---"] * len(self.columns)]
            # a cell ends at a bar even in code: there "\|" is a bar, and "\\|" an end again
            cells += [
                [_span(cell).replace("\\|", "\\¦").replace("|", "\\|") for cell in row.cells]
                for row in rows
            ]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in cells))
        notes = [f"{row.cells[0]}: {n.check}: {n.text}" for row in rows for n in row.notes]
        parts.append(_items([*notes, *rest, *self.below, *self.remarks]))
        if self.code:
            code = "\n".join(map(printable, self.code))
            fence = "`" * max(3, _longest_run(code) + 1)
            parts.append(f"{fence}text\n{code}\n{fence}")
        return "\n\n".join(filter(None, parts)) + "\n"


def fitting(parts: Iterable[str], most_bytes: int) -> list[str]:
    """Return the first parts that fit into so many bytes of UTF-8."""
    sized = ((part, len(part.encode())) for part in parts)
    summed = accumulate(sized, lambda sum_, one: (one[0], sum_[1] + one[1]))
    return [part for part, size in takewhile(lambda one: one[1] <= most_bytes, summed)]


def labelled(line: str) -> tuple[str, str]:
    """Return the label of a line, ``"likely cause"``, if it has one, and what it says."""
    has_label = re.fullmatch(r"[\w ]+: *", line[:14])
    return (line[:14].partition(":")[0], line[14:]) if has_label else ("", line)


def _folded(lines: Iterable[str], width: int) -> Iterator[str]:
    """Yield lines, in a narrow terminal of at most `width`, at the depth of what a label names.

    No word is broken. A call may be broken in its brackets, so that it can still be pasted.
    """
    for line in lines:
        text = line.lstrip(" ")
        indent = line[: len(line) - len(text)]
        hanging = indent + " " * (14 if labelled(text)[0] else 2)
        wrapped = textwrap.wrap(
            re.sub(r"\((?=\"|\w+=)", "( ", text), width, initial_indent=indent,
            subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        folded = (re.sub(r"\( (?=\"|\w+=)", "(", part) for part in wrapped)
        yield from folded if len(line) > width < NARROW else [line]


def _items(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_span(line)}" for line in map(str.strip, lines) if line)


_WIDEST = 300  # longer lines and cells are cut in Markdown


def _span(text: str) -> str:
    """Return `text` as a code span on one line."""
    shown = shorten(printable(text[: _WIDEST + 1]), _WIDEST)
    fence = "`" * (_longest_run(shown) + 1)
    pad = " " if shown[:1] in ("`", " ") or shown[-1:] in ("`", " ") else ""
    return f"{fence}{pad}{shown}{pad}{fence}" if shown else ""


def _longest_run(text: str) -> int:
    """Return how many backticks stand in a row: the fence of a code is longer."""
    return max(map(len, re.findall("`+", text)), default=0)
