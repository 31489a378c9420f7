"""Claims on reading the file of a run, and what is said of files that hold none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corpus.runs import dead_layer
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.runs import reading
from tests.runs.difference import made
from tests.runs.difference.recorded import inspected


def document() -> dict[str, Any]:
    """Return what a sound file holds."""
    return made.document(made.run(made.test(made.inspection(made.finding()))))


def read(tmp_path: Path, text: str | bytes) -> Any:
    """Return the run read from a file with this content."""
    path = tmp_path / "run.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return reading.read(path)


def test_real_inspections_are_read(tmp_path: Path) -> None:
    """What the recorder makes of a healthy and of an unhealthy model comes back as it was."""
    results = [*map(inspected, dead_layer())]
    found = read(tmp_path, json.dumps(made.document(made.run(made.test(*results)))))
    assert next(iter(found.tests))["results"] == json.loads(json.dumps(results))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("created"),
        lambda data: data["tests"][0]["results"][0]["layers"][1].pop("tied"),
        lambda data: data["tests"][0]["results"][0]["layers"][1].update(calls=True),
        lambda data: data["tests"][0]["results"][0]["layers"][1]["tensors"][0].update(mean="0"),
        lambda data: data["tests"][0]["results"][0].update(flow={"edges": [], "way": None}),
        lambda data: data["tests"][0]["results"][0].update(course={"steps": [1]}),
    ],
)
def test_what_is_missing_or_of_another_type_is_refused(
    change: Callable[[Any], Any], tmp_path: Path
) -> None:
    """Nothing that a page or a difference would stumble over is read."""
    data = document()
    change(data)
    with pytest.raises(InspectionError, match="write the file anew"):
        read(tmp_path, json.dumps(data))


def test_what_is_not_known_is_passed_over(tmp_path: Path) -> None:
    """New keys and new kinds of results are read."""
    data = document()
    data["new"] = data["tests"][0]["new"] = data["tests"][0]["results"][0]["new"] = {"a": [1]}
    other = {"kind": "probe", "headline": "h", "text": "", "place": "", "model": "", "verdict": ""}
    data["tests"][0]["results"].append(other)
    run = read(tmp_path, json.dumps(data))
    assert [result["kind"] for result in next(iter(run.tests))["results"]] == [
        "inspection",
        "probe",
    ]
    assert run.head["new"] == {"a": [1]}


def test_byte_order_marks_are_read(tmp_path: Path) -> None:
    """A file that PowerShell wrote anew, in UTF-16, is read."""
    assert read(tmp_path, json.dumps(document()).encode("utf-16")).head["exit_status"] == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "the file is empty"),
        (b'{"a": 1, "b": [1, 2', "the file is truncated: it ends after 19 bytes"),
        (b'{"a": "unfinished', "the file is truncated: it ends after 17 bytes"),
        (b'{"a": tr', "the file is truncated: it ends after 8 bytes"),
        (b"<html></html>", "not JSON: Expecting value at line 1, column 1"),
        (b'{"a": 1,}', "not JSON: "),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b"\xff\xfe\x00", "not JSON of a run"),
        (b"[" * 100_000, "not JSON of a run"),
        (b"[]", "not the file of a run, whose 'format' is 'pytest-modelhealth run'"),
        (
            b'{"format_version": 1, "verdict": "healthy", "layers": []}',
            "a report's JSON, not a run's",
        ),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    """The message names the file, what is wrong and how such a file is written."""
    with pytest.raises(InspectionError) as caught:
        read(tmp_path, content)
    assert says in str(caught.value)
    assert str(tmp_path / "run.json") in str(caught.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """Wherever a file ends too early, the message says so."""
    text = json.dumps(document())
    for end in range(1, len(text), 97):
        with pytest.raises(InspectionError, match=r"truncated|not JSON"):
            read(tmp_path, text[:end])


def test_no_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    """The message has what the system says and the next move."""
    with pytest.raises(InspectionError, match=r"No such file.*--modelhealth-json"):
        reading.read(tmp_path / "none.json")
    with pytest.raises(InspectionError, match=r"directory.*--modelhealth-json"):
        reading.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format_version": 7}, "version 7 of the format.*up to version 1"),
        ({"format_version": "1"}, "format_version: '1' is no version"),
        ({"format_version": True}, "format_version: True is no version"),
        ({"tests": {}}, "tests is an object, and has to be a list"),
        ({"notes": [None]}, r"notes\[0\] is null, and has to be a string"),
    ],
)
def test_wrong_heads_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """The message names both versions, or the key."""
    with pytest.raises(InspectionError, match=says):
        read(tmp_path, json.dumps({**document(), **change}))


def test_wrong_shapes_are_named_by_their_path(tmp_path: Path) -> None:
    """A key of the wrong type far inside is named by the way to it."""
    data = document()
    data["tests"][0]["results"][0]["layers"][2]["tensors"][1]["count"] = 1.5
    where = r"tests\[0\]\.results\[0\]\.layers\[2\]\.tensors\[1\]\.count is a number"
    with pytest.raises(InspectionError, match=where):
        read(tmp_path, json.dumps(data))
    del data["tests"][0]["results"][0]["layers"][2]["tensors"][1]["count"]
    with pytest.raises(InspectionError, match=r"tensors\[1\]\.count is missing"):
        read(tmp_path, json.dumps(data))


@pytest.mark.parametrize("key", ["text", "place", "batches"])
def test_a_key_that_may_be_missing_is_of_its_type(tmp_path: Path, key: str) -> None:
    """Without it a file is read; with something else under it, the way to it is named."""
    data = document()
    result = data["tests"][0]["results"][0]
    result.pop(key, None)
    read(tmp_path, json.dumps(data))
    result[key] = {}
    with pytest.raises(InspectionError, match=rf"results\[0\]\.{key} is an object, and has to be"):
        read(tmp_path, json.dumps(data))
