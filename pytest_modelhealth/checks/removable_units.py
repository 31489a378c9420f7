"""Units that can go, where somebody asked for them and set how many there may be."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.removable import RemovableLayer
from pytest_modelhealth.settings import Settings

REMOVABLE_UNITS = CHECKS["removable_units"]


_FEWEST_SAMPLES = 32
"""As of `dead_units`: over fewer, many a unit is silent by chance."""


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the layers with too many units that can go, the worst first."""
    if observation.removable is None:
        return
    for layer in sorted(observation.removable.values(), key=lambda layer: -layer.fraction):
        limit = settings.limit("max_removable_fraction", layer.name)
        if limit.value is None or layer.fraction <= limit.value:
            continue
        record = observation.layers[layer.name]
        if layer.samples < _FEWEST_SAMPLES:
            yield REMOVABLE_UNITS.inconclusive(
                record,
                f"{len(layer.removable):,} of {layer.units:,} units could go, but "
                f"{layer.samples:,} samples say nothing about units; give at least "
                f"{_FEWEST_SAMPLES}",
            )
        else:
            yield REMOVABLE_UNITS.violation(
                record,
                f"{len(layer.removable):,} of {layer.units:,} units "
                f"{'have no effect' if layer.read_by else 'can go'}: {_kinds(layer)} over "
                f"{layer.samples:,} samples",
                value=layer.fraction,
                limit=limit,
                cause="the layer is wider than what it learnt, or its units died in training"
                + (f"; to be masked, not cut: read by {layer.read_by}" if layer.read_by else ""),
                independent=True,
            )


def _kinds(layer: RemovableLayer) -> str:
    counts = {
        "inactive": len(layer.inactive),
        "duplicates": len(layer.duplicates),
        "read by nothing": len(layer.unread),
    }
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
