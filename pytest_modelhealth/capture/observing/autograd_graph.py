"""Reads autograd's graph between a loss and the model's output, without running it."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Set
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from pytest_modelhealth.operations import having
from pytest_modelhealth.report import LossPath

_CHOOSES = {"maximum": 1, "minimum": -1}
"""Which sign the larger or the smaller of two values has if one of them has."""

_MOST_NODES = 20_000
_MOST_VALUES = 1 << 20
_DEEPEST = 100
_NEAR = 40


class Origin(NamedTuple):
    """The operation that made a tensor, views and copies apart, and the dimension it ran along.

    Clamps are passed, as they leave most values what they are; the last one's bounds are kept.
    """

    function: str = ""
    dimension: int | None = None
    clamped: tuple[float | None, float | None] | None = None


def origin(tensor: Tensor) -> Origin:
    """Return what made `tensor`: ``softmax``, ``sigmoid``; nothing where it has no graph."""
    node: Any = tensor.grad_fn
    moved, clamped = False, None
    while node is not None:
        name = operation(node)
        if clamped is None and name in having("clamp"):  # one by numbers, not by tensors
            low = getattr(node, "_saved_min", getattr(node, "_saved_min_val", None))
            high = getattr(node, "_saved_max", getattr(node, "_saved_max_val", None))
            low, high = (end if isinstance(end, int | float) else None for end in (low, high))
            clamped = None if low is None and high is None else (low, high)
        if name not in having("view", "index", "clamp"):
            break
        moved = moved or name not in having("copy")
        node = node.next_functions[0][0] if node.next_functions else None
    if node is None:
        return Origin(clamped=clamped)
    dimension = getattr(node, "_saved_dim", None)
    if moved or not isinstance(dimension, int):
        return Origin(operation(node), clamped=clamped)
    if dimension >= 1 << 63:  # stored without a sign
        dimension -= 1 << 64
    return Origin(operation(node), dimension % max(tensor.ndim, 1), clamped)


def are_cosines(tensor: Tensor) -> bool:
    """Whether `tensor` is made of inner products of vectors of length one, margin and scale apart.

    So are the logits of ArcFace, CosFace, SimCLR and CLIP.
    """
    waiting, seen, found = [tensor.grad_fn], set(), False
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen or operation(node) == "accumulate_grad":
            continue
        seen.add(node)
        factors = [following for following, _ in node.next_functions if following is not None]
        name = operation(node)
        are_unit = bool(factors) and all(map(_has_length_one, factors))
        if name in having("matrix") or (name == "mul" and len(factors) > 1 and are_unit):
            if not are_unit:
                return False
            found = True
        elif name in having("view", "index", "margin") and len(seen) < _DEEPEST:
            waiting += factors
        else:
            return False
    return found


def _has_length_one(node: Any) -> bool:
    """Whether a node divides vectors by their norm."""
    node = _behind(node, having("view", "index"))
    if node is None or operation(node) == "weight_norm_interface":
        return node is not None
    if operation(node) != "div" or len(node.next_functions) < 2:
        return False
    norm = _behind(node.next_functions[1][0], having("view", "index", "guard"))
    if norm is None or operation(norm) != "sum":
        return norm is not None and operation(norm) in having("length")
    squares = norm.next_functions[0][0]
    return squares is not None and operation(squares) in ("mul", "pow")


def _behind(node: Any, passing: Set[str]) -> Any:
    """Return the first node, along first operands, that is none of `passing`."""
    while node is not None and operation(node) in passing and node.next_functions:
        node = node.next_functions[0][0]
    return node


def operation(node: Any) -> str:
    """Return an autograd node's operation: ``log_softmax`` for ``LogSoftmaxBackward0``."""
    return _operation_of(node.name())


@cache
def _operation_of(name: str) -> str:
    return snake_case(re.sub(r"Backward\d*$", "", name.rpartition("::")[2]))


def snake_case(name: str) -> str:
    """Return ``log_softmax`` for ``LogSoftmax``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def loss_path(loss: Tensor, outputs: Iterable[Any]) -> LossPath:
    """Return what lies between `loss` and the autograd nodes of the output.

    Nothing where there is no graph, or a very large one.
    """
    ends = {end for end in outputs if end is not None}
    if loss.grad_fn is None or not ends:
        return LossPath()
    nodes = walk([loss.grad_fn], ends, _MOST_NODES)
    if len(nodes) == _MOST_NODES:
        return LossPath()
    following = {after for node in nodes for after, _ in node.next_functions}
    return LossPath(
        operations=tuple(dict.fromkeys(operation(node) for node in nodes)),
        reaches_output=loss.grad_fn in ends or not ends.isdisjoint(following),
        sign=_sign(loss.grad_fn, dict.fromkeys((None, *ends), 0)),
        switched_off=any(_is_switch(node) for node in nodes),
    )


def sign_of(loss: Tensor) -> int:
    """Return 1 if a loss cannot be negative, -1 if it cannot be positive, 0 if its graph knows not.

    The graph may have been gone back through already: it then knows less.
    """
    try:
        return _sign(loss.grad_fn, {None: 0})
    except RuntimeError:  # what a node saved is gone
        return 0


def is_made_by_a_loss(loss: Tensor) -> bool:
    """Whether a number is made by one of torch's loss functions, which are to be made small.

    Between the two lie sums, weights and means.
    """
    return any(operation(node) in having("loss") for node in walk([loss.grad_fn], most=_NEAR))


def _is_switch(node: Any) -> bool:
    """Whether this multiplies what has a graph by zeros that have none.

    A factor on another device is not waited for.
    """
    if operation(node) != "mul":
        return False
    for (following, _), other in zip(node.next_functions, ("other", "self"), strict=False):
        factor: Any = None if following is None else getattr(node, f"_saved_{other}", None)
        if isinstance(factor, int | float) and factor == 0:
            return True
        is_known = isinstance(factor, Tensor) and factor.is_cpu and not factor.requires_grad
        if is_known and 0 < factor.numel() <= _MOST_VALUES and not factor.any():
            return True
    return False


def walk(roots: Iterable[Any], ends: Set[Any] = frozenset(), most: int = sys.maxsize) -> list[Any]:
    """Return nodes of autograd's graph that a backward pass from some gets to, before `ends`."""
    met = {None, *ends}
    nodes, waiting = list[Any](), [root for root in roots if root not in met]
    met.update(waiting)
    while waiting and len(nodes) < most:
        node = waiting.pop()
        nodes.append(node)
        for following, _ in node.next_functions:
            if following not in met:
                met.add(following)
                waiting.append(following)
    return nodes


# The sign that a node must have: 1 never negative, -1 never positive, 0 unknown.


def _sign(node: Any, known: dict[Any, int], depth: int = 0) -> int:
    if node not in known:
        known[node] = 0
        if depth <= _DEEPEST:
            known[node] = _derived_sign(node, known, depth)
    return known[node]


def _derived_sign(node: Any, known: dict[Any, int], depth: int) -> int:
    name, exponent = operation(node), getattr(node, "_saved_exponent", None)
    is_even = name == "pow" and isinstance(exponent, int | float) and exponent % 2 == 0
    if name in having("never_negative") or is_even:
        return 1
    if name in having("never_positive"):
        return -1
    below = [following for following, _ in node.next_functions]
    keeps = name in having("view", "keeps_sign") or (name == "add" and len(below) == 2)
    if not (keeps or name in having("turns_sign") or name in _CHOOSES or _is_scaling(node)):
        return 0
    signs = [_sign(following, known, depth + 1) for following in below]
    if name in _CHOOSES:
        return _chosen_sign(_CHOOSES[name], below, signs)
    if _is_scaling(node):
        return signs[0] * _factor_sign(node)
    if len(set(signs)) != 1:
        return 0
    return signs[0] if keeps else -signs[0]


def _chosen_sign(wanted: int, below: list[Any], signs: list[int]) -> int:
    """Return the sign of the larger or the smaller of two values.

    One bound from the right side is enough; of two opposite multiples of one value, one is never
    negative and one never positive.
    """
    if wanted in signs:
        return wanted
    if not all(following is not None and _is_scaling(following) for following in below):
        return 0
    of_one = len({following.next_functions[0][0] for following in below}) == 1
    return wanted if of_one and math.prod(map(_factor_sign, below)) < 0 else 0


def _is_scaling(node: Any) -> bool:
    """Whether this multiplies or divides one value that has a graph by one that has none."""
    below = [following for following, _ in node.next_functions]
    return operation(node) in ("mul", "div") and bool(below) and not any(below[1:])


def _factor_sign(node: Any) -> int:
    """Return the sign of the number that something is multiplied or divided by; 0 if it is none."""
    factor = getattr(node, "_saved_other", None)
    if isinstance(factor, Tensor):
        factor = float(factor) if factor.ndim == 0 else 0.0
    return (factor > 0) - (factor < 0) if isinstance(factor, int | float) else 0
