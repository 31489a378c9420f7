"""`RemovableUnits`: the units of a model that can go, to read and mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.removal.units import parameter_named
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.report.parts import RemovableLayer


@dataclass(frozen=True, repr=False, eq=False)
class RemovableUnits:
    """The units of a model that can go; `str` is a line and a table, `repr` the line.

    Args:
        report: what the batches showed that units were found on, with the verdict on it.
        model: the model, untouched.
        layers: each layer with units that can go, by name, in execution order.
        refused: by layer, why units that looked removable are not.
        sizes: the number of units of every layer that was looked at, in execution order.
        samples: how many samples they were found on.
        held_out_samples: how many others they were proven on.
    """

    report: HealthReport
    model: nn.Module
    layers: Mapping[str, RemovableLayer] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    samples: int = 0
    held_out_samples: int = 0

    @property
    def indices(self) -> dict[str, tuple[int, ...]]:
        """The indices of the units that can go, by layer."""
        return {name: layer.removable for name, layer in self.layers.items()}

    def masks(self) -> dict[str, Tensor]:
        """Return a mask of zeros and ones for each parameter concerned, by its full name.

        They are for `torch.nn.utils.prune.custom_from_mask`: inactive units are masked in the
        weights that make them, and in the norm behind, whose shift would be left of them.
        Duplicates are not: what reads them would miss them.
        """
        modules = {named.name: named.module for named in named_modules(self.model)}
        masks: dict[str, Tensor] = {}
        for layer in self.layers.values():
            for name, dimension in layer.produced if layer.inactive else ():
                parameter = parameter_named(name, modules)
                assert parameter is not None
                mask = masks.setdefault(name, torch.ones(parameter.shape, device=parameter.device))
                indices = torch.tensor(layer.inactive, device=parameter.device)
                mask.index_fill_(dimension, indices, 0.0)
        return masks

    def _document(self) -> Any:
        return self.report._renderer("removable", "document")(self)

    def __str__(self) -> str:
        return str(self._document().text())

    def __repr__(self) -> str:
        return str(self._document().headline)

    def _repr_html_(self) -> str:
        return str(self._document().html())
