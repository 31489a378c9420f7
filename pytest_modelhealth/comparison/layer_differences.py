"""How two layers that are the same differ: values, settings, operations of their code, dtypes."""

from __future__ import annotations

import types
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights
from torch.nn.utils.parametrize import is_parametrized

from pytest_modelhealth.alignment.result import Alignment, Pair, listed
from pytest_modelhealth.comparison.counterparts import parameter_names
from pytest_modelhealth.comparison.runs import Modules, Trace, TwoRuns
from pytest_modelhealth.layers import has_forward, is_quantised, own_parameters, type_name
from pytest_modelhealth.operations import having, name_of
from pytest_modelhealth.report import MEASURED, LayerRecord
from pytest_modelhealth.report.flow.graph import Operation
from pytest_modelhealth.settings.setting import is_inside
from pytest_modelhealth.statistics.dense import is_dequantisable, step
from pytest_modelhealth.tolerance import epsilon_of

SAME = 10
"""Weights of one value may differ by so many epsilons: they were folded or parametrised anew."""

FOLDED = 1e-4  # folding rounds in an order of its own, and what is subtracted may cancel

HALF = 0.51
"""Quantised weights are at most half a step from what they were, and rounding makes that more."""


@dataclass(frozen=True)
class Changed:
    """What of a layer has other values, a phrase each."""

    parameters: Mapping[str, str] = field(default_factory=dict)  # the parameters, by name
    # buffers, and parameters of another size, which a layer may not read in full
    others: Mapping[str, str] = field(default_factory=dict)
    are_all_read: bool = False  # whether each parameter of the reference has a counterpart

    @property
    def phrases(self) -> tuple[str, ...]:
        """Both."""
        return *self.parameters.values(), *self.others.values()


def changed_values(runs: TwoRuns, pair: Pair, epsilon: float) -> Changed:
    """Return the parameters and buffers of an aligned layer whose values differ.

    Values that differ by no more than rounding to the candidate's dtype are the same. A weight that
    is made of others is compared in place of those: a pruned one, say, and not what it masks.
    """
    if pair.reference is None or pair.candidate is None:
        return Changed()
    x, y = runs.a.modules.get(pair.reference), runs.b.modules.get(pair.candidate)
    folded = folded_parameters(pair, runs.a.modules)
    if x is None or y is None or folded is None:
        return Changed()
    held = [{**own_parameters(side), **dict(side._buffers.items())} for side in (x, y)]
    names = {name: name for side in held for name in side}
    known = parameter_names(runs, pair.reference, pair.candidate)
    names |= {name: other for name, other in known.items() if _value(x, other) is None}
    epsilon = max(epsilon, FOLDED) if folded else epsilon
    kinds = type_name(x), type_name(y)
    is_own = not type(x).forward.__module__.startswith("torch.nn.")
    may_turn = kinds[0] != kinds[1] and (is_own or bool(kinds[1]))  # a layer of the user's own may
    parameters: dict[str, str] = {}
    others: dict[str, str] = {}
    read = set()
    for name, theirs in names.items():
        own, other = folded.get(name, _value(x, name)), _value(y, theirs)
        if own is None or other is None:
            continue
        read.add(name)
        phrase = "" if own is other else _difference(name, own, other, epsilon, may_turn)
        if phrase:
            is_read = name not in x._buffers and own.numel() == other.numel()
            (parameters if is_read else others)[name] = phrase
    every = {name for name, own in x._parameters.items() if own is not None}
    return Changed(parameters, others, every <= read)


def _value(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer, or a weight that is made of parameters when it is read."""
    held = {**vars(module), **own_parameters(module), **dict(module._buffers.items())}
    found = held.get(name)
    if isinstance(found, Tensor):  # in `vars` by a hook, as of torch's pruning
        return found
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


def _difference(name: str, ours: Tensor, theirs: Tensor, epsilon: float, may_turn: bool) -> str:
    """Return how the values of a tensor differ, ``""`` where they are the same but for rounding."""
    if ours.is_meta or theirs.is_meta:
        return ""
    with torch.no_grad():
        distance = step(theirs)
        x, y = (_dense(tensor.detach()).cpu() for tensor in (ours, theirs))
        if x.dtype == y.dtype and torch.equal(x, y):
            return ""
        if x.numel() != y.numel():
            return f"{name} has shape {tuple(y.shape)}, was {tuple(x.shape)}"
        # a quantised weight is at most half a step from what it was
        steps = (torch.zeros(()) if distance is None else distance.cpu()).expand(y.shape)
        if x.shape != y.shape:
            turns = x.ndim == 2 and x.shape == y.shape[::-1]
            y, steps = (one.T if turns else one.reshape(x.shape) for one in (y, steps))
        slack = max(epsilon, SAME * epsilon_of(x.dtype), epsilon_of(y.dtype))
        wide = torch.complex128 if x.is_complex() else torch.float64
        rounded, x, y = x.to(y.dtype).to(wide), x.to(wide), y.to(wide)
        allowed = slack * x.abs().clamp_min(float(x.abs().square().mean().sqrt())) + HALF * steps
        apart = ((x - y).abs() > allowed) & (rounded != y)
        apart |= x.isnan() != y.isnan()
        count = int(apart.sum())
        is_square = x.ndim == 2 and x.shape == y.T.shape
        is_turned = is_square and bool(((x - y.T).abs() <= allowed).all())
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


def folded_parameters(pair: Pair, reference: Modules) -> Mapping[str, Tensor] | None:
    """Return the weight and bias that a layer has with a batch norm folded in.

    Returns:
        Nothing where what is folded in has no parameters; ``None`` where it is not known.
    """
    host: Any = reference.get(pair.reference or "")
    norms = [reference[name] for name in pair.folded_in if name in reference]
    norms = [module for module in norms if module._parameters or module._buffers]
    if not norms:
        return {}
    norm: Any = norms[0]
    is_linear = isinstance(host, nn.Linear)
    is_known = len(norms) == 1 and isinstance(norm, _BatchNorm) and norm.running_var is not None
    if not is_known or not (is_linear or isinstance(host, nn.modules.conv._ConvNd)):
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


def merged_layers(alignment: Alignment, changed: Mapping[str, Changed]) -> dict[str, list[str]]:
    """Return the layers with other weights beside which layers with weights are no longer called.

    What such a layer gives by itself is another thing than it was; what the module around gives is
    what the two gave together. The names of the layers that are no longer called stand by that of
    the layer, in the reference.
    """
    layers = alignment.reference
    idle = [
        ours.name
        for _, ours, theirs in alignment.aligned
        if ours.parameters and ours.calls and not theirs.calls
    ]
    found: dict[str, list[str]] = {}
    for name, what in changed.items():
        around = name.rpartition(".")[0]
        beside = [other for other in idle if around and is_inside(other, around)]
        if what.parameters and beside and name not in idle and around in layers:
            found |= {name: beside} if layers[around].calls else {}
    return found


_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_UNTOLD = {"training", "layer_idx", "layer_id", "call_super_init", "dump_patches"}
_DIMENSIONS = {"dim", "start_dim", "end_dim"}  # settings that may count from the end


def are_known(pair: Pair, runs: TwoRuns) -> bool:
    """Whether the settings of both layers are attributes, which they are where own code runs."""
    for side, name in ((runs.a, pair.reference), (runs.b, pair.candidate)):
        # of a function that of its model
        module = side.modules.get(name or "") or side.modules.get("")
        # scripted, exported or of ONNX: a graph runs in place of a module's own code
        is_script = module is None or isinstance(module, torch.jit.ScriptModule)
        if is_script or not {"_ty", "graph"}.isdisjoint(vars(module)):
            return False
    return True


def other_settings(pair: Pair, runs: TwoRuns) -> Iterator[str]:
    """Yield in what the modes and settings of the two layers of a pair differ."""
    if pair.reference is None or pair.candidate is None:
        return
    ours, theirs = runs.a.modules.get(pair.reference), runs.b.modules.get(pair.candidate)
    if ours is not None and theirs is not None:
        has_mode = has_forward(theirs) and not is_quantised(theirs)
        has_mode = has_mode and None not in (ours.training, theirs.training)
        if has_mode and ours.training != theirs.training:
            modes = ("training" if one.training else "evaluation" for one in (theirs, ours))
            yield "it is in {} mode, the reference is in {} mode".format(*modes)
    if not are_known(pair, runs):
        return
    x, y = runs.a.layers[pair.reference], runs.b.layers[pair.candidate]
    now = _settings(y, theirs)
    rank = 0 if x.inputs is None else len(x.inputs.shape)
    for name, before in _settings(x, ours).items():
        other = now.get(name, before)
        if not _are_same(name, before, other, rank):
            is_, was = (getattr(one, "__qualname__", one) for one in (other, before))
            yield f"{name} is {is_}, was {was}"


def _settings(record: LayerRecord, module: nn.Module | None) -> dict[str, Any]:
    """Return how a layer is set up: the plain attributes of a module, the arguments of a call."""
    if module is None:
        return {name: v for name, v in record.options.items() if name not in MEASURED}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _UNTOLD
        if _is_plain(value) or issubclass(type(value), _FUNCTIONS)
    }


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return issubclass(type(value), _PLAIN)


def _are_same(name: str, x: Any, y: Any, rank: int) -> bool:
    functions = [isinstance(one, _FUNCTIONS) for one in (x, y)]
    if any(functions):
        return not all(functions) or x.__qualname__ == y.__qualname__
    if name in _DIMENSIONS and rank and isinstance(x, int) and isinstance(y, int):
        return x % rank == y % rank
    if isinstance(x, list | tuple) != isinstance(y, list | tuple):  # an int stands for each
        one, several = (y, x) if isinstance(x, list | tuple) else (x, y)
        return all(one == each for each in several)
    return bool(x == y) or (x != x and y != y)


MOST = 2  # so many operations that are new or gone are named; more are a rewrite


def other_operations(runs: TwoRuns, pair: Pair, label: str, *, backward: bool = False) -> str:
    """Return what became of the operations of a layer's own code, ``""`` where nothing did.

    Of interest backward is only what passes no gradient.
    """
    reference, candidate = runs.a.observation.flow, runs.b.observation.flow
    ours, theirs = pair.reference, pair.candidate
    if reference is None or candidate is None or ours not in reference or theirs not in candidate:
        return ""
    names = {there: here for here, there in runs.alignment.to_candidate.items()}
    before, now = (
        [
            replace(
                one,
                name=name_of(one.name),
                operands=tuple(to.get(name, name) for name in one.operands),
            )
            for one in flow.own_operations(layer or "")
            if one.cuts or not backward
        ]
        for flow, layer, to in ((reference, ours, {}), (candidate, theirs, names))
    )
    gone, new = _without(before, now), _without(now, before)
    if len(gone) > MOST or len(new) > MOST:
        return ""
    changes = [f"{_phrase(one, label)} is gone" for one in gone]
    for one in new:
        path, _, number = one.line.rpartition(":")
        near = f" ({Path(path).name}:{number})" if path else ""
        changes.append(f"{_phrase(one, label)} is new{near}")
    return ", ".join(changes)


def _without(some: Sequence[Operation], others: Sequence[Operation]) -> list[Operation]:
    """Return the operations of one side that the other has fewer of, by their functions.

    Of several of one function, those whose operands the other side's have not.
    """
    left = Counter(one.name for one in some)
    left.subtract(Counter(one.name for one in others))
    known = {(one.name, one.operands) for one in others}
    found = []
    for one in sorted(some, key=lambda one: (one.name, one.operands) in known):
        if left[one.name] > 0:
            left[one.name] -= 1
            found.append(one)
    return [one for one in some if one in found]


def _phrase(one: Operation, layer: str) -> str:
    """Return an operation of a layer's code with what it takes."""
    kinds = {name: trait for trait in ("sum", "product") for name in having(trait)}
    shown = []
    for operand in dict.fromkeys(one.operands):
        made = operand.strip("`")  # quoted where it was computed in the code, too
        word = {"sum": "an earlier sum", "product": "a product"}.get(kinds.get(made, ""), operand)
        own = f"`{layer}`'s input" if operand == "input" else f"`{operand}`"
        shown.append(own if made == operand else word)
    if len(shown) == 1 and one.name in kinds:
        shown.append("a number")
    function = f"the {kinds[one.name]}" if one.name in kinds else f"`{one.name}`"
    return f"{function} of {' and '.join(shown)}" if shown else function


def notes_on_dtypes(runs: TwoRuns) -> Iterator[str]:
    """Yield which layers keep or give numbers of a dtype that they do not on the other side."""
    found: dict[str, list[str]] = defaultdict(list)
    for pair in runs.alignment.pairs:
        if phrase := other_dtypes(pair, runs.a, runs.b):
            found[phrase].append(pair.name or runs.a.observation.model_type)
    for phrase, names in found.items():
        yield f"{listed(names)}: {phrase}"


def other_dtypes(pair: Pair, a: Trace, b: Trace) -> str:
    """Return in what floating dtypes the two layers of a pair differ; ``""`` for in none."""
    if not pair.aligned:
        return ""
    for what, dtypes in (("parameters are", kept_dtypes), ("output is", given_dtypes)):
        ours, theirs = (
            sorted(filter(layer_epsilon, dtypes(trace, name or "")))
            for trace, name in ((a, pair.reference), (b, pair.candidate))
        )
        if ours and theirs and ours != theirs:
            was = "were" if dtypes is kept_dtypes else "was"
            return f"its {what} {' and '.join(theirs)}, {was} {' and '.join(ours)}"
    return ""


def kept_dtypes(trace: Trace, layer: str) -> set[str]:
    """Return the dtypes of a layer's parameters."""
    return {p.dtype for p in trace.observation.layers[layer].parameters.values()}


def given_dtypes(trace: Trace, layer: str) -> set[str]:
    """Return the dtypes of what a layer gives."""
    dtypes = (str(trace.entries[key].dtype) for key in trace.of_role[layer, "activations"])
    return {dtype.removeprefix("torch.") for dtype in dtypes}


def layer_epsilon(dtype: str | torch.dtype) -> float:
    """Return the machine epsilon of a dtype; none for quantised ones, whose steps are measured."""
    name = str(dtype).removeprefix("torch.")
    return 0.0 if name in ("qint8", "quint8") else epsilon_of(name)
