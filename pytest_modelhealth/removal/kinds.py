"""The kinds of layers whose weights can be cut, and where units stand in these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.nn.modules import batchnorm, conv
from torch.nn.utils import parametrize, prune


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


def how_computed(module: nn.Module) -> str:
    """Return how a layer computes its weight from other tensors; ``""`` if it does not."""
    if parametrize.is_parametrized(module):
        return "computed by a parametrization"
    if any(isinstance(hook, prune.BasePruningMethod) for hook in _before(module)):
        return "masked: call torch.nn.utils.prune.remove on it first"
    return "computed by a hook" if "weight" in vars(module) else ""


def _before(module: nn.Module) -> Iterable[object]:
    return module._forward_pre_hooks.values()


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
