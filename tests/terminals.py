"""A terminal for tests: it shows what programs write to it, as xterm does."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

_TOKEN = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\x1b[78D]|[^\x1b]")


class Screen:
    """What stands on a terminal, and every row that ever began with ``modelhealth:``.

    Args:
        columns: its width.
        rows: its height.
    """

    def __init__(self, columns: int = 80, rows: int = 10) -> None:
        self.columns, self.height = columns, rows
        self.rows = [""] * rows
        self.shown: list[str] = []
        self._row = self._column = 0
        self._kept, self._wraps = (0, 0), True

    @property
    def text(self) -> str:
        """Everything that stands there, what has scrolled off the top as well."""
        return "\n".join(row.rstrip() for row in self.rows).rstrip()

    def write(self, text: str) -> None:
        """Take what a program writes.

        Raises:
            ValueError: an escape sequence that this terminal does not know.
        """
        for token in _TOKEN.findall(text):
            if len(token) == 1:
                self._take(token)
            elif not token.endswith("m"):  # colours
                self._obey(token)
        self.shown += [row.rstrip() for row in self.rows if row.startswith("modelhealth:")]

    def _take(self, letter: str) -> None:
        if letter == "\n":
            self._down()
        elif letter == "\r":
            self._column = 0
        elif letter >= " ":
            self._put(letter)

    def _put(self, letter: str) -> None:
        if self._column == self.columns and self._wraps:
            self._down()
            self._column = 0
        self._column = min(self._column, self.columns - 1)
        row = self.rows[self._row].ljust(self._column)
        self.rows[self._row] = row[: self._column] + letter + row[self._column + 1 :]
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self.rows):
            self.rows.append("")

    def _obey(self, sequence: str) -> None:
        top = len(self.rows) - self.height
        if sequence == "\x1bD":
            self._down()
        elif sequence == "\x1b[A":
            self._row = max(self._row - 1, top)
        elif sequence == "\x1b[B":
            self._row = min(self._row + 1, len(self.rows) - 1)
        elif sequence == "\x1b7":
            self._kept = self._row - top, self._column
        elif sequence == "\x1b8":
            self._row, self._column = self._kept[0] + top, self._kept[1]
        elif sequence == "\x1b[J":
            self.rows[self._row] = self.rows[self._row][: self._column]
            self.rows[self._row + 1 :] = [""] * (len(self.rows) - self._row - 1)
        elif sequence in ("\x1b[?7l", "\x1b[?7h"):
            self._wraps = sequence.endswith("h")
        else:
            raise ValueError(f"unknown sequence {sequence!r}")


def run_on_terminal(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], rows: int = 10
) -> Screen:
    """Run a command on a terminal of 80 columns and return what is to be seen there."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (rows, 80))
    inherited = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**inherited, "TERM": "xterm", "COLUMNS": "80", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    screen, written = Screen(rows=rows), b""
    try:
        while piece := os.read(ours, 4096):
            written += piece
    except OSError:  # Linux says so where the other end is closed
        pass
    finally:
        os.close(ours)
        process.wait(timeout=60)
    for line in re.split(r"(?=\x1b\[J)", written.decode()):
        screen.write(line)
    return screen


LEFT_OUT = ("CI", "BUILD_NUMBER", "PYTEST_VERSION", "PYTEST_CURRENT_TEST")
"""Variables that say that something else runs around the command."""
