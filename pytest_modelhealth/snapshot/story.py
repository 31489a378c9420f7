"""What began a drift: the inputs of a layer, its parameters, its computation, or its backward."""

from __future__ import annotations

from collections.abc import Set

from pytest_modelhealth.snapshot.matching import Matching

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
