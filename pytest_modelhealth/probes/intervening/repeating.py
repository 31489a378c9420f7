"""Calls of a model in a row, and what one leaves behind for the next."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.isolation import random_state, restore_random_state
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.probes.conventions import Found, UntellableError
from pytest_modelhealth.probes.intervening.batches import named_inputs, rolled
from pytest_modelhealth.probes.intervening.differences import largest
from pytest_modelhealth.probes.intervening.locating import parting_at, where_seeds_part
from pytest_modelhealth.probes.intervening.running import Ran, Runs
from pytest_modelhealth.report import Parting

_SEED = 20_240_229
_MOVED = 1e-4
"""`Embedding(max_norm=...)` moves its rows by rounding from call to call, which is less."""
_DROPOUTS = frozenset(
    {"dropout", "bernoulli", "alpha_dropout", "feature_dropout", "native_dropout"}
)
_CONTAINERS = (list, deque, dict, set)
_LEAST = 1e-6


def what_calls_change(runs: Runs) -> Found:
    """Return what another seed and a call before change, and what calls leave behind.

    The model is called on another batch, then on the usual one, and then with another seed, without
    being put back between: what it keeps of the other batch shows.

    Raises:
        UntellableError: the model raises, or returns no tensor.
    """
    base = runs.base
    if not base.outputs:
        raise UntellableError("the model returns no tensor to hold against another run's")
    calls = (rolled(runs), None), (runs.batch(), None), (runs.batch(), _SEED)
    (_, again, other), left = _called_in_a_row(runs, *calls)
    if _differ(base, again):
        other = runs.forward(runs.batch(), seed=_SEED)
    if left and _differ(base, other):  # which may be by the random numbers alone
        _, left = _called_in_a_row(runs, (runs.batch(), None), (runs.batch(), None))
    if error := again.error or other.error:
        raise UntellableError(f"called again, the model raises {error}", "the call, repeated")
    states = [one for one in left if one.kind == "state"][:1]
    found = largest(base.outputs, again.outputs)
    if found is not None and found.effect > 0.0:
        of = states[0] if states else Parting("again", 0.0)
        place, numbers = str(found.place), (found.before, found.after)
        at_output = Parting("again", found.effect, of.layer, "activations", "", place, *numbers)
        states = [replace(at_output, detail=of.detail)]
    partings = [*_by_seed(runs, other), *states]
    partings += [p for p in left if p.kind == "parameters" and p.effect > _MOVED][:1]
    if base.wrote:
        named = named_inputs(runs)
        detail = ", ".join(f"input {named[number]!r}" for number in base.wrote)
        partings.append(Parting("batch", 1.0, role="inputs", detail=detail))
    return Found("the seed, and the call before", partings)


def _by_seed(runs: Runs, other: Ran) -> list[Parting]:
    """Return what another seed changes: by a dropout, or by other noise."""
    found = largest(runs.base.outputs, other.outputs)
    if found is None or not found.effect > 0.0 or not runs.is_steady:
        return []
    place, kind = where_seeds_part(runs, (runs.batch(), runs.batch()), _SEED), "noise"
    if place is not None:
        record = place.record
        name, options = record.type_name.lower(), record.options
        is_called = bool(options.get("dropout_p") and options.get("dropout_training", True))
        steps = {step.rstrip("_") for step in place.parting.between}
        if "dropout" in name or "droppath" in name or is_called or steps & _DROPOUTS:
            kind = "dropout"
    return [parting_at(kind, found, place)]


def _called_in_a_row(
    runs: Runs, *calls: tuple[Inputs, int | None]
) -> tuple[list[Ran], list[Parting]]:
    """Call the model without putting it back between; return also what the last call changes.

    Args:
        runs: has the model.
        calls: batches, each with the seed of its random numbers; ``None`` takes the usual ones.
    """
    ran = [Ran() for _ in calls]
    with runs.kept([(b.args, b.kwargs) for b, _ in calls], evaluation=True):
        usual, before = random_state(), dict[tuple[str, str, str], Any]()
        for one, (batch, seed) in zip(ran, calls, strict=True):
            if one is ran[-1]:
                before = _held(runs)
            restore_random_state(usual)
            runs.take(batch, one, seed=seed)
        return ran, _changes(before, _held(runs))


def _differ(one: Ran, other: Ran) -> bool:
    pairs = zip(one.outputs, other.outputs, strict=False)
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)


def _held(runs: Runs) -> dict[tuple[str, str, str], Any]:
    """Return what a model keeps, by layer, kind and own name.

    It is floating buffers and attributes, lengths of containers, and norms of parameters.
    """
    held: dict[tuple[str, str, str], Any] = {}
    for named in named_modules(runs.model):
        module = named.module
        for own, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                held[named.name, "parameters", own] = _norms(parameter)
        plain = {n: v for n, v in vars(module).items() if n not in _TORCH_S_OWN}
        for own, value in (*module._buffers.items(), *plain.items()):
            kept = _kept(value)
            if kept is not None:
                held[named.name, "state", own] = kept
    return held


_TORCH_S_OWN = frozenset(vars(torch.nn.Module()))


def _norms(parameter: Tensor) -> tuple[float, float]:
    values = parameter.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point() or values.layout is not torch.strided:
        return 0.0, 0.0
    return float(values.norm(dtype=torch.float64)), float(values.sum(dtype=torch.float64))


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_plain = value.is_floating_point() and value.layout is torch.strided
        return value.detach().clone() if is_plain and not value.is_meta else None
    if isinstance(value, _CONTAINERS):
        return len(value)
    return value if isinstance(value, float) else None


def _changes(before: dict[tuple[str, str, str], Any], after: Any) -> list[Parting]:
    """Return what is not as it was, in order. What was not there before was filled once."""
    changes = []
    for (layer, kind, own), value in after.items():
        held = before.get((layer, kind, own))
        if held is None:
            continue
        if kind == "state" and (said := _difference(own, held, value)):
            changes.append(Parting(kind, 1.0, layer, detail=said))
        elif kind == "parameters" and held != value:
            far = max(abs(value[0] - held[0]), abs(value[1] - held[1])) / max(held[0], _LEAST)
            said = f"its parameter {own!r} changes by {far:.2g} of its norm"
            changes.append(Parting(kind, far, layer, kind, own, detail=said))
    return changes


def _difference(own: str, before: Any, after: Any) -> str:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        if before.shape == after.shape and torch.equal(before.nan_to_num(), after.nan_to_num()):
            return ""
        return f"{own!r} changes"
    if type(before) is not type(after) or before == after or before != before:
        return ""
    if isinstance(before, int):
        return f"{own!r} goes from {before} entries to {after}"
    return f"{own!r} goes from {before:.6g} to {after:.6g}"
