"""The tables of the corpus: what each check has to name, and what it has to leave alone."""

from __future__ import annotations

import linecache
import pkgutil
import re
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import corpus.checks

pytestmark = pytest.mark.filterwarnings(  # a part of some losses
    "ignore:Using a target size", "ignore:Implicit dimension choice"
)

TABLES = [
    table
    for found in pkgutil.iter_modules(corpus.checks.__path__)
    if hasattr(table := import_module(f"corpus.checks.{found.name}"), "CHECK")
]


def rows(which: str, *only: str) -> list[Any]:
    """Return each row with its table, by its name."""
    return [
        pytest.param(table, row, id=f"{table.__name__.rpartition('.')[2]}-{name}")
        for table in TABLES
        for name, row in getattr(table, which).items()
        if not only or table.CHECK in only
    ]


def alone(table: Any) -> tuple[str, ...]:
    """Return the names of the tables in whose rows no other check objects."""
    return getattr(table, "ALONE", ())


def judged(inspect: Any, table: Any, made: Any, *, alone: bool, notes: bool = False) -> list[Any]:
    """Inspect what a row makes, and return all that the check says, its notes where asked for."""
    made = (made, torch.randn(64, 16)) if isinstance(made, nn.Module) else made
    model, inputs, target, loss = (*made, None, None)[:4]
    report = inspect(model, inputs, target, loss=loss)
    assert report._judgement.broken == ()
    if alone:
        assert {v.check for v in report.violations} <= {table.CHECK}
    every = [w for v in report._judgement.findings for w in (v, *v.folded)]
    said = [found for found in every if found.check in (table.CHECK, *getattr(table, "CHECKS", ()))]
    return [found for found in said if found.grade != "note" or notes]


@pytest.mark.parametrize(("table", "row"), rows("FAULTS"))
def test_a_fault_is_named_with_layer_and_line(table: Any, row: Any, inspect: Any) -> None:
    """One finding a fault; what it says has the words, or the line of code that it names has."""
    build, grade, layer, *words = row
    is_alone = ... not in words and "FAULTS" in alone(table)
    (found,) = judged(inspect, table, build(), alone=is_alone, notes=grade == "note")
    assert found.layer == (found.layer if layer is None else layer)
    assert found.grade == grade
    text = f"{found.message} {found.cause} {found.tensor}"
    places = re.findall(r"([\w./-]+\.py):(\d+)", text)
    text = " ".join([text, *(linecache.getline(path, int(at)) for path, at in places)])
    assert [word for word in words if isinstance(word, str) and word not in text] == [], text
    assert all(set(found.affected) == word for word in words if isinstance(word, set))


@pytest.mark.parametrize(("table", "build"), rows("HEALTHY"))
def test_what_only_looks_like_it_is_left_alone(table: Any, build: Any, inspect: Any) -> None:
    """Nothing is said, not even a warning, nor a note where the table has one."""
    notes = any(grade == "note" for _, grade, *_ in table.FAULTS.values())
    assert judged(inspect, table, build(), alone="HEALTHY" in alone(table), notes=notes) == []


@pytest.mark.parametrize(("table", "build"), rows("HEALTHY", "wiring"))
def test_a_design_is_left_alone_in_evaluation(table: Any, build: Any, inspect: Any) -> None:
    """Where no draw of the training mode tells what is used."""
    model, inputs = build()
    assert judged(inspect, table, (model.eval(), inputs), alone=False) == []
