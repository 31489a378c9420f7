"""The kinds of layers whose weights can be cut: where units stand in them, and what else says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.nn.modules import batchnorm, conv


@dataclass(frozen=True)
class Cuttable:
    """A kind of layer.

    Args:
        what: what its weight does.
        rows: the dimension of the weight in which its own units lie.
        columns: that of the units it reads.
        vectors: parameters and buffers with an entry for each unit.
    """

    what: Literal["linear", "convolution", "norm", "activation"]
    rows: int = 0
    columns: int = 1
    vectors: frozenset[str] = field(default_factory=lambda: frozenset({"bias"}))

    @property
    def is_norm(self) -> bool:
        """Whether it is a batch norm."""
        return self.what == "norm"


_NORM = Cuttable("norm", vectors=frozenset({"weight", "bias", "running_mean", "running_var"}))
_KINDS = {
    nn.Linear: Cuttable("linear"),
    nn.Conv1d: Cuttable("convolution"),
    nn.Conv2d: Cuttable("convolution"),
    nn.Conv3d: Cuttable("convolution"),
    nn.ConvTranspose1d: Cuttable("convolution", 1, 0),
    nn.ConvTranspose2d: Cuttable("convolution", 1, 0),
    nn.ConvTranspose3d: Cuttable("convolution", 1, 0),
    nn.BatchNorm1d: _NORM,
    nn.BatchNorm2d: _NORM,
    nn.BatchNorm3d: _NORM,
    nn.SyncBatchNorm: _NORM,
    nn.PReLU: Cuttable("activation", vectors=frozenset({"weight"})),
}


def kind_of(module: nn.Module) -> Cuttable | None:
    """Return the kind of a layer; ``None`` for one whose code is not torch's."""
    for type_, kind in _KINDS.items():
        if isinstance(module, type_) and "forward" not in vars(module):
            return kind if type(module).forward is type_.forward else None  # type: ignore[attr-defined]
    return None


def update_sizes(module: nn.Module, units: int) -> None:
    """Bring the attributes that say how large a layer is in line with its parameters.

    Args:
        module: a layer of a known kind.
        units: how many units it has, where no parameter says so.
    """
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, conv._ConvTransposeNd):
        module.in_channels, module.out_channels = module.weight.shape[:2]
    elif isinstance(module, conv._ConvNd):
        if module.groups > 1:  # channel by channel
            module.groups = module.weight.shape[0]
        module.out_channels = module.weight.shape[0]
        module.in_channels = module.weight.shape[1] * module.groups
    elif isinstance(module, batchnorm._BatchNorm):
        module.num_features = units
    elif isinstance(module, nn.PReLU):
        module.num_parameters = module.weight.numel()
