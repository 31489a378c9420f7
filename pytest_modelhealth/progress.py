"""How far a long loop is: a bar of tqdm, where that is installed, on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from operator import length_hint
from typing import Any, TypeVar

_DELAY = 2.0  # seconds before a bar is shown

_Item = TypeVar("_Item")


def track(
    items: Iterable[_Item], text: str, *, most: int | None = None, shown: bool | None = None
) -> Iterator[_Item]:
    """Yield items, at `most` so many, and show how many there have been.

    `shown` is ``True`` for at once, ``False`` for never, ``None`` for after two seconds; only then
    is the length of `items` asked for. `text` says what is done: ``"inspecting batches"``.
    """
    bar = None if shown is False or os.environ.get("CI") else _bar()
    if bar is None:
        yield from islice(items, most)
        return
    try:
        lengths = [n for n in (length_hint(items), most) if n]  # a hint of 0: nobody knows
    except Exception:  # noqa: BLE001 - a loader of the user's
        lengths = [most] if most else []
    yield from bar(
        islice(items, most),
        desc=f"modelhealth: {text}",
        total=min(lengths, default=None),
        delay=0 if shown else _DELAY,
        disable=None,  # unless standard error is a terminal
        leave=False,
    )


@cache
def _bar() -> Any:
    """Return the bar of tqdm; ``None`` where it is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    # of a class of our own, as its thread would be in the way of tests that fork
    return type("Bar", (tqdm,), {"monitor_interval": 0})
