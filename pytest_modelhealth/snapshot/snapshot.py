"""What a snapshot is: the statistics of one run, and how far rounding moves each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pytest_modelhealth.alignment.result import containers
from pytest_modelhealth.report import (
    ROLES,
    UNCALLED,
    LayerRecord,
    Noises,
    Observation,
    Status,
)
from pytest_modelhealth.settings.setting import dotted
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.tolerance import TensorName

NAMED = ("parameters", "parameter_gradients", "buffers")
"""The roles of which a layer has several tensors, each with a name of its own."""


@dataclass(frozen=True)
class Snapshot:
    """The content of a snapshot file."""

    test: str  # the test it belongs to, and which of the test's snapshots it is
    profile: str  # device and dtype, ``"cpu float32"``
    recorded: str  # versions; for people, never compared
    calibrated: bool  # whether the noise of its numbers was measured
    epsilon: float  # machine epsilon of the coarsest dtype that the model computed in
    observation: Observation  # the layers, in the order in which they returned, and the loss
    # of what rounding moves further than usual, how many times as far; of the zero fraction, how
    # far
    noise: Noises = field(default_factory=dict)

    @property
    def layers(self) -> Mapping[str, LayerRecord]:
        """The layers by name."""
        return self.observation.layers

    @cached_property
    def holders(self) -> frozenset[str]:
        """Names of the layers that others lie in; the model itself always is one."""
        return containers(self.layers) | {""}

    @cached_property
    def place(self) -> dict[str, int]:
        """Place of each layer in the order in which they returned."""
        return {name: place for place, name in enumerate(self.layers)}

    def label(self, layer: str, own_name: str = "") -> str:
        """Return the name of a layer or tensor for people."""
        return dotted(layer or self.observation.model_type, own_name)

    @cached_property
    def tensors(self) -> dict[str, dict[TensorName, TensorStatistics]]:
        """The tensors of each layer; the inputs of a container are those of its first layer."""
        return {
            layer: {
                (layer, role, own): seen
                for role in ROLES
                if role != "inputs" or not layer or layer not in self.holders
                for own, seen in record.tensors(role).items()
            }
            for layer, record in self.layers.items()
        }

    def computes(self, layer: str) -> bool:
        """Whether a layer may change a number: an Identity and a mere container do not."""
        record = self.layers[layer]
        if record.status in UNCALLED or record.parameters:
            return record.status not in UNCALLED
        idle = record.status == Status.ALIAS_OF_INPUT or record.type_name == "Identity"
        return not (idle or layer in self.holders)

    def with_tensors(
        self, made: Callable[[TensorName, TensorStatistics], TensorStatistics]
    ) -> Snapshot:
        """Return the snapshot with each tensor replaced by what `made` returns for it."""
        layers = {}
        for name, record in self.layers.items():
            roles: dict[str, dict[str, TensorStatistics]] = {role: {} for role in ROLES}
            for key, seen in self.tensors[name].items():
                roles[key[1]][key[2]] = made(key, seen)
            layers[name] = replace(record, **of_roles(roles))
        return replace(self, observation=replace(self.observation, layers=layers))


def of_roles(tensors: Mapping[str, Mapping[str, TensorStatistics]]) -> dict[str, Any]:
    """Return the tensors of each role of a layer as its record has them."""
    return {role: seen if role in NAMED else seen.get("") for role, seen in tensors.items()}


def is_given(name: TensorName) -> bool:
    """Whether a tensor is given to the model rather than computed: its batch, a parameter."""
    layer, role, _ = name
    return role == "parameters" or (role == "inputs" and not layer)


def is_judged_whole(name: TensorName) -> bool:
    """Whether more than the real statistics of a tensor are compared.

    Inputs of inner layers serve the story: their form may change.
    """
    return name[1] != "inputs" or not name[0]


def shape_text(shape: tuple[int, ...]) -> str:
    """Spell a shape: ``64x10``, that of a scalar ``()``."""
    return "x".join(map(str, shape)) or "()"
