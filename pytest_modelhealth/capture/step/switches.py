"""Settings of the whole process while a run is watched, and how its graph is freed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from pytest_modelhealth.capture.observing.flow import counter


class Switch:
    """A setting of the whole process: the first thread to come sets it, the last resets it."""

    def __init__(self, switched: Callable[[], AbstractContextManager[None]]) -> None:
        self._switched = switched
        self._lock, self._holders, self._is_set = threading.Lock(), 0, False
        self._stack = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Have it set inside."""
        with self._lock:
            self._holders += 1
        try:
            with self._lock:  # in here, so that Ctrl-C finds a way out
                if not self._is_set:
                    self._is_set = True
                    self._stack.enter_context(self._switched())
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    self._is_set = False
                    self._stack.close()


_FACTOR = 100


@Switch
@contextmanager
def collected_rarely() -> Iterator[None]:
    """Let the collector wait for a hundred times as many new objects.

    What a run keeps of a layer is a dozen objects, and none of it is garbage before its report is;
    at the usual thresholds the collector looks through them again and again, and now and then
    through everything in the process. Garbage of the user's own is still collected, later. The
    thresholds are put back unless somebody has set others meanwhile.
    """
    usual = gc.get_threshold()
    rare = (usual[0] * _FACTOR, *usual[1:])
    try:
        gc.set_threshold(*rare)
        yield
    finally:
        if gc.get_threshold() == rare:
            gc.set_threshold(*usual)


_SHALLOW = 10_000
"""Graphs of fewer nodes are freed where they are."""

_STACK = 1 << 29
"""Bytes of stack to free others on; what is not touched takes no memory."""


@contextmanager
def deep_graphs_freed() -> Iterator[list[Any]]:
    """Free the graph of a run, whose last nodes are put into the list that is given.

    In torch 2.13 nodes that Python has looked at are freed one inside the other. Some 50,000 in a
    row overflow a stack of 8 MiB, whether or not they are watched. Whoever else holds a part of the
    graph must have let go of it when the context ends.
    """
    first = counter()
    nodes: list[Any] = []
    yield nodes
    if counter() - first < _SHALLOW:
        return
    size = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=nodes.clear)
        thread.start()
        thread.join()
    except RuntimeError:  # no room for such a stack: it is freed here, as without us
        nodes.clear()
    finally:
        threading.stack_size(size)
