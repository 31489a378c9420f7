"""The difference as strict JSON in ASCII: everything, with nothing shortened."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from pytest_modelhealth.runs.difference.result import Difference, Grade, TestDifference
from pytest_modelhealth.runs.difference.wording import headline

FORMAT = "pytest-modelhealth difference"
FORMAT_VERSION = 1
"""Raised when a key changes its name or meaning."""


def render(difference: Difference, *, colour: bool = False) -> str:
    """Return the difference; text for a program has no colour."""
    del colour
    data = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "headline": headline(difference),
        **{
            grade.value: len(difference.graded(grade)) for grade in Grade if grade is not Grade.SAME
        },
        "unchanged": difference.unchanged,
        "remarks": difference.remarks,
        "tests": [_test(test) for test in difference.tests],
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _test(test: TestDifference) -> dict[str, Any]:
    data = asdict(test)
    for made, result in zip(data["results"], test.results, strict=True):
        made["grade"] = result.grade
    return {**data, "grade": test.grade}
