"""Frees a graph of autograd that is too deep for the stack of the thread that frees it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytest_modelhealth.capture.observing.flow import counter

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
