"""What a snapshot is: the layers of one run, and a line of statistics for each of their tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

REAL = ("mean", "std", "min", "max")
"""The real numbers that are kept of a tensor; the root mean square follows from the first two."""

FRACTIONS = ("zeros", "dead")
GRADIENTS = ("gradients", "parameter_gradients")
OWN_NAMES = ("parameters", "parameter_gradients", "buffers")
"""The roles of which a layer has several tensors, each with a name of its own."""


@dataclass(frozen=True)
class LayerLine:
    """What a snapshot keeps of a layer itself.

    Args:
        type: name of its class, or of the function.
        status: what became of it.
        calls: how often it was called.
        activation: canonical name of the activation function it is, ``""`` for none.
        tied: as in `LayerRecord`.
    """

    type: str
    status: str
    calls: int
    activation: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorLine:
    """What a snapshot keeps of a tensor.

    Args:
        dtype: as in `TensorStatistics`.
        shape: as in `TensorStatistics`.
        count: as in `TensorStatistics`, as are `mean`, `std`, `min` and `max`.
        zeros: the zero fraction; 0 where nothing is judged by it.
        dead: the dead fraction; ``None`` for a tensor without units.
        nan: number of NaNs.
        inf: number of infinities of either sign.
        noise: of real statistics that rounding moves further than usual, how many times as far, as
            `noise.Noise` has it; of fractions, how far; of a zero, 1 unless it is exact.
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


Tensors = Mapping[str, Mapping[str, TensorLine]]


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
        layers: by name, in the order of the file.
        tensors: by role, then by name, which is the layer's, followed by a dot and the tensor's
            own name where the role has several. A role without tensors is missing.
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
    tensors: Tensors
    loss_noise: float | None = None


@dataclass(frozen=True)
class SnapshotFile:
    """A snapshot file.

    Args:
        test: the test it belongs to, and which of the test's snapshots it is.
        snapshots: a section a device and dtype profile, by the profile.
    """

    test: str
    snapshots: Mapping[str, Snapshot]


def split(role: str, name: str) -> tuple[str, str]:
    """Return the layer of a tensor, and its own name, which never has a dot."""
    if role not in OWN_NAMES:
        return name, ""
    layer, _, own_name = name.rpartition(".")
    return layer, own_name


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
