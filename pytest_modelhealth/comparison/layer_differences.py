"""How two layers differ in their mode, their settings, and the operations of their code."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pytest_modelhealth.alignment.result import Pair
from pytest_modelhealth.capture.graph_settings import IMPLIED, defaults_of, graph_settings
from pytest_modelhealth.comparison.trace import Trace
from pytest_modelhealth.layers import has_forward, is_quantised
from pytest_modelhealth.report import MEASURED, Flow, LayerRecord
from pytest_modelhealth.report.flow.differences import (
    function,
    near_line,
    phrase,
    rewired,
    spelt,
    taken,
    without,
)

Modules = Mapping[str, nn.Module]

_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype)
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
    x, y = a.observation.layers[pair.reference], b.observation.layers[pair.candidate]
    host = theirs or modules[1].get("")
    if host is not None and graph_settings(host) is not None:
        yield from _of_graph(x, ours, y, theirs)
    elif ours is not None and theirs is not None:
        yield from _differences(_attributes(ours), _attributes(theirs), x)
    elif x.functional or y.functional:
        yield from _differences(_settings(x, ours), _settings(y, theirs), x, exact=False)


def _mode(module: nn.Module) -> str:
    return "is in training mode" if module.training else "is in evaluation mode"


def _of_graph(
    x: LayerRecord, ours: nn.Module | None, y: LayerRecord, theirs: nn.Module | None
) -> Iterator[str]:
    """Yield what the graph of the candidate says differently of a layer of torch, or a function.

    Of a module of the user's own an operator in it says nothing.
    """
    if ours is not None and not type(ours).forward.__module__.startswith("torch.nn."):
        return
    before = {**IMPLIED.get(x.activation or x.type_name, {}), **_settings(x, ours)}
    if before.get("padding_mode", "zeros") != "zeros":  # another operator pads
        del before["padding"]
    now = _settings(y, theirs)
    if isinstance(theirs, torch.jit.ScriptModule):  # a script keeps attributes, a trace none
        now |= {name: getattr(theirs, name) for name in before if hasattr(theirs._c, name)}
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
    """Return the public attributes of a module, functions by their names."""
    return {
        name: value if _is_plain(value) else _Function(_named(value))
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _UNTOLD
    }


class _Function(str):
    """The name of a function."""

    __slots__ = ()


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], record: LayerRecord, *, exact: bool = True
) -> Iterator[str]:
    """Yield each setting of both that differs: ``"eps is 1e-12, was 1e-05"``."""
    rank = 0 if record.inputs is None else len(record.inputs.shape)
    for name, ours in before.items():
        if name not in now or isinstance(ours, _Function) is not isinstance(now[name], _Function):
            continue
        theirs = now[name]
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


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return issubclass(type(value), _PLAIN)


def _named(value: Any) -> str:
    """Return the name of a function; ``""`` for any other object."""
    if issubclass(type(value), types.FunctionType | types.BuiltinFunctionType):
        return str(value.__qualname__)
    return ""


MOST = 2
"""So many operations that are new or gone are named; more are a rewrite."""


@dataclass(frozen=True)
class Operations:
    """The operations of both models, layer by layer.

    Args:
        reference: the flow of the reference; ``None`` where none was recorded.
        candidate: that of the candidate.
        names: the name in the reference of each aligned layer of the candidate.
    """

    reference: Flow | None
    candidate: Flow | None
    names: Mapping[str, str]

    def change(self, ours: str, theirs: str, label: str, *, backward: bool = False) -> str:
        """Return what became of the operations of a layer's own code, ``""`` where nothing did.

        Args:
            ours: name of the layer in the reference.
            theirs: name of the layer in the candidate.
            label: what to call it.
            backward: whether only what passes no gradient is of interest.
        """
        if self.reference is None or self.candidate is None:
            return ""
        if ours not in self.reference or theirs not in self.candidate:
            return ""
        whose = f"`{label}`'s"
        before = [spelt(one) for one in self.reference.own_operations(ours)]
        renamed = (
            replace(one, operands=tuple(self.names.get(name, name) for name in one.operands))
            for one in self.candidate.own_operations(theirs)
        )
        now = list(map(spelt, renamed))
        if backward:
            before, now = ([one for one in side if one.cuts] for side in (before, now))
        gone, new = without(before, now), without(now, before)
        if not gone and not new:
            pair = rewired(before, now)
            if not pair:
                return ""
            was, is_ = pair
            takes = f"takes {taken(is_, was, whose)}, was {taken(was, is_, whose)}"
            return f"{function(is_)} {takes}{near_line(is_.line)}"
        if len(gone) > MOST or len(new) > MOST:
            return ""
        changes = [f"{phrase(one, whose)} is gone" for one in gone]
        changes += [f"{phrase(one, whose)} is new{near_line(one.line)}" for one in new]
        return ", ".join(changes)
