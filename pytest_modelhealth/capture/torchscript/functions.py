"""Which function of torch an operator of TorchScript is, and which layer it makes by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from pytest_modelhealth.capture.deployed.program import activation_called, operator
from pytest_modelhealth.layers import FUNCTIONAL_LAYERS


@dataclass(frozen=True, slots=True)
class ParametricLayer:
    """What a layer is that one operator makes up.

    Args:
        kind: its class.
        tensors: the places of its parameters and buffers among the operator's inputs, and their
            names.
    """

    kind: type[nn.Module]
    tensors: Mapping[int, str]

    @property
    def type_name(self) -> str:
        """The qualified name of its class."""
        return f"{self.kind.__module__}.{self.kind.__qualname__}"


BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""The own names of tensors that are no parameters."""

_AFTER_INPUT = {1: "weight", 2: "bias"}
_OF_NORM = {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}
_LAYERS = {
    "linear": ParametricLayer(nn.Linear, _AFTER_INPUT),
    "matmul": ParametricLayer(nn.Linear, _AFTER_INPUT),
    "bilinear": ParametricLayer(nn.Bilinear, {2: "weight", 3: "bias"}),
    "conv1d": ParametricLayer(nn.Conv1d, _AFTER_INPUT),
    "conv2d": ParametricLayer(nn.Conv2d, _AFTER_INPUT),
    "conv3d": ParametricLayer(nn.Conv3d, _AFTER_INPUT),
    "conv_transpose1d": ParametricLayer(nn.ConvTranspose1d, _AFTER_INPUT),
    "conv_transpose2d": ParametricLayer(nn.ConvTranspose2d, _AFTER_INPUT),
    "conv_transpose3d": ParametricLayer(nn.ConvTranspose3d, _AFTER_INPUT),
    "batch_norm": ParametricLayer(nn.BatchNorm1d, _OF_NORM),
    "instance_norm": ParametricLayer(nn.InstanceNorm1d, _OF_NORM),
    "layer_norm": ParametricLayer(nn.LayerNorm, {2: "weight", 3: "bias"}),
    "rms_norm": ParametricLayer(nn.RMSNorm, {2: "weight"}),
    "group_norm": ParametricLayer(nn.GroupNorm, {2: "weight", 3: "bias"}),
    "embedding": ParametricLayer(nn.Embedding, {0: "weight"}),
    "embedding_bag": ParametricLayer(nn.EmbeddingBag, {0: "weight"}),
    "prelu": ParametricLayer(nn.PReLU, {1: "weight"}),
    "lstm": ParametricLayer(nn.LSTM, {}),
    "gru": ParametricLayer(nn.GRU, {}),
}
_TAKES_MORE = frozenset({"prelu", "threshold"})
"""Functional layers that cannot be called with their input alone."""


def function_name(kind: str, weight_dimensions: int = 0, transposed: bool = False) -> str:
    """Return the name of the function that an operator computes: ``aten::relu_`` is ``relu``.

    Args:
        kind: the operator.
        weight_dimensions: number of dimensions of its second input where that is a constant.
        transposed: whether it is a transposed convolution, which the operator's name does not say.
    """
    name = kind.partition("::")[2]
    if name in ("_convolution", "mkldnn_convolution", "convolution"):
        stem = "conv_transpose" if transposed else "conv"
        return f"{stem}{weight_dimensions - 2}d" if weight_dimensions > 2 else name
    return name if name.startswith("__") else name.rstrip("_")


@cache
def function_called(name: str) -> Any:
    """Return the functional layer of this name, or an operator where the function is none."""
    function = None if name in _TAKES_MORE else activation_called(name)
    return function if function in FUNCTIONAL_LAYERS else operator(name)


def parametric_layer(name: str) -> ParametricLayer | None:
    """Return the layer that a function makes up by itself, if it has parameters."""
    return _LAYERS.get(name)


def recurrent_names(count: int, layers: int, both_ways: bool) -> list[str]:
    """Return the names of the parameters of an LSTM or GRU in the order of its operator."""
    directions = 2 if both_ways else 1
    each = count // max(layers * directions, 1)
    stems = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"][: 4 if each >= 4 else 2]
    stems += ["weight_hr"] if each in (3, 5) else []
    suffixes = [f"_l{at}{end}" for at in range(layers) for end in ("", "_reverse")[:directions]]
    return [stem + suffix for suffix in suffixes for stem in stems]
