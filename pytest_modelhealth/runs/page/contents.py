"""What stands on the page as text: the verdict of the run, its tests, and each result's story."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

from pytest_modelhealth.rendering.notation import in_bytes, number, plural
from pytest_modelhealth.runs.page.panels import drawn
from pytest_modelhealth.runs.run import FAILED, GRAVITY, Run, Test

DRAWN_AT_ONCE = 60_000
"""Characters of charts that stand on the page as they are, for paper and without a script: those of
results that need a look, as far as they fit. Those of others are packed."""

TRIES = 20  # results whose charts are drawn to see whether they fit

_VERSIONS = {"pytest_modelhealth": "pytest-modelhealth", "torch": "torch", "python": "Python"}
_OF = {"step": "a training step", "training": "a training"}  # what was run, if not a batch


def contents(run: Run) -> dict[str, Any]:
    """Return what ``before.html`` shows of `run`, the tests that failed first."""
    entries = sorted(_entries(run), key=itemgetter("rank"))
    verdicts = Counter(result["verdict"] for entry in entries for result in entry["results"])
    order = sorted(verdicts, key=lambda one: [*GRAVITY, one].index(one))
    outcomes = Counter(entry["outcome"] for entry in entries)
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.items())
    inspected, ran = sum(one["inspected"] for one in entries), run.head.get("ran", len(entries))
    status = f"exit status {run.head.get('exit_status', 'unknown')}"
    created, environment = str(run.head.get("created", "")), run.head.get("environment", {})
    versions = [
        f"{name} {environment[key]}" for key, name in _VERSIONS.items() if environment.get(key)
    ]
    return {
        "entries": entries,
        "verdicts": [(f"{verdicts[one]:,} {one}", _tone(one)) for one in order],
        "outcomes": f"{inspected:,} of {plural(ran, 'test')} inspected a model; {counts}",
        "created": created.replace("T", " ").replace("+00:00", " UTC"),
        "about": [*versions, *filter(None, [environment.get("platform")]), status],
        "notes": run.head.get("notes", ()),
    }


def _tone(verdict: str) -> str:
    return ("good", "unsure", "bad")[GRAVITY.get(verdict, 1)]


def rank(test: Test) -> int:
    """Return 0 for a test that failed, 1 for one that reads badly, else 2 or 3."""
    if test["outcome"] in FAILED:
        return 0
    return 3 - max((GRAVITY.get(one["verdict"], 1) for one in test["results"]), default=0)


def anchor(index: int, nth: int) -> str:
    """Return the id of a result on the page: the `nth` of the test that ended as `index`-th."""
    return f"t{index}-{nth}"


def _entries(run: Run) -> Iterator[dict[str, Any]]:
    """Yield what stands on the page of each test, with charts as long as there is room."""
    room, tries = DRAWN_AT_ONCE, TRIES
    for index, test in enumerate(run.tests):
        results = [_result(anchor(index, n), result) for n, result in enumerate(test["results"])]
        for shown, result in zip(results, test["results"], strict=True):
            if rank(test) < 2 and tries:
                tries -= 1
                evidence, more = drawn(result, shown["anchor"])
                if len(evidence) + len(more) <= room:
                    room -= len(evidence) + len(more)
                    shown |= {"evidence": evidence, "more": more}
        texts = [result[key] for result in test["results"] for key in ("text", "headline")]
        is_told = any(test["message"] in text for text in texts)
        if test["outcome"] in FAILED and not is_told and all(r["tone"] == "good" for r in results):
            results.insert(0, _failure(anchor(index, len(results)), test))
            is_told = True
        yield {
            **{key: test[key] for key in ("id", "file", "outcome")},
            "name": test["id"].removeprefix(f"{test['file']}::"),
            "failed": test["outcome"] in FAILED,
            "inspected": bool(test["results"]),
            "rank": rank(test),
            "seconds": f"{number(test['seconds'])} s" if test["seconds"] is not None else "",
            "message": "" if is_told else test["message"],
            "results": results,
        }


def _failure(own: str, test: Test) -> dict[str, Any]:
    """Return what stands on the page of a test that failed without a result."""
    none = dict.fromkeys(("text", "evidence", "more", "facts", "remarks"), "")
    said = {"reason": test["message"], "place": test.get("raised_at", "")}
    return {**none, "kind": "failure", "verdict": "failed", "tone": "bad", "anchor": own, **said}


def _result(own: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands on the page of a result."""
    verdict, reason = str(result["verdict"]), result["headline"]
    for start in (f"{verdict}: ", "not equivalent: ", "equivalent "):  # the verdict stands there
        reason = reason.removeprefix(start)
    return {
        **{key: result[key] for key in ("kind", "verdict", "place", "text")},
        "anchor": own,
        "tone": _tone(verdict),
        "reason": reason,
        "evidence": "",
        "more": "",
        "facts": [fact for fact in _facts(result) if fact],
        "remarks": [*_remarks(result)],
    }


def _facts(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was run, a phrase each."""
    if result["kind"] == "comparison":
        yield f"{result['model']} compared with {result['candidate']}"
        yield plural(len(result["layers"]), "layer")
        return
    yield result["model"]
    if result["kind"] == "drift":
        yield f"{plural(result['tensors'], 'tensor')} against {result['snapshot']}"
    if result["kind"] != "inspection":
        return
    totals, loss, batches = result["totals"], result["loss"], result["batches"]
    part, ranks = result.get("part"), result.get("ranks")
    yield _OF.get(result["of"], "")
    yield plural(len(result["layers"]), "layer")
    yield "" if totals["parameters"] is None else plural(totals["parameters"], "parameter")
    yield plural(result["samples"], "sample") if result["samples"] else ""
    if part is not None:
        of = "" if part["of"] is None else f" of {part['of']:,}"
        yield f"{part['batches']:,}{of} batches ({part['ended_by']} ended the run)"
    elif batches != 1:
        yield f"{batches:,} batches"
    yield f"{plural(len(ranks['ranks']), 'rank')} ({ranks['engine']})" if ranks else ""
    yield f"loss {number(loss)}" if isinstance(loss, int | float) else ""
    yield "" if result["backward"] else "no backward pass"
    yield f"peak {in_bytes(totals['peak_bytes'])}" if totals["peak_bytes"] else ""


def _remarks(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings, what was accepted and what could not be judged, a sentence each.

    What headline or story says is not said again.
    """
    remarks: list[Any] = [
        f"{what}: {one['label']} ({one['check']}): {template.format_map(one)}"
        for what, key, template in (
            ("warning", "warnings", "{message}"),
            ("inconclusive", "inconclusive", "{reason}"),
            ("accepted", "waived", "{message} (because: {reason})"),
        )
        for one in result.get(key, ())
    ]
    remarks += [*(result.get("notes") or ()), result.get("basis"), *(result.get("changes") or ())]
    said = (result["headline"], result["text"])
    yield from (one for one in remarks if one and not any(one in text for text in said))
