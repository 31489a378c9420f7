"""Takes what a rank did with snapshots to the syrupy session of the process that reports."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def write_nothing(config: pytest.Config) -> None:
    """Have a rank that is not the first compare snapshots, and record none."""
    session = getattr(config, "_syrupy", None)
    if session is not None:
        session.queue_snapshot_write = lambda **_: None


def executions(config: pytest.Config, rank: int) -> list[dict[str, Any]]:
    """Return what came of each comparison in a rank, as plain data.

    What a rank but the first would have written is left out: it is not there.
    """
    session = getattr(config, "_syrupy", None)
    return [
        {
            "extension": _path(type(assertion.extension)),
            "location": result.snapshot_location,
            "name": result.snapshot_name,
            "asserted": result.asserted_data,
            "recalled": result.recalled_data,
            "created": result.created,
            "updated": result.updated,
            "success": result.success,
        }
        for assertion in (session._assertions if session is not None else ())
        for result in assertion.executions.values()
        if not (rank and (result.created or result.updated))
    ]


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclasses.dataclass
class _Executed:
    """A comparison made in another process, as far as syrupy's report reads one."""

    extension: Any
    test_location: Any
    session: Any
    executions: dict[int, Any]


def take_over(item: pytest.Item, used: list[dict[str, Any]]) -> None:
    """Have syrupy count the comparisons of the ranks as those of this test, each snapshot once."""
    session = getattr(item.config, "_syrupy", None)
    if session is None or not used:
        return
    first = {(one["location"], one["name"]): one for one in reversed(used)}
    from syrupy.assertion import AssertionResult
    from syrupy.exceptions import FailedToLoadModuleMember
    from syrupy.location import PyTestLocation
    from syrupy.utils import import_module_member

    location = PyTestLocation(item)
    for one in first.values():
        with contextlib.suppress(FailedToLoadModuleMember, TypeError):
            extension = import_module_member(one["extension"])()
            result = AssertionResult(
                snapshot_location=one["location"],
                snapshot_name=one["name"],
                asserted_data=one["asserted"],
                recalled_data=one["recalled"],
                created=one["created"],
                updated=one["updated"],
                success=one["success"],
                exception=None,
                test_location=location,
            )
            session.register_request(_Executed(extension, location, session, {0: result}))
