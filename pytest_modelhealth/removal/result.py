"""`RemovableUnits`: the units of a model that can go, to read, show and mask."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.removal.routes import held
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.report.removable import Proof, Removable, RemovableLayer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False, eq=False)
class RemovableUnits:
    """The units of a model that can go; `str` is a line and a table, `repr` the line.

    Args:
        record: what was found and proven, as plain data.
        report: what the batches showed that units were found on, with the verdict on it.
        model: the model, untouched.
    """

    record: Removable
    report: HealthReport
    model: nn.Module

    @property
    def layers(self) -> Mapping[str, RemovableLayer]:
        """Each layer with units that can go, by name, in execution order."""
        return self.record.layers

    @property
    def refused(self) -> Mapping[str, str]:
        """By layer, why units that looked removable are not."""
        return self.record.refused

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

    @property
    def parameters(self) -> int:
        """How many elements of parameters go with them."""
        return self.record.removable_parameters

    @property
    def multiply_adds(self) -> int | None:
        """How many multiply-adds a sample go with them; ``None`` where that was not measured."""
        return self.record.removable_multiply_adds

    def masks(self) -> dict[str, Tensor]:
        """Return a mask of zeros and ones for each parameter concerned, by its full name.

        They are for `torch.nn.utils.prune.custom_from_mask`: inactive and unread units are masked
        in the weights that make them, and in the norm behind, whose shift would be left of them.
        Duplicates are not: what reads them would miss them.
        """
        found: dict[str, Tensor] = {}
        for layer in self.record.layers.values():
            for part in layer.produced if layer.masked else ():
                mask = found.setdefault(part.parameter, torch.ones(part.shape))
                mask.index_fill_(part.dimension, torch.tensor(part.indices(layer.masked)), 0.0)
        return found

    def apply(self, model: nn.Module) -> None:
        """Put the masks on `model` by `torch.nn.utils.prune.custom_from_mask`, in place.

        Args:
            model: the model that was looked at, or one like it. ``prune.remove`` makes the zeros
                permanent.

        Raises:
            InspectionError: it has other layers; nothing is masked then.
        """
        masks = self.masks()
        if not isinstance(model, nn.Module):
            raise InspectionError(
                f"apply takes the model to mask, a torch.nn.Module, not {model!r}"
            )
        modules = {named.name: named.module for named in named_modules(model)}
        owned = []
        for name, mask in masks.items():
            owner, _, own = name.rpartition(".")
            if isinstance(modules.get(owner), torch.jit.ScriptModule):
                raise InspectionError(
                    f"{name!r} is a parameter of a script, on which torch's prune can put no mask: "
                    "give the model that the script was made of"
                )
            parameter = held(modules[owner], own) if owner in modules else None
            if parameter is None or parameter.shape != mask.shape:
                form = "none" if parameter is None else f"one of shape {tuple(parameter.shape)}"
                raise InspectionError(
                    f"the mask of {name!r} is of shape {tuple(mask.shape)}, and "
                    f"{type(model).__name__} has {form}: give the model that was looked at"
                )
            owned.append((modules[owner], own, mask.to(parameter.device)))
        for module, own, mask in owned:
            prune.custom_from_mask(module, own, mask)

    def plot(self) -> Figure:
        """Return a figure of the units by layer: a row a layer, a place a unit.

        Raises:
            InspectionError: the model has no layer whose units were looked at.
        """
        figure: Figure = self.report._renderer("figures", "plot_removable")(self)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries, lists, numbers and strings."""
        data: dict[str, Any] = self.report._renderer("removable", "to_dict")(self)
        return data

    def to_json(self, path: str | Path) -> None:
        """Write `to_dict` as JSON.

        Raises:
            InspectionError: `path` is no path.
            OSError: the file cannot be written.
        """
        if not isinstance(path, str | os.PathLike):
            raise InspectionError(
                f"to_json takes the path of the file to write, such as 'units.json', not {path!r}"
            )
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        Path(path).write_text(f"{text}\n", encoding="utf-8")

    def __str__(self) -> str:
        text: str = self.report._renderer("removable", "text")(self)
        return text

    def __repr__(self) -> str:
        line: str = self.report._renderer("removable", "line")(self)
        return line

    def _repr_html_(self) -> str:
        html: str = self.report._renderer("removable", "fragment")(self)
        return html
