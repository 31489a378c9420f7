"""Healthy models whose wiring looks wrong at first sight: none may be called unhealthy.

Written before the checks that they judge, without reading them; the first verdicts are recorded
elsewhere, and nothing was tuned on them. What stands for a pretrained part is drawn at random.
"""

from __future__ import annotations

from benchmarks.cases.lookalikes import (
    constant_inputs,
    idle_parts,
    reused_parts,
    stopped_gradients,
    uneven_blocks,
    zero_starts,
)
from benchmarks.cases.subject import Shelf

SHELF = Shelf(
    controls=[
        control
        for part in (
            zero_starts,
            stopped_gradients,
            idle_parts,
            uneven_blocks,
            constant_inputs,
            reused_parts,
        )
        for control in part.SHELF.controls
    ]
)
