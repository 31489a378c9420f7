"""The numbers of the layers as blocks of the page: JSON, compressed, in letters that no markup has.

A block is a ``<script>`` of a type that no browser runs. A result has one, without its histograms,
one for the histograms of each `LAYERS_A_BLOCK` layers, and one of its charts as markup where they
do not stand on the page as they are; ``scripts/packed.js`` unpacks them where someone looks.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pytest_modelhealth.rendering.notation import printable
from pytest_modelhealth.runs.page.contents import anchor, rank
from pytest_modelhealth.runs.page.panels import drawn
from pytest_modelhealth.runs.run import Run

LAYERS_A_BLOCK = 500
CHARTED = 300  # results with charts; of those beyond, which passed, there are the numbers alone
DIGITS, DIGITS_OF_A_COMPARISON = 5, 9
"""Significant digits of a number; 9 are enough to tell any two numbers of float32 apart."""

MOST_MISSES = 20  # results that do not fit, after which no other is tried

ON_THE_PAGE_AS_IT_IS = frozenset(
    {"text", "headline", "place", "notes", "basis", "evidence", "flow", "course"}
)


def blocks(run: Run, drawn_already: Collection[str], room: int) -> Iterator[str]:
    """Yield the blocks that fit into `room` bytes, those of failing tests first.

    A result whose numbers do not fit is left out, and so are histograms; later, smaller ones may
    still fit.
    """
    misses = 0
    for told, (own, result) in enumerate(_worst_first(run)):
        has_charts = told < CHARTED and own not in drawn_already
        for block in _of_result(own, result, has_charts=has_charts):
            if len(block) > room:
                misses += 1
                break
            room -= len(block)
            yield block
        if misses == MOST_MISSES:
            return


def _worst_first(run: Run) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each result with its id on the page, those of tests that read badly first."""
    for is_first_round in (True, False):
        for index, test in enumerate(run.tests):
            if (rank(test) < 2) is is_first_round:
                yield from ((anchor(index, n), one) for n, one in enumerate(test["results"]))


def _of_result(own: str, result: Mapping[str, Any], *, has_charts: bool) -> Iterator[str]:
    """Yield the block of a result, of its charts, and then those of its histograms."""
    digits = DIGITS_OF_A_COMPARISON if result["kind"] == "comparison" else DIGITS
    kept = {key: value for key, value in result.items() if key not in ON_THE_PAGE_AS_IT_IS}
    yield _block(f"data-{own}", _shown(kept, digits))
    if has_charts:
        yield _block(f"charts-{own}", drawn(result, own))
    layers = result.get("layers", ())
    histograms = [[tensor.get("bins") for tensor in layer["tensors"]] for layer in layers]
    if any(map(any, histograms)):
        for first in range(0, len(histograms), LAYERS_A_BLOCK):
            part = histograms[first : first + LAYERS_A_BLOCK]
            yield _block(f"bins-{own}-{first // LAYERS_A_BLOCK}", part)


def _block(own: str, value: object) -> str:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    packed = base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")
    return f'<script type="application/octet-stream" id="{own}">{packed}</script>\n'


def _shown(value: object, digits: int) -> object:
    """Return `value` as the page shows it: no bins, short numbers, no letter that hides another."""
    if isinstance(value, str):
        return value if value.isprintable() else printable(value)
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        items = value.items()
        return {_shown(key, digits): _shown(one, digits) for key, one in items if key != "bins"}
    if isinstance(value, list | tuple):
        return [_shown(item, digits) for item in value]
    return value
