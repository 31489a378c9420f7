"""The weights that a layer has once the batch norm after it is folded in."""

from __future__ import annotations

from collections.abc import Mapping

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
    norm = _norm(pair, reference)
    if norm is None or norm.running_var is None:
        return None
    scale = (norm.running_var.detach() + norm.eps).rsqrt()
    return scale if norm.weight is None else scale * norm.weight.detach()


def folded_parameters(pair: Pair, reference: Mapping[str, nn.Module]) -> dict[str, Tensor] | None:
    """Return the weight and bias of a layer with the batch norm folded in; ``None`` for none."""
    norm, host = _norm(pair, reference), reference.get(pair.reference or "")
    if norm is None or norm.running_mean is None or norm.running_var is None:
        return None
    args = host.weight, host.bias, norm.running_mean, norm.running_var, norm.eps
    weight, bias = norm.weight, norm.bias
    with torch.no_grad():
        if isinstance(host, nn.Linear):
            folded = fuse_linear_bn_weights(*args, weight, bias)
        elif isinstance(host, nn.modules.conv._ConvNd):
            folded = fuse_conv_bn_weights(*args, weight, bias, host.transposed)
        else:
            return None
    return {name: one.detach() for name, one in zip(("weight", "bias"), folded, strict=True)}


def _norm(pair: Pair, reference: Mapping[str, nn.Module]) -> _BatchNorm | None:
    """Return the one batch norm that is folded into a layer."""
    if not isinstance(pair.reason, Fold) or pair.is_folded:
        return None
    norms = [
        module
        for name in pair.reason.layers
        if isinstance(module := reference.get(name), _BatchNorm)
    ]
    return norms[0] if len(norms) == 1 else None
