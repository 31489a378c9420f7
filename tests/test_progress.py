"""A bar of tqdm says how far a long call is: late, on terminals only, and gone in the end."""

from __future__ import annotations

import io
import threading
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn

from pytest_modelhealth import Inspector, progress

tqdm = pytest.importorskip("tqdm")


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Where standard error leads, on no service."""
    monkeypatch.delenv("CI", raising=False)
    return Terminal()


def run(terminal: Terminal, progress: bool | None) -> None:
    """Run four batches."""
    with redirect_stderr(terminal):  # not in the fixture, after which pytest sets its own
        Inspector(nn.Linear(3, 2)).run_batches(torch.randn(64, 3).split(16), progress=progress)


def test_a_run_over_batches_is_shown_when_asked(terminal: Terminal) -> None:
    """At once, with how many there are, by no thread; the line is erased in the end."""
    before = threading.active_count()
    run(terminal, progress=True)
    text = terminal.getvalue()
    assert "modelhealth: inspecting batches" in text
    assert "/4" in text
    assert text.endswith("\r")
    assert threading.active_count() == before


@pytest.mark.parametrize("shown", [None, False])
def test_what_is_over_soon_is_not_shown(terminal: Terminal, shown: bool | None) -> None:
    """Nor what must not be."""
    run(terminal, progress=shown)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(("shown", "delay"), [(None, 2), (True, 0)])
def test_what_takes_long_is_shown(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, shown: bool | None, delay: float
) -> None:
    """After two seconds, or at once."""
    asked: dict[str, Any] = {}

    def bar(items: Any, **options: Any) -> Any:
        asked.update(options)
        return items

    monkeypatch.setattr(progress, "_bar", lambda: bar)
    run(terminal, progress=shown)
    assert (asked["delay"], asked["total"]) == (delay, 4)


@pytest.mark.parametrize("why", ["no terminal", "CI", "not installed"])
def test_nothing_is_written_into_a_log(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Where standard error is a file, a service keeps a log, or there is no tqdm."""
    if why == "no terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    elif why == "CI":
        monkeypatch.setenv("CI", "true")
    else:
        monkeypatch.setattr(progress, "_bar", lambda: None)
    run(terminal, progress=True)
    assert terminal.getvalue() == ""


def test_items_are_those_of_the_iterable() -> None:
    """All of them or the first few; a length that raises is none."""

    class Odd:
        def __iter__(self):
            return iter("abc")

        def __len__(self):
            raise RuntimeError

    assert list(progress.track(Odd(), "looking")) == ["a", "b", "c"]
    assert list(progress.track(Odd(), "looking", most=2, shown=True)) == ["a", "b"]
