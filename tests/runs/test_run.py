"""Claims on reading the file of a run, and what is said of files that hold none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corpus.runs import dead_layer
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.runs import run as runs
from tests.runs.difference import made
from tests.runs.difference.recorded import inspected


def document() -> dict[str, Any]:
    """Return what a sound file holds."""
    return made.document(made.run(made.test(made.inspection(made.finding()))))


def read(tmp_path: Path, text: str | bytes) -> Any:
    """Return the run read from a file with this content."""
    path = tmp_path / "run.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return runs.read(path)


def test_real_inspections_are_read(tmp_path: Path) -> None:
    """What the recorder makes of a healthy and of an unhealthy model comes back as it was."""
    results = [*map(inspected, dead_layer())]
    found = read(tmp_path, json.dumps(made.document(made.run(made.test(*results)))))
    assert next(iter(found.tests))["results"] == json.loads(json.dumps(results))


def test_what_is_not_known_is_passed_over(tmp_path: Path) -> None:
    """New keys and new kinds of results are read, also as PowerShell writes them, in UTF-16."""
    data = document()
    data["new"] = data["tests"][0]["new"] = data["tests"][0]["results"][0]["new"] = {"a": [1]}
    data["tests"][0]["results"].append({"kind": "probe", "headline": "h", "verdict": ""})
    run = read(tmp_path, json.dumps(data).encode("utf-16"))
    results = next(iter(run.tests))["results"]
    assert [result["kind"] for result in results] == ["inspection", "probe"]
    assert run.head["new"] == {"a": [1]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON of a run, or only a part of it: "),
        (b'{"a": 1, "b": [1, 2', "only a part of it: "),
        (b"<html></html>", "Expecting value: line 1 column 1"),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b"\xff\xfe\x00", "not JSON of a run"),
        (b"[" * 100_000, "not JSON of a run"),
        (b"[]", "not the file of a run, whose 'format' is 'pytest-modelhealth run'"),
        (b'{"format": "pytest-modelhealth run", "format_version": 1}', "KeyError('tests')"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    """The message names the file, what is wrong and how such a file is written."""
    with pytest.raises(InspectionError) as caught:
        read(tmp_path, content)
    assert says in str(caught.value)
    assert str(tmp_path / "run.json") in str(caught.value)


def test_no_file_a_directory_and_other_versions_are_refused(tmp_path: Path) -> None:
    """The message has what the system says, or both versions, and the next move."""
    with pytest.raises(InspectionError, match=r"No such file.*--modelhealth-json"):
        runs.read(tmp_path / "none.json")
    with pytest.raises(InspectionError, match=r"directory.*--modelhealth-json"):
        runs.read(tmp_path)
    for version in (7, "1", True, 0):
        says = rf"version {version!r} of the format.*up to version 2"
        with pytest.raises(InspectionError, match=says):
            read(tmp_path, json.dumps({**document(), "format_version": version}))
