"""`compare`: which test of one run is which of another, and what changed in each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_modelhealth.runs.difference.inspections import (
    Change,
    Grade,
    Place,
    moved,
    snapshot_of,
    structural_changes,
)
from pytest_modelhealth.runs.run import FAILED, GRAVITY, Run
from pytest_modelhealth.snapshot.drift import detect_drift

Data = Mapping[str, Any]

NEW_FINDING, NEW_WARNING = "new finding", "new warning"
_ORDER = [Grade.WORSE, Grade.CHANGED, Grade.BETTER, Grade.SAME]


@dataclass(frozen=True)
class TestDifference:
    """What changed in a test and in its results."""

    __test__ = False

    id: str  # pytest's node id in the head, or in the base where it is gone
    changes: tuple[Change, ...] = ()  # those of the test, then of each result the gravest first
    causes: tuple[str, ...] = ()  # what began the drift of statistics, a sentence each
    remarks: tuple[str, ...] = ()  # what was not compared and why, a sentence each

    @property
    def grade(self) -> Grade:
        """The gravest of all its changes."""
        return min((one.grade for one in self.changes), key=[*Grade].index, default=Grade.SAME)


@dataclass(frozen=True)
class Difference:
    """What changed between two runs."""

    tests: tuple[TestDifference, ...]  # of which something is to be said, the worst first
    unchanged: int  # how many tests of both runs are as they were
    remarks: tuple[str, ...] = ()  # on the runs as a whole, a sentence each


def compare(base: Run, head: Run) -> Difference:
    """Return what changed from `base` to `head`."""
    before = {test["id"]: test for test in base.tests}
    now = {test["id"]: test for test in head.tests}
    was = _counterparts(before, now)
    tests = [_compare_tests(before[was[name]], test) for name, test in now.items() if name in was]
    unchanged = sum(test.grade is Grade.SAME for test in tests)
    for name in (one for one in now if one not in was):
        outcome = now[name]["outcome"]
        grade = Grade.WORSE if outcome in FAILED else Grade.CHANGED
        what = "new test" if _skip(base, name) is None else "no longer skipped"
        place = Place("", "", outcome, now[name]["message"])
        tests.append(TestDifference(name, (Change("test", what, (place,), grade),)))
    found = {*was.values()}
    for name in (one for one in before if one not in found):
        place = Place("", before[name]["outcome"])
        gone = Change("test", "inspects nothing any more", (place,), Grade.WORSE)
        if (reason := _skip(head, name)) is not None:
            gone = Change("test", "skipped now", (replace(place, now="skipped", note=reason),))
        elif not before[name]["results"]:
            gone = Change("test", "fails no more, or is gone", (place,), Grade.BETTER)
        tests.append(TestDifference(name, (gone,)))
    told = [test for test in tests if test.changes or test.remarks]
    told.sort(key=lambda test: _ORDER.index(test.grade))
    return Difference(tuple(told), unchanged, tuple(_remarks(base.head, head.head)))


def _skip(run: Run, name: str) -> str | None:
    """Return why a run skipped a test, or its module; ``None`` where it did not."""
    skipped = run.head.get("skipped", {})  # older files have none
    return next((skipped[n] for n in (name, name.partition("::")[0]) if n in skipped), None)


def _counterparts(before: Mapping[str, Data], now: Mapping[str, Data]) -> dict[str, str]:
    """Return the id in the base of each test of the head that is there.

    A test that moved to another file is the one of its name, where only one of that name moved;
    one that was renamed in its file is the only one there that shows the same.
    """
    was = {name: name for name in now if name in before}
    for key, may_differ in ((_own_name, True), (_models, False)):
        left: dict[object, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for side, tests, found in ((0, before, {*was.values()}), (1, now, {*was})):
            for name in (one for one in tests if one not in found):
                left[key(tests[name])][side].append(name)
        for old, new in left.values():
            if len(old) == len(new) == 1:
                one = _compare_tests(before[old[0]], now[new[0]])
                if may_differ or len(one.changes) == 1:  # that it has another name
                    was[new[0]] = old[0]
    return was


def _own_name(test: Data) -> str:
    return str(test["id"].partition("::")[2] or test["id"])


def _models(test: Data) -> object:
    """Return what a test that was renamed keeps: its file, its parameters, what it inspects."""
    results = (tuple(map(one.get, ("kind", "of", "model"))) for one in test["results"])
    return _file(test), test["id"].partition("[")[2], tuple(results)


def _file(test: Data) -> str:
    return str(test["id"].partition("::")[0])


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
        yield from (f"of the {which}: {note}" for note in run["notes"])


def _compare_tests(before: Data, now: Data) -> TestDifference:
    is_crash = now["outcome"] in FAILED and not now["results"]
    results = [] if is_crash else [*_compare_results(before["results"], now["results"])]
    found = TestDifference(
        now["id"],
        tuple(change for changes, *_ in results for change in changes),
        tuple(cause for _, cause, _ in results if cause),
        tuple(remark for *_, remarks in results for remark in remarks),
    )
    own = []
    if before["id"] != now["id"]:
        what = "renamed from" if _file(before) == _file(now) else "moved from"
        own.append(Change("test", what, (Place("", before["id"], now["id"]),)))
    old, new = before["outcome"], now["outcome"]
    grade = _grade(old in FAILED, new in FAILED)
    if old != new and found.grade is not grade:  # no result says why
        own.append(Change("outcome", "outcome", (Place("", old, new, now["message"]),), grade))
    return replace(found, changes=(*own, *found.changes))


def _grade(before: int, now: int) -> Grade:
    """Return what became of something that is the worse the larger it is."""
    if before == now:
        return Grade.CHANGED
    return Grade.WORSE if before < now else Grade.BETTER


Told = tuple[Iterable[Change], str, Sequence[str]]
"""What changed in a result, what began it, and what was not compared and why."""


def _compare_results(before: Sequence[Data], now: Sequence[Data]) -> Iterator[Told]:
    """Yield the difference of each result: of one kind and model, what is left by the order."""
    left, counterparts = dict(enumerate(before)), dict[int, Data]()
    for keys in (("kind", "of", "model"), ("kind",)):
        for index, result in enumerate(now):
            key = [result.get(name) for name in keys]
            same = [at for at, other in left.items() if [other.get(name) for name in keys] == key]
            if same and index not in counterparts:
                counterparts[index] = left.pop(same[0])
    for index, result in enumerate(now):
        kind = result["kind"]
        told = (Place(result["model"], "", result["headline"]),)
        if index not in counterparts:
            grade = Grade.WORSE if GRAVITY.get(result["verdict"], 1) else Grade.CHANGED
            yield [Change("result", f"new {kind}", told, grade)], "", ()
        elif kind == "inspection":
            yield _compare_inspections(counterparts[index], result)
        elif verdict := _verdict_change(counterparts[index], result):
            yield [*verdict, Change(kind, kind, told)], "", ()
    for result in left.values():
        gone = (Place(result["model"], result["headline"]),)
        yield [Change("result", f"no such {result['kind']} any more", gone, Grade.WORSE)], "", ()


def _verdict_change(before: Data, now: Data) -> list[Change]:
    old, new = before["verdict"], now["verdict"]
    # A snapshot that is unchanged since the base recorded it is what the base had.
    if old == new or (old, new) == ("recorded", "unchanged"):
        return []
    place = Place(now["model"], old, new)
    return [
        Change("verdict", "verdict", (place,), _grade(GRAVITY.get(old, 1), GRAVITY.get(new, 1)))
    ]


# Two inspections


def _compare_inspections(before: Data, now: Data) -> Told:
    """Return what changed; statistics of one batch, as training lets rounding grow."""
    verdict = _verdict_change(before, now)
    found = detect_drift(snapshot_of(before), snapshot_of(now))
    pair = found.pair
    if not pair.has_common_layers:
        place = Place("", before["model"], now["model"], "no layer is in both")
        return [*verdict, Change("model", "another model", (place,))], "", ()
    names = pair.alignment.to_candidate
    statistics, cause, remarks = (
        moved(found) if before["of"] == now["of"] == "batch" else ([], "", [])
    )
    changes = [
        *verdict,
        *_finding_changes(before, now, names),
        *statistics,
        *structural_changes(found, before, now),
    ]
    return changes, cause, remarks


def _finding_changes(before: Data, now: Data, names: Mapping[str, str]) -> Iterator[Change]:
    """Yield the findings that are new and those that are gone; `names` are those in the head."""
    sides = []
    for side, own in ((before, names), (now, {})):
        fails = side["violations"]
        follow = (consequence for one in fails for consequence in one.get("consequences", ()))
        shown = _by_place([*fails, *follow], own, everywhere=True)
        warns = _by_place(side["warnings"], own, everywhere=True)
        sides.append((_by_place(fails, own), warns, shown))
    (old, warned, shown_before), (new, warnings, shown_now) = sides
    gone = {key: one for key, one in old.items() if key not in shown_now}
    accepted = {*_by_place(now["waived"], {}), *warnings}
    accepted_now = [gone.pop(key) for key in [*gone] if key in accepted]
    known = {*warned, *shown_before}
    warned_now = [one for key, one in warnings.items() if key not in known]
    for what, findings, grade in (
        (NEW_FINDING, [new[key] for key in new if key not in shown_before], Grade.WORSE),
        ("now waived or warned of", accepted_now, Grade.CHANGED),
        ("no longer found", [*gone.values()], Grade.BETTER),
        (NEW_WARNING, warned_now, Grade.CHANGED),
    ):
        told = dict.fromkeys(
            (one["label"], f"{one['check']}: {one['message']}") for one in findings
        )
        if told:
            is_new = what.startswith("new")
            places = (Place(at, "", text) if is_new else Place(at, text) for at, text in told)
            yield Change("finding", what, tuple(places), grade)


def _by_place(
    findings: Iterable[Data], names: Mapping[str, str], *, everywhere: bool = False
) -> dict[tuple[str, str], Data]:
    """Return findings by check and layer, by its name in the head; or by each layer they are of."""
    return {
        (one["check"], names.get(layer, layer)): one
        for one in findings
        for layer in (one["layer"], *(one.get("affected", ()) if everywhere else ()))
    }
