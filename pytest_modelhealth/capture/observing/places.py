"""Which line of the user's code made a call: it is worked out when somebody asks."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

Place = tuple[CodeType, int]
"""Where a frame stood: its code and `f_lasti`."""

_TORCH = str(Path(torch.__file__).parent)
_OBSERVING = str(Path(__file__).parent)
_OURS = str(Path(__file__).parents[2])
_MODULE_CALL = str(Path(_TORCH, "nn", "modules", "module.py"))
_OVERRIDES = str(Path(_TORCH, "overrides.py"))

_THROUGH, _TORCHS, _USERS, _ENGINES = range(4)


class Places:
    """Finds the nearest frame that is the user's, and remembers whose each code is."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, int] = {}
        self._right_above: dict[CodeType, bool] = {}

    def of(self, frame: FrameType | None, container: Place | None) -> Place | None:
        """Return the place in the user's code that made a call.

        Args:
            frame: where to begin.
            container: what to return where torch's own code made it, such as `nn.Sequential`.
        """
        while frame is not None:
            code = frame.f_code
            whose = self._codes.get(code)
            if whose is None:
                whose = self._codes[code] = _whose(code)
            if whose == _USERS:
                return code, frame.f_lasti
            if whose == _TORCHS:
                return container
            if whose == _ENGINES:
                return None
            frame = frame.f_back
        return None

    def of_module(self, container: Place | None) -> Place | None:
        """Return the place that called a module, where our caller is three frames below its hook.

        The caller stands three more above, as a rule, which is checked once for each code.
        """
        frame = sys._getframe(7)
        is_users = self._right_above.get(frame.f_code)
        if is_users is None:
            place = self.of(sys._getframe(4), container)
            if place == (frame.f_code, frame.f_lasti):
                self._right_above[frame.f_code] = True
            elif self._codes.get(frame.f_code) == _TORCHS and place is container:
                self._right_above[frame.f_code] = False
            return place
        return (frame.f_code, frame.f_lasti) if is_users else container

    def forget(self) -> None:
        """Hold no code any longer."""
        self._codes.clear()
        self._right_above.clear()


def _whose(code: CodeType) -> int:
    """Tell the user's code from torch's, and both from what every call passes through."""
    path = code.co_filename
    if path in (_MODULE_CALL, _OVERRIDES) or path.startswith(_OBSERVING):
        return _THROUGH
    if path.startswith(_OURS):
        return _ENGINES
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
