"""`Layer`: what is kept of one layer while a model runs, and how it is set up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth.report import Option, ZeroSlices
from pytest_modelhealth.report.ranks import Placement
from pytest_modelhealth.statistics import Entry


@dataclass(slots=True, eq=False)
class Layer:
    """One layer: what it is, what its calls took and gave, and why that may be missing.

    Args:
        name: fully qualified name.
        type_name: class of its module, or name of its function.
        roles: the roles that are observed.
        module: its module; ``None`` where it is a function, and when the run is over.
        kind: the class of its module, as the user wrote it; ``None`` where it is a function.
        aliases: further names of the module.
        functional: whether it is a function.
        activation: canonical name of the activation that it is.
        is_torchs_own: whether it is one of torch's own modules that calls no functional layer.
        replays: whether it replays a CUDA graph, which writes to memory without a new version.
        frozen: names of the parameters that required no gradient before the forward.
        opaque: why it cannot be observed, if it cannot.
        unsupported: what kept a tensor of it from being read.
        calls: how often it was called.
        entered, completed: when its first call began and its last call returned.
        seen: what was found in the tensors of its calls, by role.
        own: what was found in its parameters, their gradients and its buffers, by role and name.
        returned_own, returned_input: whether a call returned a tensor of its own; one it was given.
        why_empty: what the call did that returned no tensor.
        requires_grad: whether something that it returned required a gradient.
        grad_off: whether gradients were off when something was returned without one.
        passed_with_graph: whether gradients came in a pass that builds a graph.
        traced: whether it was called while a trace was made.
        place: where the user's code first called it, as in `flow.places`, where that was seen.
        source, options, tied, equal_samples, equal_input_samples: as in `LayerRecord`.
        placements: as in `LayerRecord`.
        zero_slices: as in `LayerRecord`.
        unreached: parameters without a gradient on which no output depends, by name; whether a
            function was given their values all the same.
    """

    name: str
    type_name: str
    roles: frozenset[str]
    module: nn.Module | None = None
    kind: type | None = None
    aliases: tuple[str, ...] = ()
    functional: bool = False
    activation: str | None = None
    is_torchs_own: bool = False
    replays: bool = False
    frozen: frozenset[str] = frozenset()
    opaque: str = ""
    unsupported: str = ""
    calls: int = 0
    entered: int | None = None
    completed: int | None = None
    seen: dict[str, list[Entry]] = field(default_factory=dict)
    own: dict[str, dict[str, Entry]] = field(default_factory=dict)
    returned_own: bool = False
    returned_input: bool = False
    why_empty: str = ""
    requires_grad: bool = False
    grad_off: bool = False
    passed_with_graph: bool = False
    traced: bool = False
    place: tuple[CodeType, int] | None = None
    source: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    unreached: dict[str, bool] = field(default_factory=dict)
    equal_samples: bool | None = None
    equal_input_samples: bool | None = None
    zero_slices: dict[str, ZeroSlices] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name for people."""
        return self.name or self.type_name

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters of its module by their own names."""
        held = {} if self.module is None else self.module._parameters
        return {name: tensor for name, tensor in held.items() if tensor is not None}


Given = tuple[Tensor, int | None, Entry | None]
"""A tensor that a layer was called with, its version then, and what was found if it was read."""

Held = tuple[Layer, str, Tensor]
"""A parameter, a buffer or a gradient: the layer that has it, and its own name there."""


_PLAIN = frozenset({bool, int, float, str})

_POSITIONAL = {
    "alpha_dropout": ("p", "training", "inplace"),
    "celu": ("alpha", "inplace"),
    "dropout": ("p", "training", "inplace"),
    "elu": ("alpha", "inplace"),
    "glu": ("dim",),
    "hardshrink": ("lambd",),
    "hardtanh": ("min_val", "max_val", "inplace"),
    "leaky_relu": ("negative_slope", "inplace"),
    "log_softmax": ("dim",),
    "rrelu": ("lower", "upper", "training", "inplace"),
    "scaled_dot_product_attention": ("key", "value", "attn_mask", "dropout_p", "is_causal"),
    "softmax": ("dim",),
    "softmin": ("dim",),
    "softplus": ("beta", "threshold"),
    "softshrink": ("lambd",),
    "threshold": ("threshold", "value", "inplace"),
}
"""The names of a function's arguments after its input, in order."""

FUNCTIONAL_DROPOUT: dict[Callable[..., Any], str] = {
    F.alpha_dropout: "alpha_dropout",
    F.dropout: "dropout",
    F.dropout1d: "dropout",
    F.dropout2d: "dropout",
    F.dropout3d: "dropout",
    F.feature_alpha_dropout: "alpha_dropout",
    torch.dropout: "dropout",
}
"""Functions whose calls are no layers, but a setting of the module that makes them."""

_DROPOUT_DEFAULTS: dict[Callable[..., Any], dict[str, Option]] = {
    F.alpha_dropout: {"p": 0.5, "training": False},
    F.feature_alpha_dropout: {"p": 0.5, "training": False},
}


def module_options(module: nn.Module) -> dict[str, Option]:
    """Return the plain public attributes of a module: `training`, `eps`, `p`, `num_embeddings`."""
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in _PLAIN and not name.startswith("_")
    }


def call_options(
    function: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Option]:
    """Return the plain arguments of a functional call by name, those left out not among them."""
    named = dict(zip(_POSITIONAL.get(function, ()), args[1:], strict=False)) | dict(kwargs)
    return {
        name: value
        for name, value in named.items()
        if type(value) in _PLAIN and not name.startswith("_")  # _stacklevel is for warnings
    }


def dropout_options(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Option]:
    """Return what a functional dropout says of its caller: `dropout_p` and `dropout_training`."""
    given = call_options(FUNCTIONAL_DROPOUT[call], args, kwargs)
    default = _DROPOUT_DEFAULTS.get(call, {"p": 0.5, "training": True})
    return {f"dropout_{name}": given.get(name, default[name]) for name in ("p", "training")}


def most_dropped(known: Mapping[str, Option], now: Mapping[str, Option]) -> Mapping[str, Option]:
    """Return which of two calls of functional dropout drops more, the later one of equals.

    Args:
        known: the options of a layer, with those of an earlier call or none.
        now: what the later call says.
    """
    return now if _dropped(now) >= _dropped(known) else {}


def _dropped(options: Mapping[str, Option]) -> float:
    rate = options.get("dropout_p")
    is_on = options.get("dropout_training") is True
    return float(rate) if is_on and isinstance(rate, int | float) else 0.0
