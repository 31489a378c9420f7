"""How near a check came to its limit, as it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_modelhealth.rendering.notation import printable
from pytest_modelhealth.runs.page.drawing import brief

MOST_MARGINS = 6
"""Margins of a result that stand on the page at once; the others when they are asked for."""


@dataclass(frozen=True)
class Margin:
    """How near a check came to its limit."""

    check: str
    setting: str
    label: str
    value: str
    limit: str
    is_least: bool
    used: float | None

    @property
    def width(self) -> float:
        """How much of a bar to fill, in percent."""
        return round(100 * min(max(self.used or 0.0, 0.0), 1.0), 1)

    @property
    def tone(self) -> str:
        """``"bad"`` at the limit, ``"unsure"`` near it."""
        used = self.used or 0.0
        return "bad" if used >= 1 else "unsure" if used >= 0.8 else "good"


def margin(found: Mapping[str, Any]) -> Margin:
    """Return a margin as it is written."""
    return Margin(
        check=printable(found["check"]).replace("_", " "),
        setting=printable(found["setting"]),
        label=printable(found["label"]),
        value=brief(found["value"]),
        limit=brief(found["limit"]),
        is_least=found["least"],
        used=found["used"],
    )
