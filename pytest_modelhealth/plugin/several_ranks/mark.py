"""What ``@pytest.mark.modelhealth_ranks(2)`` says, and whether it is sound."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.errors import suggest

if TYPE_CHECKING:
    import pytest

MARKER = "modelhealth_ranks"
DEFAULT_SECONDS = 120.0
"""Long enough for a model to be built and compiled on a busy machine; a test whose ranks wait for
each other costs no more than this, where a process group alone waits half an hour."""


class Wanted(NamedTuple):
    """On how many ranks a test runs, and after how many seconds they are ended."""

    size: int
    seconds: float


class MarkError(ValueError):
    """The mark is wrong; the text says how."""


def wanted(item: pytest.Item) -> Wanted | None:
    """Return what the closest mark of a test asks for; ``None`` where it has none.

    Raises:
        MarkError: the mark is wrong.
    """
    mark = item.get_closest_marker(MARKER)
    return None if mark is None else _parse(mark, f"@{MARKER} on {item.name}")


def _parse(mark: pytest.Mark, where: str) -> Wanted:
    unknown = sorted(set(mark.kwargs) - {"seconds"})
    if unknown:
        raise MarkError(
            f"{where}: unknown keyword {unknown[0]!r}{suggest(unknown[0], ('seconds',))} "
            f"It takes the number of ranks and seconds=: {MARKER}(2, seconds=300)"
        )
    if len(mark.args) != 1:
        raise MarkError(
            f"{where}: takes the number of ranks, such as {MARKER}(2), "
            + (f"not {', '.join(map(repr, mark.args))}" if mark.args else "and has none")
        )
    (size,) = mark.args
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise MarkError(f"{where}: the number of ranks must be a whole number from 1, not {size!r}")
    return Wanted(size, _seconds(mark.kwargs.get("seconds", DEFAULT_SECONDS), where))


def _seconds(given: object, where: str) -> float:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not (float(given) > 0 and math.isfinite(float(given))):  # type: ignore[arg-type]
        raise MarkError(f"{where}: seconds= must be a number above 0, not {given!r}")
    return float(given)  # type: ignore[arg-type]


def world_size() -> int | None:
    """Return how many processes torchrun, or what sets the same variables, started; else None."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [os.environ.get(name, "") for name in needed]
    return int(given[1]) if all(given) and given[0].isdecimal() and given[1].isdecimal() else None
