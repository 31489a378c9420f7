"""`RemovableUnits`: the units of a model that can go, to read, show, mask and cut away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.report.removable import Proof, Removable, RemovableLayer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False, eq=False)
class RemovableUnits:
    """The units of a model that can go: `str` is a line and a table.

    Args:
        record: what was found and proven, as plain data.
        report: what the batches showed, with the verdict on it.
        model: the model, untouched.
    """

    record: Removable
    report: HealthReport
    model: nn.Module = field(repr=False)

    @property
    def layers(self) -> Mapping[str, RemovableLayer]:
        """Each layer with units that can go, by name, in execution order."""
        return MappingProxyType(dict(self.record.layers))

    @property
    def refused(self) -> Mapping[str, str]:
        """By layer, why units that looked removable are not."""
        return MappingProxyType(dict(self.record.refused))

    @property
    def indices(self) -> dict[str, tuple[int, ...]]:
        """The indices of the units that can go, by layer."""
        return {name: layer.removable for name, layer in self.record.layers.items()}

    @property
    def samples(self) -> int:
        """How many samples they were found on."""
        return self.record.samples

    @property
    def held_out_samples(self) -> int:
        """How many samples they were proven on."""
        return self.record.proof.samples

    @property
    def proof(self) -> Proof:
        """How far outputs moved on batches that were not used to find them."""
        return self.record.proof

    def masks(self) -> dict[str, Tensor]:
        """Return a mask of zeros and ones for each parameter concerned, by its full name.

        They are for `torch.nn.utils.prune.custom_from_mask`. Duplicates are not masked: what reads
        them would miss them.
        """
        found: dict[str, Tensor] = {}
        for layer in self.record.layers.values():
            for part in layer.produced if layer.masked else ():
                mask = found.setdefault(part.parameter, torch.ones(part.shape))
                where = torch.tensor(part.indices(layer.masked))
                mask.index_fill_(part.dimension, where, 0.0)
        return found

    def smaller(self) -> nn.Module:
        """Return a copy of the model without these units, which computes the same numbers."""
        from pytest_modelhealth.removal.smaller import smaller  # type: ignore[import-not-found]

        made: nn.Module = smaller(self.model, self)
        return made

    def plot(self) -> Figure:
        """Return a figure of the units by layer."""
        figure: Figure = self.report.renderer("removable_figure", "plot")(self)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries, lists, numbers and strings."""
        data: dict[str, Any] = self.report.renderer("removable", "to_dict")(self)
        return data
