"""Masks units in the parameters of a model, and merges duplicates into their twins, in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from pytest_modelhealth.removal.ways import held
from pytest_modelhealth.report.removable import RemovableLayer, UnitSlice


def apply_masks(
    layers: Mapping[str, RemovableLayer], modules: Mapping[str, nn.Module], *, merged: bool = False
) -> None:
    """Set to zero what makes the inactive and unread units of some layers, in place.

    Args:
        layers: the layers.
        modules: those of the model, by name.
        merged: whether duplicates go too, and what reads them reads their twins instead.
    """
    with torch.no_grad():
        for layer in layers.values():
            units = layer.removable if merged else layer.masked
            for unit, twin in layer.duplicates if merged else ():
                for part in layer.read:
                    _move(part, _kept(part, modules), unit, twin)
            for part in layer.produced:
                _clear(part, _kept(part, modules), units)


def _kept(part: UnitSlice, modules: Mapping[str, nn.Module]) -> Tensor:
    owner, _, own = part.parameter.rpartition(".")
    found = held(modules[owner], own)
    assert found is not None
    return found[1].data  # writing here raises no version


def _clear(part: UnitSlice, tensor: Tensor, units: Collection[int]) -> None:
    if units:
        where = torch.tensor(part.indices(units), device=tensor.device)
        tensor.index_fill_(part.dimension, where, 0)


def _move(part: UnitSlice, tensor: Tensor, unit: int, twin: int) -> None:
    source = tensor.narrow(part.dimension, unit * part.each, part.each)
    tensor.narrow(part.dimension, twin * part.each, part.each).add_(source)
    source.zero_()
