"""How two layers that are the same differ: in their values, mode and settings."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pytest_modelhealth.alignment.result import Pair
from pytest_modelhealth.comparison.folded_weights import folded_parameters
from pytest_modelhealth.comparison.links import parameter_names
from pytest_modelhealth.comparison.quantisation import fitted
from pytest_modelhealth.comparison.trace import Trace
from pytest_modelhealth.layers import has_forward, is_quantised, own_parameters
from pytest_modelhealth.report import MEASURED, LayerRecord
from pytest_modelhealth.statistics.quantised import is_dequantisable, step
from pytest_modelhealth.tolerance import epsilon_of

Modules = Mapping[str, nn.Module]

SAME = 10
"""Weights of one value may differ by so many epsilons: they were folded or parametrised anew."""


FOLDED = 1e-4
"""Folding rounds in an order of its own, and what is subtracted may cancel."""

HALF = 0.51
"""Quantised weights are at most half a step from what they were, and rounding makes that more."""


@dataclass(frozen=True)
class Changed:
    """What of a layer has other values, a phrase each.

    Args:
        parameters: the parameters, by name.
        others: buffers, and parameters of another size, which a layer may not read in full.
    """

    parameters: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def phrases(self) -> tuple[str, ...]:
        """Both."""
        return *self.parameters.values(), *self.others.values()


_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype)
_UNTOLD = {"training", "layer_idx", "layer_id", "call_super_init", "dump_patches"}


def other_settings(
    pair: Pair, a: Trace, b: Trace, modules: tuple[Modules, Modules]
) -> Iterator[str]:
    """Yield in what the modes and settings of the two layers of a pair differ."""
    if pair.reference is None or pair.candidate is None:
        return
    ours, theirs = modules[0].get(pair.reference), modules[1].get(pair.candidate)
    if ours is not None and theirs is not None:
        has_mode = has_forward(theirs) and not is_quantised(theirs)
        has_mode = has_mode and None not in (ours.training, theirs.training)
        if has_mode and ours.training != theirs.training:
            yield f"it {_mode(theirs)}, the reference {_mode(ours)}"
        yield from _settings_difference(ours, theirs)
    layers = a.observation.layers[pair.reference], b.observation.layers[pair.candidate]
    yield from _options_difference(*layers)


def _mode(module: nn.Module) -> str:
    return "is in training mode" if module.training else "is in evaluation mode"


def _settings_difference(reference: nn.Module, candidate: nn.Module) -> Iterator[str]:
    """Yield each public attribute of both that differs: ``"eps is 1e-12, was 1e-05"``."""
    theirs = vars(candidate)
    for name, ours in vars(reference).items():
        if name.startswith("_") or name in _UNTOLD or name not in theirs:
            continue
        other = theirs[name]
        if _is_plain(ours) and _is_plain(other):
            if ours != other and not (_is_nan(ours) and _is_nan(other)):
                yield f"{name} is {other}, was {ours}"
        elif _named(ours) != _named(other):
            yield f"{name} is {_named(other)}, was {_named(ours)}"


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return issubclass(type(value), _PLAIN)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _named(value: Any) -> str:
    """Return the name of a function; ``""`` for any other object."""
    if issubclass(type(value), types.FunctionType | types.BuiltinFunctionType):
        return str(value.__qualname__)
    return ""


def _options_difference(x: LayerRecord, y: LayerRecord) -> Iterator[str]:
    if x.functional or y.functional:
        for name, ours in x.options.items():
            if name in y.options and y.options[name] != ours and name not in MEASURED:
                yield f"{name} is {y.options[name]}, was {ours}"


def changed_values(
    pair: Pair, a: Trace, b: Trace, modules: tuple[Modules, Modules], epsilon: float
) -> Changed:
    """Return the parameters and buffers of an aligned layer whose values differ.

    Values that differ by no more than rounding to the candidate's dtype are the same.
    """
    if pair.reference is None or pair.candidate is None:
        return Changed()
    x, y = modules[0].get(pair.reference), modules[1].get(pair.candidate)
    if x is None or y is None:
        return Changed()
    names = _names(parameter_names(pair.reference, pair.candidate, a, b), x, y)
    folded = folded_parameters(pair, modules[0])
    if folded is None:
        return Changed()
    if folded:
        epsilon = max(epsilon, FOLDED)
    buffers = dict(x._buffers.items())
    parameters: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, theirs in names.items():
        own, other = folded.get(name, _value(x, name)), _value(y, theirs)
        if own is None or other is None or own is other:
            continue
        phrase = _values_difference(name, own, other, epsilon)
        if phrase:
            is_read = name not in buffers and own.numel() == other.numel()
            (parameters if is_read else others)[name] = phrase
    return Changed(parameters, others)


def _names(known: Mapping[str, str], x: nn.Module, y: nn.Module) -> dict[str, str]:
    """Return the candidate's name of each parameter, buffer and weight that is made of others.

    Such a weight is compared in place of those: a pruned one, say, and not what it masks.
    """
    stored = *own_parameters(x), *own_parameters(y), *dict(x._buffers.items())
    names = {name: name for name in stored if _value(x, name) is not None}
    by_values = {n: other for n, other in known.items() if _value(x, other) is None}
    return {n: o for n, o in {**names, **by_values}.items() if _value(y, o) is not None}


def _value(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer, or a weight that is made of parameters when it is read."""
    held = {**own_parameters(module), **dict(module._buffers.items())}
    if name in held:
        return held[name]
    if isinstance(made := vars(module).get(name), Tensor):  # by a hook, as of torch's pruning
        return made
    if is_parametrized(module, name) and not module.training:
        with torch.no_grad():
            return getattr(module, name)  # type: ignore[no-any-return]
    return None


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor's values as they lie in a plain one, which comparisons need."""
    if hasattr(tensor, "full_tensor"):  # on several ranks, all of which compare
        tensor = tensor.full_tensor()
    if tensor.is_nested:
        return tensor.values()
    if tensor.is_quantized or is_dequantisable(tensor):
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _values_difference(name: str, ours: Tensor, theirs: Tensor, epsilon: float) -> str:
    if ours.is_meta or theirs.is_meta:
        return ""
    with torch.no_grad():
        distance = step(theirs)
        x, y = (_dense(tensor.detach()).cpu() for tensor in (ours, theirs))
        if x.dtype == y.dtype and torch.equal(x, y):
            return ""
        if x.numel() != y.numel():
            return f"{name} has shape {tuple(y.shape)}, was {tuple(x.shape)}"
        if x.shape != y.shape:
            y = y.T if x.ndim == 2 and x.shape == y.shape[::-1] else y.reshape(x.shape)
        wide = torch.complex128 if x.is_complex() else torch.float64
        rounded, x, y = x.to(y.dtype).to(wide), x.to(wide), y.to(wide)
        slack = max(epsilon, SAME * epsilon_of(ours.dtype))
        least = x.abs().clamp_min(float(x.abs().square().mean().sqrt()))
        allowed = slack * least
        if distance is not None:
            allowed = allowed + HALF * fitted(distance, theirs, x)
        apart = ((x - y).abs() > allowed) & (rounded != y)
        apart |= x.isnan() != y.isnan()
        count = int(apart.sum())
        if not count or (x.ndim == 2 and x.shape[0] == x.shape[1] and torch.equal(x, y.T)):
            return ""
        place = tuple(int(i) for i in apart.nonzero()[0])
        at = f"[{', '.join(map(str, place))}]" if place else ""
        return (
            f"{name} differs in {count:,} of {x.numel():,} values: "
            f"{name}{at} is {y[place].item():.6g}, was {x[place].item():.6g}"
        )
