"""Calls of a model in a row, and what one leaves behind for the next."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.step.isolation import random_state, restore_random_state
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.probes.intervening.batches import rolled
from pytest_modelhealth.probes.intervening.running import Ran, Runs

Change = tuple[str, str, str, float]
"""A layer, own name of its parameter (``""`` for others), what changed as a phrase, how much."""

_CONTAINERS = (list, deque, dict, set)
_LEAST = 1e-6


class Calls(NamedTuple):
    """What calls of a model in a row gave.

    Args:
        again: of the usual batch and random numbers, after a call with another batch.
        other: of the usual batch and other random numbers.
        changed: what a further call changes in the model.
    """

    again: Ran
    other: Ran
    changed: list[Change]


def call_again(runs: Runs, seed: int) -> Calls:
    """Call the model on another batch and then on the usual one, without putting it back between.

    What it keeps of the other batch shows in what it gives for the usual one.
    """
    again, other = Ran(), Ran()
    batches = rolled(runs), runs.batch(), runs.batch()
    with runs.beside.put_back([(b.args, b.kwargs) for b in batches], evaluation=True):
        usual = random_state()
        runs.call(batches[0], Ran())
        restore_random_state(usual)
        runs.call(batches[1], again)
        before = _held(runs)
        torch.manual_seed(seed)
        runs.call(batches[2], other)
        changed = changes(before, _held(runs))
    if _differ(runs.base, again):
        other = runs.forward(runs.batch(), seed=seed)
    if changed and _differ(runs.base, other):  # which may be by the random numbers alone
        changed = _changed_by_calls(runs)
    return Calls(again, other, changed)


def _differ(one: Ran, other: Ran) -> bool:
    pairs = zip(one.outputs, other.outputs, strict=False)
    return any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)


def _changed_by_calls(runs: Runs) -> list[Change]:
    """Return what a call changes that is not owed to its random numbers: those of both are one."""
    batches = runs.batch(), runs.batch()
    with runs.beside.put_back([(b.args, b.kwargs) for b in batches], evaluation=True):
        usual = random_state()
        runs.call(batches[0], Ran())
        before = _held(runs)
        restore_random_state(usual)
        runs.call(batches[1], Ran())
        return changes(before, _held(runs))


Held = dict[tuple[str, str, str], Any]
"""What a model keeps, by layer, kind and own name."""


def _held(runs: Runs) -> Held:
    """Return floating buffers and attributes, lengths of containers, and norms of parameters."""
    held: Held = {}
    for named in named_modules(runs.model):
        module = named.module
        for own, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                held[named.name, "parameter", own] = _norms(parameter)
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


def changes(before: Held, after: Held) -> list[Change]:
    """Return what is not as it was, in order. What was not there before was filled once."""
    changes: list[Change] = []
    for (layer, kind, own), value in after.items():
        held = before.get((layer, kind, own))
        if held is None:
            continue
        if kind == "parameter":
            size = max(held[0], _LEAST)
            effect = max(abs(value[0] - held[0]), abs(value[1] - held[1])) / size
            phrase = f"its parameter {own!r} changes by {effect:.2g} of its norm"
            changes += [(layer, own, phrase, effect)] if effect > 0.0 else []
        elif (said := _difference(own, held, value)) is not None:
            changes.append((layer, "", said, 1.0))
    return changes


def _difference(own: str, before: Any, after: Any) -> str | None:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        if before.shape == after.shape and torch.equal(before.nan_to_num(), after.nan_to_num()):
            return None
        return f"{own!r} changes"
    if type(before) is not type(after) or before == after or before != before:
        return None
    if isinstance(before, int):
        return f"{own!r} goes from {before} entries to {after}"
    return f"{own!r} goes from {before:.6g} to {after:.6g}"
