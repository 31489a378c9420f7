"""How two layers differ in their mode, their settings, and the operations of their code."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_modelhealth.alignment.result import Pair
from pytest_modelhealth.comparison.trace import TwoRuns
from pytest_modelhealth.layers import has_forward, is_quantised
from pytest_modelhealth.operations import having, name_of
from pytest_modelhealth.report import MEASURED, LayerRecord
from pytest_modelhealth.report.flow.graph import Operation

_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_UNTOLD = {"training", "layer_idx", "layer_id", "call_super_init", "dump_patches"}
_DIMENSIONS = {"dim", "start_dim", "end_dim"}
"""Settings that may count from the end."""


def are_known(pair: Pair, runs: TwoRuns) -> bool:
    """Whether the settings of both layers are attributes, which they are where own code runs."""
    found = [_module(runs, 0, pair.reference), _module(runs, 1, pair.candidate)]
    return all(module is not None and not _is_graph(module) for module in found)


def _module(runs: TwoRuns, side: int, name: str | None) -> nn.Module | None:
    """Return a module by name; that of the model for a function, which is of its kind."""
    modules = runs.modules[side]
    return modules.get(name or "") or modules.get("")


def _is_graph(module: nn.Module) -> bool:
    """Whether a graph runs in place of a module's own code: scripted, exported or of ONNX."""
    is_script = isinstance(module, torch.jit.ScriptModule)
    return is_script or not {"_ty", "graph"}.isdisjoint(vars(module))


def other_settings(pair: Pair, runs: TwoRuns) -> Iterator[str]:
    """Yield in what the modes and settings of the two layers of a pair differ."""
    if pair.reference is None or pair.candidate is None:
        return
    ours, theirs = runs.modules[0].get(pair.reference), runs.modules[1].get(pair.candidate)
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


MOST = 2
"""So many operations that are new or gone are named; more are a rewrite."""


def other_operations(runs: TwoRuns, pair: Pair, label: str, *, backward: bool = False) -> str:
    """Return what became of the operations of a layer's own code, ``""`` where nothing did.

    Args:
        runs: both runs.
        pair: the layer.
        label: what to call it.
        backward: whether only what passes no gradient is of interest.
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
    whose = f"`{label}`'s"
    if len(gone) > MOST or len(new) > MOST:
        return ""
    if gone or new:
        changes = [f"{_phrase(one, whose)} is gone" for one in gone]
        changes += [f"{_phrase(one, whose)} is new{_near_line(one.line)}" for one in new]
        return ", ".join(changes)
    return ""


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


def _phrase(one: Operation, whose: str) -> str:
    """Return an operation with what it takes; `whose` says whose input ``"input"`` is."""
    shown = [_named(name, whose) for name in dict.fromkeys(one.operands)]
    if len(shown) == 1 and one.name in having("sum", "product"):
        shown.append("a number")
    return f"{_function(one)} of {' and '.join(shown)}" if shown else _function(one)


def _function(one: Operation) -> str:
    if one.name in having("sum"):
        return "the sum"
    return "the product" if one.name in having("product") else f"`{one.name}`"


def _named(operand: str, whose: str) -> str:
    """Return what to call an operand: a layer, what was computed, or the layer's input."""
    if operand == "input":
        return f"{whose} input"
    made = operand.strip("`")
    if made == operand:
        return f"`{operand}`"
    if made in having("sum"):
        return "an earlier sum"
    return "a product" if made in having("product") else operand


def _near_line(line: str) -> str:
    """Return a line in brackets, by its file's name alone."""
    path, _, number = line.rpartition(":")
    return f" ({Path(path).name}:{number})" if path else ""
