"""Keeps Ctrl-C, and the alarm of a timeout, from ending a restoration half-way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGALRM") if hasattr(signal, name)]


@contextmanager
def exited_whole(*managers: AbstractContextManager[Any]) -> Iterator[Any]:
    """Enter all of `managers` and give the last one's value; no signal interrupts their exits.

    One that arrives meanwhile is handled, by KeyboardInterrupt as a rule, once all have exited.
    """
    with ExitStack() as stack:
        signals = _Signals()
        stack.callback(signals.deliver)
        entered = [stack.enter_context(manager) for manager in managers]
        stack.callback(signals.hold)
        yield entered[-1]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Have a signal that arrives inside handled when this is left."""
    signals = _Signals()
    try:
        signals.hold()
        yield
    finally:
        signals.deliver()


class _Signals:
    """Those that arrive between `hold` and `deliver`.

    Only in the main thread does Python call handlers, and allow them to be set.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def hold(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, lambda *call: self._arrived.append(call))

    def deliver(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number, frame in self._arrived:
            self._handlers[number](number, frame)
