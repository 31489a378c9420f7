"""`Definition`: by what the ``class`` statement of a layer is found when somebody asks for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Definition:
    """A class, as strings: a report holds no class, and a pickle of it imports none.

    Args:
        module: name of the Python module.
        qualname: its qualified name there, ``"make.<locals>.Net"`` inside a function.
        path: the file; ``""`` where there is none.
        line: first line of one of its own functions, 0 where it has none.
    """

    module: str
    qualname: str
    path: str
    line: int
