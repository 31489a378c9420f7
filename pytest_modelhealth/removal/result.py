"""`RemovableUnits`: the units of a model that can go, to read, show and mask."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.removal.routes import held
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.report.removable import RemovableLayer


@dataclass(frozen=True)
class Proof:
    """How far outputs moved on batches that were not used to find units.

    Args:
        samples: of these batches.
        merged: largest difference of an output with duplicates merged into their twins, relative to
            the largest magnitude of the output; all other units go without any.
        limit: up to which rounding explains `merged`: measured.
    """

    samples: int = 0
    merged: float = 0.0
    limit: float = 0.0


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
        proof: how far outputs moved on batches that were not used to find them.
        parameters, multiply_adds: how many elements of parameters and multiply-adds a sample go
            with all of the units that weights alone read; what two layers share counts once.
        of_parameters, of_multiply_adds: how many the model has. Multiply-adds are ``None`` where
            they could not be measured.
    """

    report: HealthReport
    model: nn.Module
    layers: Mapping[str, RemovableLayer] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    samples: int = 0
    proof: Proof = field(default_factory=Proof)
    parameters: int = 0
    multiply_adds: int | None = None
    of_parameters: int = 0
    of_multiply_adds: int | None = None

    @property
    def indices(self) -> dict[str, tuple[int, ...]]:
        """The indices of the units that can go, by layer."""
        return {name: layer.removable for name, layer in self.layers.items()}

    @property
    def held_out_samples(self) -> int:
        """How many samples they were proven on."""
        return self.proof.samples

    def masks(self) -> dict[str, Tensor]:
        """Return a mask of zeros and ones for each parameter concerned, by its full name.

        They are for `torch.nn.utils.prune.custom_from_mask`: inactive and unread units are masked
        in the weights that make them, and in the norm behind, whose shift would be left of them.
        Duplicates are not: what reads them would miss them.
        """
        masks: dict[str, Tensor] = {}
        for layer in self.layers.values():
            for part in layer.produced if layer.masked else ():
                mask = masks.setdefault(part.parameter, torch.ones(part.shape))
                mask.index_fill_(part.dimension, torch.tensor(part.indices(layer.masked)), 0.0)
        return masks

    def apply(self, model: nn.Module) -> None:
        """Put the masks on `model` by `torch.nn.utils.prune.custom_from_mask`, in place.

        Args:
            model: the model that was looked at, or one like it. ``prune.remove`` makes the zeros
                permanent.

        Raises:
            InspectionError: it has other layers; nothing is masked then.
        """
        if not isinstance(model, nn.Module):
            raise InspectionError(
                f"apply takes the model to mask, a torch.nn.Module, not {model!r}"
            )
        modules = {named.name: named.module for named in named_modules(model)}
        owned = []
        for name, mask in self.masks().items():
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

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries, lists, numbers and strings."""
        data: dict[str, Any] = self._rendered("to_dict")
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

    def _rendered(self, form: str) -> Any:
        return self.report._renderer("removable", form)(self)

    def __str__(self) -> str:
        return str(self._rendered("text"))

    def __repr__(self) -> str:
        return str(self._rendered("line"))

    def _repr_html_(self) -> str:
        return str(self._rendered("fragment"))
