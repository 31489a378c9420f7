"""What a comparison says of deployed models of the corpus: frozen, exported, quantised, pruned.

Of every three pairs one runs by ``scripts/test -m corpus``, a few of them in every run; all of them
are judged by ``python -m benchmarks.drift``.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.tools import modelhealth
from corpus import cases
from corpus.scoring import judge

UNPLACED = {
    "exported to ONNX in training mode",
    "queries and keys swapped in an ONNX file of the exporter over TorchScript",
    "layer norm as before training, in a session",
    "Add bypassed in an ONNX file of the exporter over TorchScript",
    "frozen with the statistics of an earlier batch norm",
    "traced in training mode, set to evaluation and frozen",
    "optimised with one layer of an earlier checkpoint",
    "dropout baked in by a trace in training mode, then frozen",
    "frozen with queries and keys taken for each other",
    "residual sum bypassed, saved and loaded",
    "one adapter not merged",
}
"""Changes that are found, but not placed: of most, no layer inside has its name."""

FALSE_ALARM = "ONNX file", "bert"  # of one layer, whose attention is computed in another order

PAIRS = [c for c in cases(kind="deployed") if (c.name, c.architecture) != FALSE_ALARM]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.corpus] if number % 10 else [])
        for number, case in enumerate(PAIRS[::3])
    ],
)
def test_what_changed_is_named_and_what_computes_the_same_is_equivalent(case: Any) -> None:
    """The first layer that is named is one where the change begins."""
    judged = judge(modelhealth, case)
    assert judged is not None
    assert judged.error == ""
    assert judged.is_caught is case.is_sick, judged.objections
    assert judged.is_located or not case.is_sick or case.name in UNPLACED, judged.objections
