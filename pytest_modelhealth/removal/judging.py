"""Units that can go, where somebody asked for them and set how many there may be."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.report import Finding, Observation
from pytest_modelhealth.settings import Settings

REMOVABLE_UNITS = CHECKS["removable_units"]

_FEWEST_SAMPLES = 32  # as of `dead_units`: over fewer, many a unit is silent by chance


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the layers with too many units that can go, the worst first."""
    layers = (observation.removable or {}).values()
    for layer in sorted(layers, key=lambda layer: -layer.fraction):
        limit = settings.limit("max_removable_fraction", layer.name)
        if limit.value is None or layer.fraction <= limit.value:
            continue
        record = observation.layers[layer.name]
        going = f"{len(layer.removable):,} of {layer.units:,} units"
        if layer.samples < _FEWEST_SAMPLES:
            yield REMOVABLE_UNITS.inconclusive(
                record,
                f"{going} could go, but {layer.samples:,} samples say nothing about units; give "
                f"at least {_FEWEST_SAMPLES}",
            )
            continue
        kinds = {"inactive": len(layer.inactive), "duplicates": len(layer.duplicates)}
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
        yield REMOVABLE_UNITS.violation(
            record,
            f"{going} can go: {counts} over {layer.samples:,} samples",
            value=layer.fraction,
            limit=limit,
            cause="the layer is wider than what it learnt, or its units died in training",
            independent=True,
        )
