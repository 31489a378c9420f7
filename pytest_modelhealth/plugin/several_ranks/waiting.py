"""Says where a rank is and what it waits for, from another thread of it."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading
    from types import FrameType

_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_OURS = str(Path(__file__).parents[2])
_BETWEEN = ("_wrapped_call_impl", "_call_impl")
"""Frames of torch between a module's call and its `forward`."""

LIBRARIES = ("/site-packages/", "/dist-packages/")
_FOREIGN = ("torch", "_pytest", "pytest", "pluggy")


def report_on(thread: threading.Thread) -> dict[str, str]:
    """Return what `thread` does just now: ``"where"``, one line, and its ``"stack"``.

    The stack is that of the user's code and what it called.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return {"where": "", "stack": ""}
    return {"where": where(frame), "stack": stack(frame)}


def where(innermost: FrameType) -> str:
    """Return for example ``"in 'blocks.1', waiting in all_gather"``."""
    frames = [frame for frame, _ in traceback.walk_stack(innermost)]
    codes = (frame.f_code for frame in frames)
    collective = next(
        (code.co_name for code in codes if Path(code.co_filename).name in _COLLECTIVES), ""
    )
    module = _module(frames)
    users = (frame for frame in frames if _is_users(frame))
    place = next((f"{Path(f.f_code.co_filename).name}:{f.f_lineno}" for f in users), "")
    said = []
    if module:
        said.append(f"in {module!r}" if collective else f"in {module!r} at {place}".rstrip(" at"))
    if collective:
        said.append(f"waiting in {collective}" + ("" if module or not place else f" at {place}"))
    return ", ".join(said) or (f"at {place}" if place else "not in the test")


def stack(innermost: FrameType) -> str:
    """Return the stack from the test on, the innermost call last."""
    frames = [frame for frame, _ in traceback.walk_stack(innermost)][::-1]
    first = next((i for i, frame in enumerate(frames) if _is_users(frame)), 0)
    told = [frame for frame in frames[first:] if frame.f_code.co_name not in _BETWEEN]
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in told)
    return "".join(summary.format()).rstrip()


def _is_users(frame: FrameType) -> bool:
    """Whether it is of the test or the model, and no library's or pytest's."""
    path = frame.f_code.co_filename
    if path.startswith("<") or any(part in path.replace("\\", "/") for part in LIBRARIES):
        return False
    files = (getattr(sys.modules.get(name), "__file__", None) for name in _FOREIGN)
    folders = (str(Path(file).parent) + os.sep for file in files if file)
    return not path.startswith((_OURS, _STANDARD, *folders))


_STANDARD = str(Path(os.__file__).parent)


def _module(frames: list[FrameType]) -> str:
    """Return the name of the innermost module called, as the outermost on the stack knows it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    from pytest_modelhealth.layers import named_modules

    called: list[Any] = [
        frame.f_locals.get("self") for frame in frames if frame.f_code.co_name == "_call_impl"
    ]
    called = [one for one in called if isinstance(one, torch.nn.Module)]
    for outer in reversed(called):
        names = {named.module: named.name for named in named_modules(outer)}
        for inner in called:
            if names.get(inner) and inner is not outer:
                return names[inner]
    return type(called[0]).__name__ if called else ""
