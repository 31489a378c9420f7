"""Takes what a rank did with snapshots to the syrupy session of the process that reports."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_TOLD = ("snapshot_location", "snapshot_name", "created", "updated", "success")


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
    found = []
    for assertion in session._assertions if session is not None else ():
        kind = type(assertion.extension)
        for result in assertion.executions.values():
            if not (rank and (result.created or result.updated)):
                told = {name: getattr(result, name) for name in _TOLD}
                found.append({"extension": f"{kind.__module__}.{kind.__qualname__}", **told})
    return found


def take_over(item: pytest.Item, used: list[dict[str, Any]]) -> None:
    """Have syrupy count the comparisons of the ranks as those of this test, each snapshot once."""
    session = getattr(item.config, "_syrupy", None)
    if session is None or not used:
        return
    from syrupy.assertion import AssertionResult
    from syrupy.exceptions import FailedToLoadModuleMember
    from syrupy.location import PyTestLocation
    from syrupy.utils import import_module_member

    location = PyTestLocation(item)
    unread: dict[str, Any] = dict.fromkeys(("asserted_data", "recalled_data", "exception"))
    first = {(one["snapshot_location"], one["snapshot_name"]): one for one in reversed(used)}
    for one in first.values():
        with contextlib.suppress(FailedToLoadModuleMember, TypeError):
            extension = import_module_member(one.pop("extension"))()
            result = AssertionResult(**one, **unread, test_location=location)
            session.register_request(  # as far as syrupy's report reads an assertion
                SimpleNamespace(
                    extension=extension,
                    test_location=location,
                    session=session,
                    executions={0: result},
                )
            )
