"""Where a layer's output goes as it is: through activations and norms to the next weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.evidence import called, completed, consumers, innermost
from pytest_modelhealth.checks.weights import linear_maps

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation

NORMALIZATIONS = frozenset(
    {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LayerNorm", "GroupNorm"}
    | {"InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "RMSNorm"}
)
"""The modules of torch whose output has mean 0 and variance 1, or root mean square 1, by their
own scale and shift."""

HAS_WEIGHTS = frozenset({"in_features", "in_channels", "input_size"})
"""Options of layers whose weights may be tied, so that another layer lists them."""

_SQUASHING = frozenset({"softmax", "log_softmax", "softmin"})


def plain_path(observation: Observation, record: LayerRecord) -> list[LayerRecord]:
    """Return the layers from `record` to the next weights, those last, ``[]`` where none follow.

    Only layers that take the output before them as it is are on it: a sum with a residual stream, a
    product with a gate, a concatenation end the path, so that it is empty for zero-initialised
    branches, gates and heads.
    """
    path: list[LayerRecord] = []
    here = record
    while True:
        following = [taker for taker in _takers(observation, here) if taker not in path]
        if not following:
            return []
        here = following[0]
        path.append(here)
        if here.activation in _SQUASHING:
            return []
        if linear_maps(here) or not HAS_WEIGHTS.isdisjoint(here.options):
            return path


def _takers(observation: Observation, record: LayerRecord) -> Iterator[LayerRecord]:
    """Yield the innermost layers that take the output of `record`, the first to run first."""
    taking = innermost(consumers(observation, record))
    last = innermost(called(observation))
    inner = {layer.name for layer in last}
    for taker in sorted(taking, key=lambda layer: layer.entered or 0):
        if taker.name in inner and (taker.entered or 0) > completed(record):
            yield taker
