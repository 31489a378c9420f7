"""Turns the layers of a run into records: their statistics, and what became of each."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from operator import attrgetter
from types import FunctionType
from typing import Any

from torch import nn

from pytest_modelhealth.capture.observing.flow.rows import line_of
from pytest_modelhealth.capture.observing.function_mode import FunctionalLayers
from pytest_modelhealth.capture.observing.layer import Layer, Own
from pytest_modelhealth.capture.observing.recorder import Recorder
from pytest_modelhealth.layers import ATTENTION, has_forward
from pytest_modelhealth.report import Definition, LayerRecord, LayerRecords, Option, Status
from pytest_modelhealth.report.observation import ROLES
from pytest_modelhealth.settings.setting import ancestors
from pytest_modelhealth.statistics import Entry


def definitions(kind: type) -> tuple[Definition, ...]:
    """Return where the ``class`` statement of `kind` may stand, the likeliest first.

    A class whose functions do not say that they were written in it may have been made by a call,
    as torch makes those of parametrized and sharded modules; the classes that it derives from
    follow, up to one that was certainly written.
    """
    places = []
    for base in kind.__mro__:
        if base is nn.Module or not issubclass(base, nn.Module):
            break
        # not what a decorator put around a function, nor what one or a compiler made
        codes = (value.__code__ for value in vars(base).values() if type(value) is FunctionType)
        name = base.__qualname__
        code = next((c for c in codes if c.co_qualname.rpartition(".")[0] == name), None)
        if code is not None:
            line = code.co_firstlineno
            places.append(Definition(base.__module__, name, code.co_filename, line))
            break
        path = getattr(sys.modules.get(base.__module__), "__file__", None)
        places.append(Definition(base.__module__, name, path or "", 0))
    return tuple(places)


def layer_records(
    recorder: Recorder, *, backward: bool, functions: FunctionalLayers | None = None
) -> LayerRecords:
    """Return the record of every layer of a run, in execution order, those never called last.

    `functions` saw which parameters functions were given, where those are seen.
    """
    layers = recorder.layers.values()
    in_order = sorted([lyr for lyr in layers if lyr.calls], key=attrgetter("entered"))
    in_order += [layer for layer in layers if not layer.calls]
    by_name = {layer.name: layer for layer in in_order}
    reasons = _reasons_why_not_called(recorder, in_order, functions)
    defined: dict[type, tuple[Definition, ...]] = {}
    own: dict[str, dict[Layer, dict[str, Entry]]] = {}  # by role

    def make(name: str) -> LayerRecord:
        layer = by_name[name]
        if layer.holds and not own:  # for the first of them, of all
            for role, found in recorder.own.items():
                held = own[role] = {}
                for holder, parameter, entry in zip(*found, strict=True):
                    if entry is not None:
                        held.setdefault(holder, {})[parameter] = entry
        kind, became = layer.kind, reasons.get(layer) or _status(layer, backward)
        if kind is not None and kind not in defined:
            defined[kind] = definitions(kind)
        values: dict[str, Any] = {role: layer.statistics(role) for role in _OF_CALLS}
        for role in _OF_ITS_OWN:
            entries = own[role].get(layer) if layer.holds and role in own else None
            values[role] = {n: e.statistics for n, e in entries.items()} if entries else {}
        values["definitions"] = () if kind is None else defined[kind]
        return _record(layer, became, values)

    return LayerRecords(by_name, make)


def _record(layer: Layer, became: tuple[Status, str], seen: dict[str, Any]) -> LayerRecord:
    record = object.__new__(LayerRecord)
    # the constructor of a frozen data class sets field by field, at half of all the cost
    values = vars(record)
    values.update(zip(_AS_THEY_ARE, _as_they_are(layer), strict=True))
    values.update(
        seen,
        status=became[0],
        reason=became[1],
        unreached=frozenset(layer.unreached),
        read_in_vain=frozenset([name for name, is_read in layer.unreached.items() if is_read]),
        nonfinite_calls=_nonfinite_calls(layer, seen),
        watched=layer.roles,
        source=layer.source or line_of(layer.place),
        options=dict(layer.options) | (_scores(layer) if layer.functional else {}),
        tied=dict(layer.tied) if layer.tied else {},  # most have none
        zero_slices=dict(layer.zero_slices) if layer.zero_slices else {},
        placements=dict(layer.placements) if layer.placements else {},
        largest={},
        nonfinite={},
        ill_ranks={},
    )
    return record


_OF_CALLS, _OF_ITS_OWN = ROLES[:3], ROLES[3:]
_OWN = {"options", "placements", "source", "tied", "unreached", "zero_slices"}
_AS_THEY_ARE = [*({f.name for f in fields(Layer)} & {f.name for f in fields(LayerRecord)} - _OWN)]
"""What is known of a layer under the same name while it runs and after."""
_as_they_are = attrgetter(*_AS_THEY_ARE)


def _nonfinite_calls(layer: Layer, merged: Mapping[str, Any]) -> dict[str, int]:
    """Return in which call each role first held a NaN or positive infinity.

    What was merged, or differs in number from call to call, does not tell.
    """
    first = {}
    for role in ("inputs", "activations"):
        if merged[role] is None or not merged[role].nonfinite_count:
            continue
        entries = layer.entries(role)
        per_call, rest = divmod(len(entries), max(layer.calls, 1))
        for index, entry in enumerate(entries if per_call and not rest else ()):
            if entry.statistics.nan_count + entry.statistics.positive_inf_count:
                first[role] = index // per_call
                break
    return first


def _scores(layer: Layer) -> dict[str, Option]:
    """Return what the operands of fused attention say of the scores, which are never in memory.

    ``typical_score`` is the root mean square of the products of independent queries and keys.
    """
    operands = layer.entries("inputs")[:3]
    if layer.type_name != ATTENTION or len(operands) < 3:
        return {}
    query, key, value = (entry.statistics for entry in operands)
    width = query.shape[-1] if query.shape else 1
    scale = layer.options.get("scale", width**-0.5)
    factor = scale if isinstance(scale, float) else width**-0.5
    return {
        "typical_score": query.rms * key.rms * width**0.5 * abs(factor),
        "value_std": value.std,
        "keys": key.shape[-2] if len(key.shape) > 1 else 1,
    }


# What became of a layer that was called.

_TRACED = "torch.jit.trace wrote it down; what ran then is a script, which calls no hooks"


def _status(layer: Layer, backward: bool) -> tuple[Status, str]:
    if layer.opaque:
        return Status.OPAQUE, layer.opaque
    if layer.traced and not layer.requires_grad:  # a trace is checked without gradients
        return Status.OPAQUE, _TRACED
    if layer.unsupported:
        return Status.UNSUPPORTED, layer.unsupported
    if not (layer.returned_own or layer.returned_input):
        why = layer.why_empty or "its output holds no floating-point tensor"
        return Status.UNSUPPORTED, why
    if not layer.returned_own:
        return Status.ALIAS_OF_INPUT, "it returned its own input, whose gradient is not its alone"
    if backward and "gradients" in layer.roles and "gradients" not in layer.seen:
        if layer.passed_with_graph:
            return Status.UNSUPPORTED, "gradients came only with create_graph=True: not the loss's"
        if layer.requires_grad:
            return Status.UNUSED_IN_LOSS, "its output requires a gradient but none came back"
        return Status.NO_GRAD_PATH, "its output does not require a gradient"
    return Status.OBSERVED, ""


# Why a layer was not called, and whether it ran where nothing shows it.

_BY_UNSEEN_CODE = (
    "a script, compiled code or an autograd function of the user's own, where no hook is called"
)


def _reasons_why_not_called(
    recorder: Recorder, layers: list[Layer], functions: FunctionalLayers | None
) -> dict[Layer, tuple[Status, str]]:
    uncalled = [layer for layer in layers if not layer.calls]
    if not uncalled:
        return {}
    used: dict[Layer, list[str]] = {}  # parameters with a gradient
    own = recorder.own.get("parameter_gradients", Own())
    for (layer, name), entry in zip(own.places(), own.entries, strict=True):
        if entry is not None:
            used.setdefault(layer, []).append(name)
    owners: dict[int, Layer] = {}  # by the id of a parameter, the first layer with it that ran
    for layer in layers:
        for parameter in layer.parameters.values() if layer.calls else ():
            owners.setdefault(id(parameter), layer)
    opaque = {layer: layer.opaque or (_TRACED if layer.traced else "") for layer in uncalled}
    if functions is not None:
        _add_out_of_sight(opaque, used, {*owners, *functions.read})
        _add_containers_out_of_sight(opaque, layers)
    readers = {} if functions is None else functions.readers
    return {
        layer: (Status.OPAQUE, why)
        if why
        else _why_not_called(layer, layer in used, owners, readers)
        for layer, why in opaque.items()
    }


def _why_not_called(
    layer: Layer, is_used: bool, owners: Mapping[int, Layer], readers: Mapping[int, str]
) -> tuple[Status, str]:
    if not has_forward(layer.module):
        holds = "it only holds other layers"
        if not isinstance(layer.module, nn.ModuleList | nn.ModuleDict):
            holds = "it holds others, or other methods of it are used, unseen"
        return Status.NOT_CALLED, f"it has no forward: {holds}"
    tied = next((owners[id(p)] for p in layer.parameters.values() if id(p) in owners), None)
    if tied is not None:
        why = f"it was never called; {tied.label!r}, tied to its parameters, was"
        return Status.NOT_CALLED, why
    read = {n: readers[id(p)] for n, p in layer.parameters.items() if id(p) in readers}
    if read:
        by = " and ".join(f"`{name}`" for name in dict.fromkeys(read.values()))
        what = f"{by} read its {' and '.join(read)}"
        why = f"it was never called; {what}, in its own .forward() or in the code around it"
        return Status.PARAMETERS_READ, why
    if is_used:
        return Status.PARAMETERS_READ, (
            "it was never called, yet its parameters were used: by .forward(), by a copy, a graph "
            "or compiled code made of it, or read directly"
        )
    return Status.NOT_CALLED, "it was never called in this batch"


def _add_out_of_sight(
    opaque: dict[Layer, str], used: Mapping[Layer, list[str]], known: Collection[int]
) -> None:
    """Tell layers that ran all the same where nothing shows it.

    Their parameters got gradients, but no function that was called from Python was given them.
    """
    for layer, why in opaque.items():
        parameters = [layer.parameters.get(name) for name in used.get(layer, ())]
        hidden = any(type(p) is nn.Parameter and id(p) not in known for p in parameters)
        if hidden and not why and has_forward(layer.module):
            opaque[layer] = f"it was never called; its parameters were used by {_BY_UNSEEN_CODE}"


def _add_containers_out_of_sight(opaque: dict[Layer, str], layers: list[Layer]) -> None:
    """Take what is around layers that ran out of sight, and what stands among them, for the same.

    A layer that could have a gradient, and has none, was left out.
    """
    around = {layer: set(ancestors(layer.name)) - {""} for layer in layers}
    hidden = {name for layer, why in opaque.items() if why for name in around[layer]}
    called = {name for layer in layers if layer.calls for name in around[layer]}
    open_ = [lyr for lyr, why in opaque.items() if not why and has_forward(lyr.module)]
    containers = {layer.name for layer in open_} & (hidden - called)
    for layer in open_:
        if layer.name in containers:
            opaque[layer] = f"it was never called; what it holds was run by {_BY_UNSEEN_CODE}"
        elif containers & around[layer] and layer.frozen.issuperset(layer.parameters):
            opaque[layer] = f"it was never called; what is around it was run by {_BY_UNSEEN_CODE}"
