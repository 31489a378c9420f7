"""Which verdicts and findings of two inspections differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_modelhealth.runs.difference.result import Change, Grade, Place

Data = Mapping[str, Any]
Key = tuple[str, str]
"""Check and layer, by its name in the head."""

_VERDICTS = (
    ("healthy", "equivalent", "unchanged", "recorded"),
    ("inconclusive",),
    ("unhealthy", "different", "drifted", "missing"),
)
"""From good to bad."""


def verdict_change(before: Data, now: Data) -> Iterator[Change]:
    """Yield that the verdict is another, with what the head says of it."""
    ranks = [_rank(result["verdict"]) for result in (before, now)]
    # A snapshot that is unchanged since the base recorded it is what the base had.
    kept = (before["verdict"], now["verdict"]) == ("recorded", "unchanged")
    if before["verdict"] != now["verdict"] and not kept:
        grade = Grade.CHANGED
        if ranks[0] != ranks[1]:
            grade = Grade.WORSE if ranks[0] < ranks[1] else Grade.BETTER
        place = Place(now["model"], before["verdict"], now["verdict"])
        yield Change("verdict", "verdict", (place,), grade)


def is_bad(result: Data) -> bool:
    """Whether a verdict fails a test."""
    return _rank(result["verdict"]) > 0


def _rank(verdict: str) -> int:
    """Return 0 for what is good; a verdict that is not known stands in the middle."""
    return next((rank for rank, words in enumerate(_VERDICTS) if verdict in words), 1)


def finding_changes(before: Data, now: Data, names: Mapping[str, str]) -> Iterator[Change]:
    """Yield the findings that are new and those that are gone.

    Args:
        before: the inspection of the base.
        now: that of the head.
        names: the name in the head of each layer of the base that is there.
    """
    old, new = _keyed(before, "violations", names), _keyed(now, "violations", {})
    shown_before, shown_now = _shown(before, names), _shown(now, {})
    came = [finding for key, finding in new.items() if key not in shown_before]
    gone = {key: finding for key, finding in old.items() if key not in shown_now}
    if came:
        places = tuple(Place(one["label"], "", _told(one)) for one in came)
        yield Change("finding", "new finding", places, Grade.WORSE)
    for what, still in (("now waived", "waived"), ("now only a warning", "warnings")):
        kept = _keyed(now, still, {})
        yield from _findings(what, [gone.pop(key) for key in [*gone] if key in kept])
    yield from _findings("no longer found", list(gone.values()), Grade.BETTER)
    old, new = _keyed(before, "warnings", names), _keyed(now, "warnings", {})
    warned = [one for key, one in new.items() if key not in old and key not in shown_before]
    if warned:
        places = tuple(Place(one["label"], "", _told(one)) for one in warned)
        yield Change("finding", "new warning", places)


def _findings(what: str, findings: list[Data], grade: Grade = Grade.CHANGED) -> Iterator[Change]:
    if findings:
        places = tuple(Place(one["label"], _told(one)) for one in findings)
        yield Change("finding", what, places, grade)


def _told(finding: Data) -> str:
    return f"{finding['check']}: {finding['message']}"


def _keyed(result: Data, part: str, names: Mapping[str, str]) -> dict[Key, Data]:
    return {(one["check"], names.get(one["layer"], one["layer"])): one for one in result[part]}


def _shown(result: Data, names: Mapping[str, str]) -> set[Key]:
    """Return what is found, as a finding of its own or as the consequence of one."""
    found = set(_keyed(result, "violations", names))
    for finding in result["violations"]:
        also = [(finding["check"], layer) for layer in finding.get("affected", ())]
        also += [(one["check"], one["layer"]) for one in finding.get("consequences", ())]
        found |= {(check, names.get(layer, layer)) for check, layer in also}
    return found
