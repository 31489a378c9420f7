"""Settings of the whole process while a run is watched, and how its graph is freed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytest_modelhealth.capture.observing.flow import counter
from pytest_modelhealth.capture.step.state import alone

_RARE = 100_000


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Let the collector wait for a hundred thousand new objects, while no other thread inspects.

    What a run keeps of a layer is a dozen objects, and none of it is garbage before its report is;
    at the usual thresholds the collector looks through them again and again, and now and then
    through everything in the process. Garbage of the user's own is still collected, later. The
    thresholds are put back unless somebody has set others meanwhile.
    """
    with alone():
        usual = gc.get_threshold()
        rare = (usual[0] and max(usual[0], _RARE), *usual[1:])  # of 0 it never collects
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
