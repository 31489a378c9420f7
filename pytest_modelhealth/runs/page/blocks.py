"""The numbers of the layers as blocks of the page: JSON, compressed, in letters that no markup has.

A block is a ``<script>`` of a type that no browser runs. It holds results that follow one another,
as tests of one model say much the same of its layers; ``data-of`` names what it holds. ``"t3-0"``
is a result without its histograms, with its charts where they do not stand on the page as they are,
and ``"t3-0:1"`` the histograms of the second `LAYERS_A_BLOCK` of its layers. ``scripts/packed.js``
unpacks them where someone looks.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from pytest_modelhealth.rendering.notation import printable
from pytest_modelhealth.runs.page.contents import anchor, rank
from pytest_modelhealth.runs.page.panels import drawn, facts
from pytest_modelhealth.runs.run import Run

LAYERS_A_BLOCK, BLOCK = 500, 400_000  # characters of JSON, after which a block is full
CHARTED = 300  # results with charts; of those beyond, which passed, there are the numbers alone
DIGITS, DIGITS_OF_A_COMPARISON = 4, 9
"""Significant digits: the page shows 3; 9 are enough to tell any two numbers of float32 apart."""

ON_THE_PAGE_AS_IT_IS = frozenset(
    {"text", "headline", "place", "notes", "basis", "evidence", "flow", "course"}
)


def blocks(run: Run, drawn_already: Collection[str], room: int, common: int) -> Iterator[str]:
    """Yield the blocks that fit into `room` bytes, those of tests that read badly first.

    Where a block does not fit, later, smaller ones may. None of tests that passed is begun beyond
    `common` bytes.
    """
    used = 0
    for is_bad, parts in groupby(_parts(run, drawn_already), itemgetter(0)):
        for block in _packed(parts):
            if used > common and not is_bad:
                return
            if used + len(block) <= room:
                used += len(block)
                yield block


def _parts(run: Run, drawn_already: Collection[str]) -> Iterator[tuple[bool, str, str]]:
    """Yield whether it is of a test that reads badly, a name, and JSON."""
    count = 0
    for is_bad in (True, False):
        tests = ((at, one) for at, one in enumerate(run.tests) if (rank(one) < 2) is is_bad)
        for own, result in (
            (anchor(at, n), one) for at, test in tests for n, one in enumerate(test["results"])
        ):
            count += 1
            digits = DIGITS_OF_A_COMPARISON if result["kind"] == "comparison" else DIGITS
            kept = {k: one for k, one in result.items() if k not in ON_THE_PAGE_AS_IT_IS}
            made = {"result": _shown(kept, digits), "facts": facts(result)}
            if count <= CHARTED and own not in drawn_already:
                made["charts"] = drawn(result, own)
            yield is_bad, own, _json(made)
            layers = result.get("layers", ())
            bins = [[tensor.get("bins") for tensor in layer["tensors"]] for layer in layers]
            for first in range(0, len(bins) if any(map(any, bins)) else 0, LAYERS_A_BLOCK):
                part = _columns(bins[first : first + LAYERS_A_BLOCK])
                yield is_bad, f"{own}:{first // LAYERS_A_BLOCK}", _json(part)


def _packed(parts: Iterable[tuple[bool, str, str]]) -> Iterator[str]:
    held: dict[str, str] = {}
    for _, name, text in parts:
        if held and sum(map(len, held.values())) + len(text) > BLOCK:
            yield _block(held)
            held = {}
        held[name] = text
    yield _block(held)


def _block(held: dict[str, str]) -> str:
    text = ",".join(f'"{name}":{one}' for name, one in held.items())
    packed = gzip.compress(b"{%s}" % text.encode("ascii"), 6, mtime=0)
    names, letters = " ".join(held), base64.b64encode(packed).decode("ascii")
    return f'<script type="application/octet-stream" data-of="{names}">{letters}</script>\n'


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


COLUMNS = "\n"
"""A key that no name of a model is: in those the page escapes what is not printable."""


def _columns(records: list[Any]) -> Any:
    """Return records that have the same keys as one of lists: what is alike stands together."""
    keys = {tuple(one) if isinstance(one, dict) else () for one in records}
    if len(records) > 1 and len(keys) == 1 and keys.isdisjoint({(), (COLUMNS,)}):
        return {COLUMNS: {key: _columns([one[key] for one in records]) for key in records[0]}}
    return [_columns(one) if isinstance(one, list) else one for one in records]


def _shown(value: object, digits: int) -> object:
    """Return `value` as the page shows it: no bins, short numbers, no letter that hides another."""
    if isinstance(value, str):
        return value if value.isprintable() else printable(value)
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        items = value.items()
        return {_shown(key, digits): _shown(one, digits) for key, one in items if key != "bins"}
    if isinstance(value, list | tuple):
        return _columns([_shown(item, digits) for item in value])
    return value
