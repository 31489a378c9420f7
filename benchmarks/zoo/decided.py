"""What was found out about each alarm of the sweep, by looking at the model."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Decision:
    """Whether an alarm is right.

    Args:
        models: shell patterns of the models' names.
        check: the name of the check.
        kind: ``right`` where a fresh model of this kind does not train as it stands, ``false``
            where its authors mean it so.
        why: what was seen.
        setting: shell pattern of the settings.
    """

    models: tuple[str, ...]
    check: str
    kind: str
    why: str
    setting: str = "*"


DECISIONS: tuple[Decision, ...] = (
    Decision(
        ("csatv2*",),
        "normalization",
        "right",
        "two layer norms of each attention run over a single value, and give out a constant",
    ),
)


def decision(model: str, setting: str, check: str) -> Decision | None:
    """Return the first decision about this alarm."""
    for one in DECISIONS:
        is_about = any(fnmatchcase(model, pattern) for pattern in one.models)
        if is_about and one.check == check and fnmatchcase(setting, one.setting):
            return one
    return None
