"""Snapshots: a report as a file that people review, and drift from it judged by its noise.

`recording` takes what is kept from reports, without pytest; `snapshot` is what that is,
`file_format` writes and reads it, `tolerances` is how far a statistic may move. `changes` puts two
snapshots side by side, `detection` finds what drifted and what began it, and `drift` is the result
in words. `extension` is what syrupy calls.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_modelhealth.snapshot.extension import HealthSnapshot, HealthSnapshotExtension
    from pytest_modelhealth.snapshot.recording import check, record

__all__ = ["HealthSnapshot", "HealthSnapshotExtension", "check", "record"]


def __getattr__(name: str) -> Any:  # only the extension needs syrupy
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "extension" if name.startswith("Health") else "recording"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
