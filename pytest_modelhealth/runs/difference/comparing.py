"""`compare`: which test of one run is which of another, and what changed in each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.rendering.notation import number, percent, plural, printable, shorten
from pytest_modelhealth.runs.difference.result import (
    Change,
    Difference,
    Grade,
    Place,
    ResultDifference,
    TestDifference,
)
from pytest_modelhealth.runs.difference.snapshots import in_one_dtype, snapshot_of
from pytest_modelhealth.runs.difference.statistics import Moved, moved
from pytest_modelhealth.runs.difference.structure import Structure
from pytest_modelhealth.runs.run import FAILED, Run
from pytest_modelhealth.snapshot.changes import SnapshotPair

Data = Mapping[str, Any]

Key = tuple[str, str]
"""Check and layer, by its name in the head."""

_ORDER = [Grade.WORSE, Grade.CHANGED, Grade.BETTER, Grade.SAME]
_FAR, _NEAR = 0.5, 0.8
"""A margin is told that was under `_FAR` of its limit and is over `_NEAR` of it."""

_INTERRUPTED = (2, 3)
"""Exit statuses with which pytest ends before its last test."""


def compare(base: Run, head: Run) -> Difference:
    """Return what changed from `base` to `head`.

    Raises:
        InspectionError: both inspected something, and nothing that can be compared.
    """
    before = {test["id"]: test for test in base.tests}
    now = {test["id"]: test for test in head.tests}
    was = _counterparts(before, now)
    tests = [_compare_tests(before[was[name]], test) for name, test in now.items() if name in was]
    if before and now:
        _require_common(tests, before, now)
    unchanged = sum(test.grade is Grade.SAME for test in tests)
    tests += [_added(test) for name, test in now.items() if name not in was]
    tests += [_gone(test) for name, test in before.items() if name not in was.values()]
    told = [test for test in tests if _is_told(test)]
    told.sort(key=lambda test: _ORDER.index(test.grade))
    return Difference(tuple(told), unchanged, tuple(_remarks(base.head, head.head)))


def _counterparts(before: Mapping[str, Data], now: Mapping[str, Data]) -> dict[str, str]:
    """Return the id in the base of each test of the head that is there.

    A test that moved to another file is the one of its name, where only one of that name moved.
    """
    was = {name: name for name in now if name in before}
    gone = _by_own_name(name for name in before if name not in was)
    for own_name, added in _by_own_name(name for name in now if name not in was).items():
        if len(added) == len(gone.get(own_name, ())) == 1:
            was[added[0]] = gone[own_name][0]
    return was


def _by_own_name(ids: Iterable[str]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for name in ids:
        found[name.partition("::")[2]].append(name)
    return found


def _require_common(
    tests: Sequence[TestDifference], before: Mapping[str, Data], now: Mapping[str, Data]
) -> None:
    if not tests:
        raise InspectionError(
            f"the two runs have no test in common: one has {_some(before)}, the other "
            f"{_some(now)}; give two runs of one suite"
        )
    if any(_has_comparable(test, now[test.id]) for test in tests):
        return
    models = sorted({result.model for test in tests for result in test.results})
    raise InspectionError(
        f"the two runs are of different models: {plural(len(tests), 'test')} in common, and no "
        f"layer of {shorten(printable(', '.join(models)), 100)} is in the other; give two runs of "
        "one model"
    )


def _has_comparable(difference: TestDifference, test: Data) -> bool:
    others = sum(not result.same_model for result in difference.results)
    return others < len(test["results"])


def _some(tests: Mapping[str, Data]) -> str:
    first = printable(next(iter(tests)))
    return first if len(tests) == 1 else f"{first} and {len(tests) - 1:,} more"


def _is_told(test: TestDifference) -> bool:
    return test.grade is not Grade.SAME or any(result.remarks for result in test.results)


def _compare_tests(before: Data, now: Data) -> TestDifference:
    matched = _matched(before["results"], now["results"])
    results = [result for result in matched if result.changes or result.remarks]
    was = before["id"] if before["id"] != now["id"] else ""
    moved = Change("test", "moved from", (Place("", was, now["id"]),))
    return TestDifference(
        now["id"],
        was,
        ((moved,) if was else ()) + tuple(_outcome_change(before, now, results)),
        tuple(results),
    )


def _outcome_change(
    before: Data, now: Data, results: Iterable[ResultDifference]
) -> Iterator[Change]:
    """Yield that the outcome is another, where no result says why."""
    if before["outcome"] == now["outcome"]:
        return
    failed = [test["outcome"] in FAILED for test in (before, now)]
    grade = Grade.CHANGED
    if failed[0] != failed[1]:
        grade = Grade.WORSE if failed[1] else Grade.BETTER
    if all(result.grade is not grade for result in results):
        place = Place("", before["outcome"], now["outcome"], now["message"])
        yield Change("outcome", "outcome", (place,), grade)


def _matched(before: Sequence[Data], now: Sequence[Data]) -> list[ResultDifference]:
    """Return the difference of each result: of one kind and model, what is left by the order."""
    left, counterparts = dict(enumerate(before)), dict[int, Data]()
    for key in (_kind_and_model, _kind):
        for index, result in enumerate(now):
            same = [place for place, other in left.items() if key(other) == key(result)]
            if same and index not in counterparts:
                counterparts[index] = left.pop(same[0])
    found = [
        _compare_results(counterparts[index], result)
        if index in counterparts
        else _added_result(result)
        for index, result in enumerate(now)
    ]
    return [*found, *map(_gone_result, left.values())]


def _kind_and_model(result: Data) -> tuple[str, ...]:
    return result["kind"], result.get("of", ""), result["model"]


def _kind(result: Data) -> str:
    kind: str = result["kind"]
    return kind


def _compare_results(before: Data, now: Data) -> ResultDifference:
    if now["kind"] == "inspection":
        return _compare_inspections(before, now)
    verdict = tuple(_verdict_change(before, now))
    told = Change(now["kind"], now["kind"], (Place(now["model"], "", now["headline"]),))
    return ResultDifference(now["model"], (*verdict, told) if verdict else ())


def _added_result(result: Data) -> ResultDifference:
    grade = Grade.WORSE if _is_bad(result) else Grade.CHANGED
    place = Place(result["model"], "", result["headline"])
    change = Change("result", f"new {result['kind']}", (place,), grade)
    return ResultDifference(result["model"], (change,))


def _gone_result(result: Data) -> ResultDifference:
    place = Place(result["model"], result["headline"])
    change = Change("result", f"no such {result['kind']} any more", (place,), Grade.WORSE)
    return ResultDifference(result["model"], (change,))


def _added(test: Data) -> TestDifference:
    grade = Grade.WORSE if test["outcome"] in FAILED else Grade.CHANGED
    place = Place("", "", test["outcome"], test["message"])
    return TestDifference(test["id"], changes=(Change("test", "new test", (place,), grade),))


def _gone(test: Data) -> TestDifference:
    place = Place("", test["outcome"])
    change = Change("test", "inspects nothing any more", (place,), Grade.WORSE)
    return TestDifference(test["id"], changes=(change,))


def _remarks(base: Data, head: Data) -> Iterator[str]:
    old, new = base["environment"], head["environment"]
    others = [
        f"{key} {old[key]} is now {new.get(key, 'unknown')}"
        for key in old
        if old[key] != new.get(key, "")
    ]
    if others:
        yield f"another environment: {', '.join(others)}"
    for which, run in (("base", base), ("head", head)):
        if run["exit_status"] in _INTERRUPTED:
            yield f"the run of the {which} was broken off, so tests may be missing"
        yield from (f"of the {which}: {note}" for note in run["notes"])


# Two inspections


def _compare_inspections(before: Data, now: Data) -> ResultDifference:
    """Return what changed; statistics of one batch, as training lets rounding grow."""
    pair = SnapshotPair(*in_one_dtype(snapshot_of(before), snapshot_of(now)))
    if not pair.has_common_layers:
        place = Place("", before["model"], now["model"], "no layer is in both")
        another = Change("model", "another model", (place,))
        changes = (*_verdict_change(before, now), another)
        return ResultDifference(now["model"], changes, same_model=False)
    names = pair.alignment.to_candidate
    statistics = Moved()
    if before["of"] == now["of"] == "batch":
        statistics = moved(pair, (before["samples"] or 0, now["samples"] or 0))
    return ResultDifference(
        now["model"],
        changes=(
            *_verdict_change(before, now),
            *_finding_changes(before, now, names),
            *statistics.changes,
            *Structure(pair, before, now).changes(),
            *_margin_changes(before, now, names),
        ),
        cause=statistics.cause,
        remarks=statistics.remarks,
    )


_VERDICTS = (
    ("healthy", "equivalent", "unchanged", "recorded"),
    ("inconclusive",),
    ("unhealthy", "different", "drifted", "missing"),
)
"""From good to bad."""


def _verdict_change(before: Data, now: Data) -> Iterator[Change]:
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


def _is_bad(result: Data) -> bool:
    """Whether a verdict fails a test."""
    return _rank(result["verdict"]) > 0


def _rank(verdict: str) -> int:
    """Return 0 for what is good; a verdict that is not known stands in the middle."""
    return next((rank for rank, words in enumerate(_VERDICTS) if verdict in words), 1)


def _finding_changes(before: Data, now: Data, names: Mapping[str, str]) -> Iterator[Change]:
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


def _margin_changes(before: Data, now: Data, names: Mapping[str, str]) -> Iterator[Change]:
    """Yield what came much nearer to its limit and has not reached it."""
    old, new = _margins(before, names), _margins(now, {})
    places = [
        Place(
            margin["label"],
            f"{margin['check']}: {percent(old[key]['used'])} of the limit",
            f"{percent(margin['used'])}, {number(margin['value'])} of {number(margin['limit'])}",
        )
        for key, margin in new.items()
        if key in old and old[key]["used"] < _FAR and _NEAR < margin["used"] <= 1
    ]
    if places:
        yield Change("margin", "near its limit", tuple(places))


def _margins(result: Data, names: Mapping[str, str]) -> dict[tuple[str, ...], Data]:
    return {
        (one["check"], one.get("setting", ""), names.get(one["layer"], one["layer"])): one
        for one in result["margins"]
        if one["used"] is not None
    }
