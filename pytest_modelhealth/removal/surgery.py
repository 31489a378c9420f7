"""Cuts units out of the parameters of a model, in place, and brings sizes in line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from pytest_modelhealth.removal.kinds import update_sizes
from pytest_modelhealth.removal.marks import Slot
from pytest_modelhealth.removal.planning import Step


def cut(steps: Iterable[Step], modules: Mapping[str, nn.Module]) -> None:
    """Leave units out of the layers of a model, which the caller owns.

    Parameters that change are new ones, of the same dtype, device and `requires_grad`, without a
    gradient; buffers are new tensors. Names stay.

    Args:
        steps: what is to be done.
        modules: the layers of the model, by name.
    """
    for step in steps:
        kept = sorted(set(range(step.units)) - set(step.gone))
        for reading in step.readings:
            for unit, twin in step.merged:
                _merge(_tensor(reading, modules), reading, unit, twin)
        for slot in (*step.slots, *step.readings):
            _replace(modules[slot.parameter.owner], slot, indices(slot.ids, kept))
        for name in step.norms:
            update_sizes(modules[name], len(kept))


def indices(ids: Tensor, kept: Collection[int]) -> Tensor:
    """Return the indices along a dimension that stay, in order.

    Args:
        ids: the unit at each index.
        kept: the units that stay.
    """
    return torch.isin(ids, torch.tensor(sorted(kept), dtype=ids.dtype)).nonzero().flatten()


def _tensor(slot: Slot, modules: Mapping[str, nn.Module]) -> Tensor:
    module, own = modules[slot.parameter.owner], slot.parameter.own
    parameter = module._parameters.get(own)
    buffer = module._buffers[own] if parameter is None else parameter
    assert buffer is not None
    return buffer


def _merge(weight: Tensor, reading: Slot, unit: int, twin: int) -> None:
    """Add the columns of a unit to those of its twin, place by place, in float64."""
    with torch.no_grad():
        along = weight.movedim(reading.dimension, 0)
        ids = reading.ids.to(weight.device)
        theirs, ours = (ids == unit).nonzero().flatten(), (ids == twin).nonzero().flatten()
        wide = torch.complex128 if weight.is_complex() else torch.float64
        along[ours] = (along[ours].to(wide) + along[theirs].to(wide)).to(weight.dtype)


def _replace(module: nn.Module, slot: Slot, places: Tensor) -> None:
    old = _tensor(slot, {slot.parameter.owner: module})
    new = old.detach().index_select(slot.dimension, places.to(old.device))
    for ndim, format_ in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if old.ndim == ndim and old.is_contiguous(memory_format=format_):
            new = new.contiguous(memory_format=format_)
    if isinstance(old, nn.Parameter):
        module._parameters[slot.parameter.own] = nn.Parameter(new, old.requires_grad)
        if slot.parameter.own == "weight":
            update_sizes(module, len(places))
    else:
        module._buffers[slot.parameter.own] = new
