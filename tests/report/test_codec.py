"""Every record of a report leaves its process whole: by the codec to files, pickled to ranks."""

from __future__ import annotations

import json
import math
import pickle
import pkgutil
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import pytest_modelhealth.rendering.data  # noqa: F401 - what files have of statistics
from pytest_modelhealth import report
from pytest_modelhealth.report import Flow, ModelSummary
from pytest_modelhealth.report.codec import encode
from pytest_modelhealth.report.flow.graph import Graph
from pytest_modelhealth.report.merging import Merge
from pytest_modelhealth.statistics import TensorStatistics

FILES = pkgutil.walk_packages(report.__path__, f"{report.__name__}.")
NAMED = [one for file in FILES for one in vars(pkgutil.resolve_name(file.name)).values()]
OTHERS = {Merge, ModelSummary}  # which hold functions
RECORDS = {one for one in NAMED if isinstance(one, type) and is_dataclass(one)} - OTHERS
PLAIN = {str: "\ud800", int: 0, float: math.nan, bool: True, Any: 0, np.ndarray: np.ones(2, bool)}


def made(hint: Any, depth: int) -> Any:
    """A value of a type, with records inside each other down to a depth, and nothing below."""
    origin, inside = get_origin(hint) or hint, get_args(hint)
    if origin in (*PLAIN, Literal):
        return PLAIN[origin] if origin in PLAIN else inside[0]
    if origin is Flow:
        return Flow(lambda: made(Graph, depth))
    if is_dataclass(origin):
        hints = get_type_hints(origin, localns={"TensorStatistics": TensorStatistics})
        return origin(**{one.name: made(hints[one.name], depth - 1) for one in fields(origin)})
    if not isinstance(origin, type) or type(None) in inside:  # a union
        return None if depth < 0 and type(None) in inside else made(inside[0], depth)
    if issubclass(origin, Mapping):
        return {} if depth < 0 else {"a": made(inside[1], depth)}
    if issubclass(origin, Enum):
        return next(iter(origin))
    if ... in inside or origin is not tuple:
        return origin([] if depth < 0 else [made(inside[0], depth)])
    return tuple(made(one, depth) for one in inside)


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("kind", sorted(RECORDS, key=repr), ids=lambda kind: kind.__name__)
def test_every_record_leaves_whole(kind: type, depth: int) -> None:
    """JSON has a key for each field that is for users; a pickle has every field as it was."""
    one = made(kind, depth)
    data = json.loads(json.dumps(encode(one), allow_nan=False))
    assert [*data] == [f.name for f in fields(kind) if f.metadata.get("json", True)]
    np.testing.assert_equal(asdict(pickle.loads(pickle.dumps(one))), asdict(one))
