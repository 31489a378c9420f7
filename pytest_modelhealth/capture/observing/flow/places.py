"""Which line of the user's code made a call: it is worked out when somebody asks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

Place = tuple[CodeType, int]
"""Where a frame stood: its code and `f_lasti`."""

_TORCH = str(Path(torch.__file__).parent)
_OBSERVING = str(Path(__file__).parents[1])
_OURS = str(Path(__file__).parents[3])
_MODULE_CALL = str(Path(_TORCH, "nn", "modules", "module.py"))
_OVERRIDES = str(Path(_TORCH, "overrides.py"))

_GENERATED = "<eval_with_key>"
"""What torch.fx calls the code that it writes."""

_THROUGH, _TORCHS, _USERS, _ENGINES = range(4)


def place_of(frame: FrameType | None, container: Place | None) -> Place | None:
    """Return the place in the user's code that made a call: that of the nearest frame of theirs.

    Args:
        frame: where to begin.
        container: what to return where torch's own code made it, such as `nn.Sequential`.
    """
    while frame is not None:
        code = frame.f_code
        whose = _whose(code.co_filename)
        if whose == _USERS:
            return code, frame.f_lasti
        if whose == _TORCHS:
            return container
        if whose == _ENGINES:
            return None
        frame = frame.f_back
    return None


@cache
def _whose(path: str) -> int:
    """Tell the user's code from torch's, and both from what every call passes through."""
    if path in (_MODULE_CALL, _OVERRIDES) or path.startswith(_OBSERVING):
        return _THROUGH
    if path.startswith(_OURS):
        return _ENGINES
    if path.startswith(_GENERATED):
        return _TORCHS
    if path.startswith(_TORCH):
        return _TORCHS if f"{_TORCH}/nn/modules" in path else _THROUGH
    return _USERS


@cache
def _lines(code: CodeType) -> tuple[int | None, ...]:
    return tuple(line for line, _, _, _ in code.co_positions())


def line_of(place: Place | None) -> str:
    """Return ``path:line``, and nothing where the place is not known."""
    if place is None:
        return ""
    code, instruction = place
    lines = _lines(code)
    at = instruction // 2
    line = lines[at] if 0 <= at < len(lines) else code.co_firstlineno
    return f"{code.co_filename}:{line or code.co_firstlineno}"
