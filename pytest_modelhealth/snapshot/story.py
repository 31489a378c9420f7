"""What began a drift: the inputs of a layer, its parameters, its computation, or its backward."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from pytest_modelhealth.alignment.causes import CallChange, TieChange
from pytest_modelhealth.snapshot.changes import Matching

Drifted = Set[tuple[str, str]]
"""Role and layer of each tensor that drifted."""

_HINTS = (
    ("norm", "its eps, or its mode?"),
    ("dropout", "its mode, its p, or a seed?"),
    ("softmax", "its dim, or a scale?"),
    ("attention", "its mask, its scale, or dropout?"),
    ("conv", "its stride, padding, dilation or groups?"),
    ("pool", "its kernel, stride or padding?"),
    ("embedding", "its padding_idx or max_norm, or other indices?"),
    ("lstm", "its initial state, or its direction?"),
    ("gru", "its initial state, or its direction?"),
    ("upsample", "its mode or align_corners?"),
    ("gelu", "its approximation?"),
    ("relu", "another activation, or its slope?"),
)


MOST_CAUSES = 3
"""So many layers that are called more or less often are named in a story."""


class Cause(NamedTuple):
    """What began a drift where no number is needed to tell.

    Args:
        text: a sentence; ``""`` where numbers have to tell.
        layers: names of the layers in the report of which it tells everything.
    """

    text: str = ""
    layers: frozenset[str] = frozenset()


def find_cause(role: str, layer: str, matching: Matching) -> Cause:
    """Return the change of calls or of a tied weight that the first drift comes from.

    Args:
        role: which tensor of the layer drifted first; ``"loss"`` for the loss.
        layer: name of the layer in the report.
        matching: both snapshots.
    """
    tie = _tie(role, layer, matching)
    if tie is not None:
        return Cause(str(tie), frozenset({tie.pair.candidate or ""}))
    if role in ("loss", "parameters") or (role == "inputs" and not layer):
        return Cause()
    calls = _calls(role, layer, matching)
    to = matching.alignment.to_candidate
    text = "; ".join(map(str, calls[:MOST_CAUSES]))
    return Cause(text, frozenset(to[name] for change in calls for name in change.inside))


def _tie(role: str, layer: str, matching: Matching) -> TieChange | None:
    for tie in matching.causes.ties:
        later, owner = tie.pair.candidate, tie.owner.candidate
        if layer == later and role in ("activations", "parameters", "parameter_gradients"):
            return tie
        if layer == owner and role == "parameter_gradients":
            return tie
    return None


def _calls(role: str, layer: str, matching: Matching) -> Sequence[CallChange]:
    """Return what is called more or less often and explains the first drift.

    - The layer itself, or one around it.
    - Of a container whose layers agree and that gives something else: what is in it.
    - Of a layer that takes something else: what was called right before it and no longer is, or is
      now; else what is called several times, as a snapshot has only the place of the last call.
    """
    changes, pair = matching.causes.calls, matching.origin.get(layer)
    name = pair.reference if pair is not None else None
    if name is None:
        return ()
    own = [change for change in changes if name in change.inside]
    if own:
        rest = [one for one in changes if one not in own]
        near = [one for one in rest if one.both or _is_right_before(one, layer, matching)]
        return sorted([*own, *near], key=lambda one: not one.more)
    if role == "activations" and layer in matching.new.holders:
        return [one for one in changes if not name or one.pair.name.startswith(f"{name}.")]
    if role != "inputs" or _unmatched(layer, matching):
        return ()
    before = [one for one in changes if _is_right_before(one, layer, matching)]
    return before or [one for one in changes if one.both]


def _is_right_before(change: CallChange, layer: str, matching: Matching) -> bool:
    """Whether a layer that is called on one side only returned there after the last common one."""
    if change.both:
        return False
    side = matching.new if change.more else matching.old
    here = (matching.origin[layer].reference or "") if side is matching.old else layer
    name = (change.pair.candidate if change.more else change.pair.reference) or ""
    if side.place[name] > side.place[here]:
        return False
    once = {
        (one.pair.candidate if change.more else one.pair.reference) or ""
        for one in matching.causes.calls
        if not one.both
    }
    between = list(side.snapshot.layers)[side.place[name] + 1 : side.place[here]]
    return all(
        other in side.holders or any(other == o or other.startswith(f"{o}.") for o in once)
        for other in between
    )


def tell(role: str, layer: str, drifted: Drifted, matching: Matching) -> str:
    """Return the story of the first drift, one sentence.

    Args:
        role: which tensor of the layer drifted first; ``"loss"`` for the loss.
        layer: name of the layer in the report.
        drifted: what else drifted.
        matching: both snapshots.
    """
    label = matching.new.label(layer)
    if role == "loss":
        return "every layer agrees and the loss does not: its function or the target changed"
    if role == "inputs":
        return _other_input(layer, label, matching)
    if role in ("parameters", "buffers"):
        what = "weights" if role == "parameters" else "buffers"
        given = _given(layer, drifted, matching)
        return f"{label}: {', '.join([*given, f'other {what}'])}"
    if role == "activations":
        return _other_output(layer, label, drifted, matching)
    return _other_gradient(role, layer, label, matching)


def _given(layer: str, drifted: Drifted, matching: Matching) -> list[str]:
    """Return whether the input of a layer is known to be the same."""
    seen = any(role == "inputs" for role, _ in matching.new.tensors.get(layer, {}))
    return ["same input"] if seen and ("inputs", layer) not in drifted else []


def _other_input(layer: str, label: str, matching: Matching) -> str:
    if not layer:
        return f"{label}: the batch is another one"
    before = _previous(layer, matching)
    after = f" after {before}" if before else ""
    between = _unmatched(layer, matching)
    if between:
        return f"{label}: other input; between it and the layers before: {', '.join(between)}"
    return (
        f"{label}: other input, while every layer before it agrees: what happens{after} in "
        f"{_parent(layer, matching)} changed (a residual, a mask, a reshape, a function?)"
    )


def _other_output(layer: str, label: str, drifted: Drifted, matching: Matching) -> str:
    side = matching.new
    if layer in side.holders and len(side.snapshot.layers) > 1:
        return f"{label}: every layer in it agrees, its own output does not: its forward changed"
    given = _given(layer, drifted, matching)
    if side.owns_parameters(layer):
        given.append("same weights")
    line = side.snapshot.layers[layer]
    pair = matching.origin[layer]
    before = matching.old.snapshot.layers.get(pair.reference or "")
    if before is not None and before.type != line.type:
        cause = f"it is a {line.type}, was a {before.type}"
    else:
        kind = line.type.lower()
        cause = next(
            (hint for word, hint in _HINTS if word in kind), "its settings or its forward?"
        )
    return f"{label}: {', '.join([*given, 'other output'])}: {cause}"


def _other_gradient(role: str, layer: str, label: str, matching: Matching) -> str:
    what = "the gradient of its parameters" if role == "parameter_gradients" else "its gradient"
    if not layer:
        cause = "the loss function, its reduction, or a scale?"
    else:
        cause = "a detach(), a custom backward, or the loss function?"
    return f"{label}: the forward pass agrees, {what} is the first that does not: {cause}"


def _previous(layer: str, matching: Matching) -> str:
    """Return the label of the layer that returned last before another, containers aside."""
    side = matching.new
    before = ""
    for name in side.snapshot.layers:
        if name == layer:
            break
        if name not in side.holders:
            before = name
    return side.label(before) if before else ""


def _parent(layer: str, matching: Matching) -> str:
    return matching.new.label(layer.rpartition(".")[0])


def _unmatched(layer: str, matching: Matching) -> list[str]:
    """Return what was added or removed right before a layer, and may change numbers."""
    found: list[str] = []
    for pair in matching.alignment.pairs:
        if pair.candidate == layer:
            return found
        if pair.aligned and pair.candidate not in matching.new.holders:
            found = []
        elif pair.candidate is None and matching.old.computes(pair.reference or ""):
            found.append(f"{matching.old.label(pair.reference or '')} was removed")
        elif pair.reference is None and matching.new.computes(pair.candidate or ""):
            found.append(f"{matching.new.label(pair.candidate or '')} was added")
    return found
