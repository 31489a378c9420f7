"""How modules and calls are set up: the plain numbers, switches and words that checks read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth.report import Option

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
