"""Has Python's garbage collector look less often while a step runs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_FACTOR = 100

_lock = threading.Lock()
_holders = 0
_usual: tuple[int, int, int] = (0, 0, 0)


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Let the collector wait for a hundred times as many new objects.

    What a run keeps of a layer is a dozen objects, and none of it is garbage before its report is;
    at the usual thresholds the collector looks through them again and again, and now and then
    through everything in the process. Garbage of the user's own is still collected, later.

    The thresholds are one for the process: the first to enter sets them, and the last to leave puts
    them back, unless somebody has set others meanwhile.
    """
    global _holders, _usual
    with _lock:
        _holders += 1
        is_first = _holders == 1
    try:
        if is_first:  # in here, so that Ctrl-C finds a way out
            _usual = gc.get_threshold()
            gc.set_threshold(*_rare())
        yield
    finally:
        with _lock:
            _holders -= 1
            if _holders == 0 and gc.get_threshold() == _rare():
                gc.set_threshold(*_usual)


def _rare() -> tuple[int, int, int]:
    return (_usual[0] * _FACTOR, *_usual[1:])
