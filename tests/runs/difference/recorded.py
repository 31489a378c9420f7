"""Real inspections, recorded as the plugin records them."""

from __future__ import annotations

import json
from typing import Any

import torch

from corpus.runs import Side
from pytest_modelhealth import Inspector
from pytest_modelhealth.rendering.recorded import record


def inspected(side: Side, seed: int = 0) -> dict[str, Any]:
    """Return what the file of a run has of the inspection of a side.

    Args:
        side: what is inspected.
        seed: set before it, for the masks of dropout.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(side.threads)
    torch.manual_seed(seed)
    try:
        report = Inspector(side.model).run_inspection(
            side.inputs, target=side.target, loss=side.loss
        )
    finally:
        torch.set_num_threads(threads)
    result: dict[str, Any] = json.loads(json.dumps(record(report, "test_a.py:1"), allow_nan=False))
    return result
