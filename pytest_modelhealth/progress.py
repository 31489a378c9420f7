"""How far a long call is: one line on a terminal, after two seconds, and never in a log.

Long work says what it does, ``with task("measuring noise", 4) as advance`` or ``for batch in
track(batches, "inspecting batches")``, and tasks may be nested: the line names them all.
There is no thread and no timer: the line is drawn where the work itself comes by, which costs a
count and a look at the clock. It is erased when the outermost task ends, however it ends.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from operator import length_hint
from typing import Any, TypeVar

DELAY = 2.0
"""Seconds before a task is shown."""

PAUSE = 0.1
"""Seconds between two drawings."""

clock = time.monotonic

_Item = TypeVar("_Item")


def task(text: str, total: int | None = None, *, shown: bool | None = None) -> Task:
    """Return a context that lasts as long as some work, and gives a function to call at each step.

    Args:
        text: what is being done: ``"measuring noise"``.
        total: how many steps there are; ``None`` if nobody knows.
        shown: ``True`` shows it at once, ``False`` never, ``None`` after two seconds. The outermost
            task decides.
    """
    return Task(text, lambda: total, shown)


def track(
    items: Iterable[_Item], text: str, *, most: int | None = None, shown: bool | None = None
) -> Iterator[_Item]:
    """Yield items, each of them a step of a task.

    Args:
        items: anything to iterate over. Its length is asked for only if it is shown.
        text: as in `task`.
        most: stop after so many.
        shown: as in `task`.
    """
    with Task(text, lambda: _length(items, most), shown) as advance:
        for item in islice(items, most):
            yield item
            advance()


def advance() -> None:
    """Count a step of the innermost task; nothing where there is none."""
    _screen.advance()


def show_on(line: Line | None) -> None:
    """Show tasks on `line`; on standard error, if that is a terminal, where it is ``None``."""
    _screen.line = line


_ROW_BELOW = "\x1bD\x1b[A\x1b7\x1b[B\r"
"""Makes room, by scrolling if need be, keeps the place of the cursor, and goes to the row below."""


class Line:
    """A line of a terminal that is drawn and erased and leaves everything else as it was.

    It is drawn on the row below the cursor, which stays where it is: at the end of what others have
    written, maybe in the middle of their line.

    Args:
        write: writes to the terminal.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._is_drawn = False

    def draw(self, text: str) -> None:
        """Draw it anew; what is too long for the terminal is cut off.

        Without wrapping, the last letter stands at the edge: the space.
        """
        plain = "".join(letter if " " <= letter <= "~" else "?" for letter in text)
        self._send(f"\x1b[J{_ROW_BELOW}\x1b[?7l{plain} \x1b[?7h\x1b8")
        self._is_drawn = True

    def clear(self) -> None:
        """Erase it, if it is drawn."""
        if self._is_drawn:
            self._send("\x1b[J")
            self._is_drawn = False

    def _send(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone, or the file is closed
            self._write(text)


class _Erasing:
    """Standard output or error while a line is drawn: what is written there erases it first."""

    def __init__(self, stream: Any, line: Line) -> None:
        self.stream, self._line = stream, line

    def write(self, text: str) -> int:
        self._line.clear()
        written: int = self.stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Task:
    """A piece of work that is under way inside of ``with``; `task` makes one."""

    def __init__(self, text: str, total: Callable[[], int | None], shown: bool | None) -> None:
        self.text, self.shown = text, shown
        self.done, self.started = 0, 0.0
        self._total = total

    def __enter__(self) -> Callable[[], None]:
        _screen.enter(self)
        return self.advance

    def __exit__(self, *_: object) -> None:
        _screen.leave(self)

    def advance(self) -> None:
        """Count a step that is done."""
        self.done += 1
        _screen.come_by()

    def words(self, now: float, *, with_time: bool) -> str:
        """Return what it is and how far, maybe with the time that it takes still, or has taken."""
        total, seconds = self._total(), now - self.started
        count = f" {self.done}/{total}" if total else f" {self.done}" if self.done else ""
        if not with_time or self.done == total:
            return self.text + count
        if not total:
            return f"{self.text}{count}, {_duration(seconds)} so far"
        left = seconds / self.done * max(total - self.done, 0)
        return f"{self.text}{count}, about {_duration(left)} left"


class _Screen:
    """The tasks that are open, the outermost first, and the line that shows them.

    Attributes:
        tasks: those of the thread that opened the outermost one; others are not shown.
        line: where they are shown; ``None`` asks whether standard error is a terminal.
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.line: Line | None = None
        self._drawn: Line | None = None
        self._due = math.inf
        self._thread = 0

    def enter(self, task: Task) -> None:
        """Open a task."""
        task.started = clock()
        if not self.tasks:
            self._thread = threading.get_ident()
            delay = {None: DELAY, True: 0.0, False: math.inf}[task.shown]
            self._due = task.started + delay
        elif threading.get_ident() != self._thread:
            return
        self.tasks.append(task)
        self.come_by()

    def leave(self, task: Task) -> None:
        """Close a task and those within, and erase the line with the last one.

        Those within are still open where an exception keeps the frame of a `track` alive.
        """
        if task in self.tasks:  # not that of another thread
            del self.tasks[self.tasks.index(task) :]
        if not self.tasks and self._drawn is not None:
            self._drawn.clear()
            self._drawn = None
            for name in _STREAMS:
                stream = getattr(sys, name)
                if isinstance(stream, _Erasing):
                    setattr(sys, name, stream.stream)

    def advance(self) -> None:
        """Count a step of the innermost task."""
        if self.tasks and threading.get_ident() == self._thread:
            self.tasks[-1].advance()

    def come_by(self) -> None:
        """Draw the line if it is time to."""
        now = clock()
        if now < self._due or not self.tasks or threading.get_ident() != self._thread:
            return
        line = self._drawn or self._begin()
        self._due = now + PAUSE if line else math.inf
        if line is None:
            return
        counted = next((task for task in self.tasks if task.done), None)
        words = [task.words(now, with_time=task is counted) for task in self.tasks]
        line.draw(f"modelhealth: {' > '.join(words)}")

    def _begin(self) -> Line | None:
        """Find the line to draw on, and have what is printed meanwhile not mix with it."""
        self._drawn = self.line or _standard_error()
        if self._drawn is not None:
            for name in _STREAMS:
                stream = getattr(sys, name)
                if draws_lines(stream):
                    setattr(sys, name, _Erasing(stream, self._drawn))
        return self._drawn


_screen = _Screen()

_STREAMS = ("stdout", "stderr")

_LOGS = ("CI", "BUILD_NUMBER")
"""Variables by which services say that they write a log, those that pytest knows."""

_PYTEST = ("PYTEST_VERSION", "PYTEST_CURRENT_TEST")
"""Variables by which pytest says that it runs, and the plugin shows tasks if anybody does."""


def draws_lines(stream: Any) -> bool:
    """Whether lines can be drawn on a stream: it is a terminal, and nobody keeps a log of it."""
    with suppress(AttributeError, OSError, ValueError):  # no stream, or no descriptor, or closed
        # A notebook's has the descriptor of a terminal, IDLE's says that it is one.
        is_terminal = stream.isatty() and os.isatty(stream.fileno())
        understands = os.environ.get("TERM", "dumb") != "dumb"
        return is_terminal and understands and not any(map(os.environ.get, _LOGS))
    return False


def _standard_error() -> Line | None:
    stream = sys.stderr
    if any(map(os.environ.get, _PYTEST)) or not draws_lines(stream):
        return None

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return Line(write)


def _length(items: Iterable[Any], most: int | None) -> int | None:
    """Return how many items there are, if they say so; a hint of 0 means that nobody knows."""
    try:
        lengths = [n for n in (length_hint(items), most) if n]
    except Exception:  # noqa: BLE001 - a loader of the user's
        return most
    return min(lengths, default=None)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{math.ceil(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"
