"""The weights that a layer has once the batch norm after it is folded in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from pytest_modelhealth.alignment.result import Fold, Pair


def scale_of_folding(pair: Pair, reference: Mapping[str, nn.Module]) -> Tensor | None:
    """Return what each output channel of a layer is multiplied by where a batch norm is folded in.

    Args:
        pair: the layer.
        reference: the modules of the reference by name.
    """
    norms = _folded(pair, reference)
    if len(norms) != 1 or not _has_statistics(norms[0]):
        return None
    norm: Any = norms[0]
    scale: Tensor = (norm.running_var.detach() + norm.eps).rsqrt()
    return scale * norm.weight.detach() if norm.affine else scale


def folded_parameters(
    pair: Pair, reference: Mapping[str, nn.Module]
) -> Mapping[str, Tensor] | None:
    """Return the weight and bias that a layer has with a batch norm folded in.

    Returns:
        Nothing where what is folded in has no parameters; ``None`` where it is not known.
    """
    host: Any = reference.get(pair.reference or "")
    norms = _folded(pair, reference)
    if not norms:
        return {}
    is_linear = isinstance(host, nn.Linear)
    if len(norms) > 1 or not (is_linear or isinstance(host, nn.modules.conv._ConvNd)):
        return None
    norm: Any = norms[0]
    if not _has_statistics(norm):
        return None
    args = host.weight, host.bias, norm.running_mean, norm.running_var, norm.eps
    with torch.no_grad():
        if is_linear:
            folded = fuse_linear_bn_weights(*args, norm.weight, norm.bias)
        else:
            folded = fuse_conv_bn_weights(*args, norm.weight, norm.bias, host.transposed)
    return {name: one.detach() for name, one in zip(("weight", "bias"), folded, strict=True)}


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_var is not None


def _folded(pair: Pair, reference: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the modules with parameters or buffers that are folded into a layer."""
    if not isinstance(pair.reason, Fold) or pair.is_folded:
        return []
    modules = [reference[name] for name in pair.reason.layers if name in reference]
    return [module for module in modules if module._parameters or module._buffers]
