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
_DIMENSIONS = {"dim", "start_dim", "end_dim"}  # settings that may count from the end


def are_known(pair: Pair, runs: TwoRuns) -> bool:
    """Whether the settings of both layers are attributes, which they are where own code runs."""
    for modules, name in zip(runs.modules, (pair.reference, pair.candidate), strict=True):
        module = modules.get(name or "") or modules.get("")  # of a function that of its model
        # scripted, exported or of ONNX: a graph runs in place of a module's own code
        is_script = module is None or isinstance(module, torch.jit.ScriptModule)
        if is_script or not {"_ty", "graph"}.isdisjoint(vars(module)):
            return False
    return True


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
