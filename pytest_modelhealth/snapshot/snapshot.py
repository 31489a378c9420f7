"""What a snapshot is: the layers of one run, and a line of statistics for each of their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from pytest_modelhealth.alignment.causes import dotted
from pytest_modelhealth.alignment.result import containers
from pytest_modelhealth.report import UNCALLED, Status

REAL = ("mean", "std", "min", "max")
"""The real numbers that are kept of a tensor; the root mean square follows from the first two."""

FRACTIONS = ("zeros", "dead")
PARAMETER_GRADIENTS = "parameter_gradients"
GRADIENTS = ("gradients", PARAMETER_GRADIENTS)


@dataclass(frozen=True)
class TensorLine:
    """What a snapshot keeps of a tensor.

    Args:
        dtype: as in `TensorStatistics`, as are `shape`, `count`, `mean`, `std`, `min` and `max`.
        zeros: the zero fraction; 0 where nothing is judged by it.
        dead: the dead fraction; ``None`` for a tensor without units.
        nan: number of NaNs.
        inf: number of infinities of either sign.
        noise: of real statistics that rounding moves further than usual, how many times as far, as
            `tolerances.Noise` has it; of fractions, how far; of a zero, 1 unless it is exact.
    """

    dtype: str
    shape: tuple[int, ...]
    count: int
    mean: float
    std: float
    min: float
    max: float
    zeros: float
    dead: float | None
    nan: int
    inf: int
    noise: Mapping[str, float] = field(default_factory=dict)

    @property
    def rms(self) -> float:
        """Root mean square."""
        return math.hypot(self.mean, self.std)

    @property
    def zero_count(self) -> int:
        """Number of zeros, where these are kept."""
        return round(self.zeros * self.count) if self.zeros == self.zeros else 0


TensorKey = tuple[str, str]
"""Role and own name of a tensor of a layer, ``""`` where the role has one tensor."""


@dataclass(frozen=True)
class LayerLine:
    """What a snapshot keeps of a layer.

    Args:
        type: name of its class, or of the function.
        status: what became of it.
        calls: how often it was called.
        activation: canonical name of the activation function it is, ``""`` for none.
        tied: as in `LayerRecord`.
        tensors: its tensors.
    """

    type: str
    status: str
    calls: int
    activation: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[TensorKey, TensorLine] = field(default_factory=dict)

    @property
    def owns_parameters(self) -> bool:
        """Whether it has parameters of its own."""
        return any(role == "parameters" for role, _ in self.tensors)

    @cached_property
    def largest_gradient(self) -> float:
        """Largest root mean square among the gradients of its parameters."""
        found = (
            line.rms for (role, _), line in self.tensors.items() if role == PARAMETER_GRADIENTS
        )
        return max(filter(math.isfinite, found), default=0.0)


@dataclass(frozen=True)
class Snapshot:
    """One section of a snapshot file.

    Args:
        profile: device and dtype, ``"cpu float32"``.
        model: class name of the model.
        recorded: versions; for people, never compared.
        calibrated: whether the noise of its numbers was measured.
        epsilon: machine epsilon of the coarsest dtype that the model computed in.
        loss: value of the loss; ``None`` where there was none.
        layers: by name, in the order in which they returned.
        loss_noise: how many times further than usual rounding moves the loss; ``None`` where that
            is not more.
    """

    profile: str
    model: str
    recorded: str
    calibrated: bool
    epsilon: float
    loss: float | None
    layers: Mapping[str, LayerLine]
    loss_noise: float | None = None

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
        return dotted(layer or self.model, own_name)

    def computes(self, layer: str) -> bool:
        """Whether a layer may change a number: an Identity and a mere container do not."""
        line = self.layers[layer]
        if line.status in UNCALLED or line.owns_parameters:
            return line.status not in UNCALLED
        idle = line.status == Status.ALIAS_OF_INPUT or line.type == "Identity"
        return not (idle or layer in self.holders)

    def with_tensors(self, made: Callable[[str, TensorKey, TensorLine], TensorLine]) -> Snapshot:
        """Return the snapshot with each tensor replaced by what `made` returns for it."""
        layers = {
            name: replace(
                line, tensors={key: made(name, key, tensor) for key, tensor in line.tensors.items()}
            )
            for name, line in self.layers.items()
        }
        return replace(self, layers=layers)


@dataclass(frozen=True)
class SnapshotFile:
    """A snapshot file.

    Args:
        test: the test it belongs to, and which of the test's snapshots it is.
        snapshots: a section a device and dtype profile, by the profile.
    """

    test: str
    snapshots: Mapping[str, Snapshot]


def is_given(role: str, layer: str) -> bool:
    """Whether a tensor is given to the model rather than computed: its batch, a parameter."""
    return role == "parameters" or (role == "inputs" and not layer)


def is_judged_whole(role: str, layer: str) -> bool:
    """Whether more than the real statistics of a tensor are compared.

    Inputs of inner layers serve the story: their form may change.
    """
    return role != "inputs" or not layer


def judges_zeros(role: str, layer: str) -> bool:
    """Whether the zero fraction of a tensor is compared.

    Zeros of gradients are free: where terms cancel, the machine decides between zero and 1e-12,
    and a zero that matters shows among the activations or moves the other statistics.
    """
    return role not in GRADIENTS and is_judged_whole(role, layer)


def shape_text(shape: tuple[int, ...]) -> str:
    """Spell a shape: ``64x10``, that of a scalar ``()``."""
    return "x".join(map(str, shape)) or "()"
