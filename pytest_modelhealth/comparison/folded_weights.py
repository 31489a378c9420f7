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
    norm = _only_norm(_folded(pair, reference))
    if norm is None:
        return None
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
    norm, is_linear = _only_norm(norms), isinstance(host, nn.Linear)
    if norm is None or not (is_linear or isinstance(host, nn.modules.conv._ConvNd)):
        return None
    mean, variance = norm.running_mean, norm.running_var
    weight = norm.weight if norm.affine else torch.ones_like(mean)
    bias = norm.bias if norm.affine else torch.zeros_like(mean)
    args = host.weight, host.bias, mean, variance, norm.eps, weight, bias
    with torch.no_grad():
        if is_linear:
            folded = fuse_linear_bn_weights(*args)
        else:
            folded = fuse_conv_bn_weights(*args, host.transposed)
    return {name: one.detach() for name, one in zip(("weight", "bias"), folded, strict=True)}


def _only_norm(folded: list[nn.Module]) -> Any:
    """Return the one batch norm with statistics that is folded in, ``None`` for anything else."""
    is_norm = len(folded) == 1 and isinstance(folded[0], _BatchNorm)
    return folded[0] if is_norm and folded[0].running_var is not None else None


def _folded(pair: Pair, reference: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the modules with parameters or buffers that are folded into a layer."""
    if not isinstance(pair.reason, Fold) or pair.is_folded:
        return []
    modules = [reference[name] for name in pair.reason.layers if name in reference]
    return [module for module in modules if module._parameters or module._buffers]
