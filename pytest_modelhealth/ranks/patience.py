"""How long the collectives of a model wait for a rank that does not come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_modelhealth.layers import named_modules, type_name


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Let no collective of gloo wait longer inside; each group has its own timeout again after it.

    Groups of NCCL keep theirs: it ends the process when that has passed.
    """
    limit = timedelta(seconds=max(1.0, seconds))
    changed: list[tuple[Any, timedelta]] = []
    try:
        for group in list(dist.distributed_c10d._world.pg_map):
            timeout = _timeout(group)
            if timeout is not None and timeout > limit:
                dist.distributed_c10d._set_pg_timeout(limit, group)
                changed.append((group, timeout))
        yield
    finally:
        for group, timeout in changed:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def _timeout(group: Any) -> timedelta | None:
    """Return the timeout of a group of gloo; ``None`` of any other."""
    if dist.get_backend(group) != "gloo":
        return None
    found = group._get_backend(torch.device("cpu")).options._timeout
    return found if isinstance(found, timedelta) else None


def is_of_waiting(error: BaseException) -> bool:
    """Whether an error is that of a collective which another rank did not come to, or left."""
    said = str(error)
    return isinstance(error, RuntimeError) and any(word in said for word in _SAID)


def layer_of(error: BaseException, model: nn.Module) -> str | None:
    """Return the name of the innermost layer that an error was raised in; ``None`` of none."""
    names: dict[object, str | None] = {
        named.module: named.name or type_name(named.module) for named in named_modules(model)
    }
    found = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code is nn.Module._call_impl.__code__:
            found = names.get(frame.f_locals.get("self"), found)
        trace = trace.tb_next
    return found


_SAID = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "gloo")
