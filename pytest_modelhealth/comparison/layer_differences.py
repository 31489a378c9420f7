"""How two layers differ in their mode, their settings, and the operations of their code."""

from __future__ import annotations

import math
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_modelhealth.alignment.result import Pair
from pytest_modelhealth.capture.graph_settings import defaults_of, graph_settings
from pytest_modelhealth.comparison.trace import Modules, TwoRuns
from pytest_modelhealth.layers import has_forward, is_quantised
from pytest_modelhealth.report import MEASURED, LayerRecord
from pytest_modelhealth.report.flow.graph import PRODUCTS, SAME, SUMS, Operation

_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_UNTOLD = {"training", "layer_idx", "layer_id", "call_super_init", "dump_patches"}
_DIMENSIONS = {"dim", "start_dim", "end_dim"}
"""Settings that may count from the end."""

_ROUNDED = 1e-6
"""A graph may keep numbers in float32, relative."""


def are_known(pair: Pair, modules: tuple[Modules, Modules]) -> bool:
    """Whether the two layers of a pair have no settings but those that are compared.

    They have where the code of both runs; a graph says a part of them.
    """
    found = [modules[0].get(pair.reference or ""), modules[1].get(pair.candidate or "")]
    if None in found:  # a function: it is of the kind that the model is
        found = [side.get("") for side in modules]
    return all(module is not None and graph_settings(module) is None for module in found)


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
    x = runs.a.observation.layers[pair.reference]
    y = runs.b.observation.layers[pair.candidate]
    host = theirs or runs.modules[1].get("")
    if host is not None and graph_settings(host) is not None:
        yield from _of_graph(x, ours, y, theirs)
    elif ours is not None and theirs is not None:
        yield from _differences(_attributes(ours), _attributes(theirs), x)
    elif x.functional or y.functional:
        yield from _differences(_settings(x, ours), _settings(y, theirs), x, exact=False)


def _of_graph(
    x: LayerRecord, ours: nn.Module | None, y: LayerRecord, theirs: nn.Module | None
) -> Iterator[str]:
    """Yield what the graph of the candidate says differently of a layer of torch, or a function.

    Of a module of the user's own an operator in it says nothing.
    """
    if ours is not None and not type(ours).forward.__module__.startswith("torch.nn."):
        return
    before = _settings(x, ours)
    if before.get("padding_mode", "zeros") != "zeros":  # another operator pads
        del before["padding"]
    now = _settings(y, theirs)
    if isinstance(before.get("padding"), str) and not isinstance(now.get("padding"), str):
        ends = vars(ours)["_reversed_padding_repeated_twice"][::-1]
        begin, end = ends[1::2], ends[::2]
        before["padding"] = tuple(begin) if begin == end else (*begin, *end)
    yield from _differences(before, now, x, exact=False)


def _settings(record: LayerRecord, module: nn.Module | None) -> dict[str, Any]:
    """Return how a layer is set up: the attributes of a module, the arguments of a call."""
    if module is not None:
        said = graph_settings(module)
        return _attributes(module) if said is None else dict(said)
    usual = defaults_of(record.type_name) if record.activation else {}
    return usual | {name: v for name, v in record.options.items() if name not in MEASURED}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the public attributes of a module that are plain values or functions."""
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


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], record: LayerRecord, *, exact: bool = True
) -> Iterator[str]:
    """Yield each setting of both that differs: ``"eps is 1e-12, was 1e-05"``."""
    rank = 0 if record.inputs is None else len(record.inputs.shape)
    for name, ours in before.items():
        theirs = now.get(name, ours)
        if isinstance(ours, _FUNCTIONS) and isinstance(theirs, _FUNCTIONS):
            ours, theirs = ours.__qualname__, theirs.__qualname__
        elif isinstance(ours, _FUNCTIONS) or isinstance(theirs, _FUNCTIONS):
            continue
        if not _are_same(name, ours, theirs, rank, exact):
            yield f"{name} is {_shown(ours, theirs, exact)}, was {ours}"


def _are_same(name: str, x: Any, y: Any, rank: int, exact: bool) -> bool:
    if isinstance(x, list | tuple) or isinstance(y, list | tuple):
        both = [one if isinstance(one, list | tuple) else None for one in (x, y)]
        left, right = both[0] or [x] * len(both[1] or ()), both[1] or [y] * len(both[0] or ())
        same = (_are_same(name, *two, rank, exact) for two in zip(left, right, strict=False))
        return len(left) == len(right) and all(same)
    if not (isinstance(x, int | float) and isinstance(y, int | float)):
        is_left_out = not exact and (x is None or y is None)  # it depends on the batch
        return is_left_out or bool(x == y)
    if name in _DIMENSIONS and rank:
        return bool(x % rank == y % rank)
    is_near = not exact and math.isclose(x, y, rel_tol=_ROUNDED)
    return is_near or bool(x == y) or (x != x and y != y)


def _shown(ours: Any, theirs: Any, exact: bool) -> str:
    """Return the value of a setting as torch has it, without what float32 makes of it."""
    if exact or isinstance(theirs, str):
        return str(theirs)
    if isinstance(theirs, list | tuple):
        return str(tuple(theirs))
    if isinstance(ours, bool):
        return str(bool(theirs))
    return f"{theirs:.7g}" if isinstance(theirs, float) else str(theirs)


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
                name=SAME.get(one.name, one.name),
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
    rewired = [
        (x, y)
        for x, y in zip(before, now, strict=True)
        if (x.name, x.operands) != (y.name, y.operands)
    ]
    if len(rewired) != 1:
        return ""
    ((was, is_),) = rewired
    taken, lost = (
        " and ".join(_named(name, whose) for name in one.operands if name not in other.operands)
        for one, other in ((is_, was), (was, is_))
    )
    if was.name != is_.name or not taken or not lost:
        return ""
    return f"{_function(is_)} takes {taken}, was {lost}{_near_line(is_.line)}"


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
    if "input" in one.operands and len(shown) > 1:
        return f"{_function(one)} with {_named('input', whose)}"
    if len(shown) == 1 and one.name in SUMS | PRODUCTS:
        return f"{_function(one)} of {shown[0]} and a number"
    return f"{_function(one)} of {' and '.join(shown)}" if shown else _function(one)


def _function(one: Operation) -> str:
    if one.name in SUMS:
        return "the sum"
    return "the product" if one.name in PRODUCTS else f"`{one.name}`"


def _named(operand: str, whose: str) -> str:
    """Return what to call an operand: a layer, what was computed, or the layer's input."""
    if operand == "input":
        return f"{whose} input"
    made = operand.strip("`")
    if made == operand:
        return f"`{operand}`"
    return "an earlier sum" if made in SUMS else "a product" if made in PRODUCTS else operand


def _near_line(line: str) -> str:
    """Return a line in brackets, by its file's name alone."""
    path, _, number = line.rpartition(":")
    return f" ({Path(path).name}:{number})" if path else ""
