"""How two layers that are the same differ in their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pytest_modelhealth.alignment.result import Pair
from pytest_modelhealth.comparison.folded_weights import folded_parameters
from pytest_modelhealth.comparison.links import parameter_names
from pytest_modelhealth.comparison.quantisation import fitted
from pytest_modelhealth.comparison.trace import Trace
from pytest_modelhealth.layers import own_parameters, type_name
from pytest_modelhealth.statistics.dense import is_dequantisable, step
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
        are_all_read: whether each parameter of the reference has a counterpart.
    """

    parameters: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    are_all_read: bool = False

    @property
    def phrases(self) -> tuple[str, ...]:
        """Both."""
        return *self.parameters.values(), *self.others.values()


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
    kinds = type_name(x), type_name(y)
    is_own = not type(x).forward.__module__.startswith("torch.nn.")
    may_turn = kinds[0] != kinds[1] and (is_own or bool(kinds[1]))  # a layer of the user's own may
    parameters: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, theirs in names.items():
        own, other = folded.get(name, _value(x, name)), _value(y, theirs)
        if own is None or other is None or own is other:
            continue
        phrase = _values_difference(name, own, other, epsilon, may_turn)
        if phrase:
            is_read = name not in buffers and own.numel() == other.numel()
            (parameters if is_read else others)[name] = phrase
    every = {name for name, own in x._parameters.items() if own is not None}
    return Changed(parameters, others, every <= names.keys())


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


def _values_difference(
    name: str, ours: Tensor, theirs: Tensor, epsilon: float, may_turn: bool
) -> str:
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
        is_turned = (
            x.ndim == 2 and x.shape == y.T.shape and bool(((x - y.T).abs() <= allowed).all())
        )
        if not count or (is_turned and may_turn):
            return ""
        if is_turned:
            return f"{name} is transposed"
        place = tuple(int(i) for i in apart.nonzero()[0])
        at = f"[{', '.join(map(str, place))}]" if place else ""
        return (
            f"{name} differs in {count:,} of {x.numel():,} values: "
            f"{name}{at} is {y[place].item() + 0:.6g}, was {x[place].item() + 0:.6g}"
        )
