"""Layers that have taken over what stood beside them: adapters merged into weights."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_modelhealth.alignment.result import Alignment
from pytest_modelhealth.comparison.model_changes import Changed
from pytest_modelhealth.settings.setting import is_inside


def merged_layers(alignment: Alignment, changed: Mapping[str, Changed]) -> dict[str, list[str]]:
    """Return the layers with other weights beside which layers with weights are no longer called.

    What such a layer gives by itself is another thing than it was; what the module around gives is
    what the two gave together.

    Args:
        alignment: which layer is which.
        changed: the parameters and buffers of each layer of the reference whose values differ.

    Returns:
        The names of the layers that are no longer called, by that of the layer, in the reference.
    """
    layers = alignment.reference
    idle = [
        ours.name
        for _, ours, theirs in alignment.aligned
        if ours.parameters and ours.calls and not theirs.calls
    ]
    found = {}
    for _, ours, _ in alignment.aligned:
        around = ours.name.rpartition(".")[0]
        if ours.name not in changed or not changed[ours.name].parameters or around not in layers:
            continue
        beside = [name for name in idle if around and is_inside(name, around)]
        if beside and ours.name not in idle and layers[around].calls:
            found[ours.name] = beside
    return found
