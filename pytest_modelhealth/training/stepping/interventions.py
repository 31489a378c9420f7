"""Calls of a step under changed conditions: shifted weights, other samples, cleared gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pytest_modelhealth.capture.passive.updates import parameters_of
from pytest_modelhealth.probes.intervening.running import said
from pytest_modelhealth.report.training import HalfInfluence, LeftOver, LossSlope
from pytest_modelhealth.training.stepping.session import Session, loss_in, rows_in
from pytest_modelhealth.training.stepping.watching import Watched, distance, norm, widened

SHIFTS = (1e-3, 3e-4)
"""How far weights are moved along the gradient, by their norm."""
_AGREE = 0.2
_ROUNDING = 200 * 2.0**-23
"""A difference of losses below this share of the loss is rounding of float32."""


# ---- the slope of the loss


def loss_slope(session: Session, first: Watched) -> LossSlope:
    """Hold the gradient at the optimizer's step against the slope of the loss that is returned."""
    why_not = _why_no_slope(first)
    if why_not:
        return LossSlope(why_not=why_not)
    own = {id(p) for p in session.model.parameters()}
    gradients = {key: first.gradients[key] for key in _stepped_on(first) & own}
    length = _length(gradients.values())
    if not length or not math.isfinite(length):
        return LossSlope(why_not="the gradient of the model is zero at the step, or not finite")
    try:
        slope = _slope(session, gradients, length, 1e-3)
    except _UntellableError as error:
        return LossSlope(why_not=str(error))
    return LossSlope(slope, length, _added(first, gradients, length))


class _UntellableError(Exception):
    """Why there is no slope."""


def _why_no_slope(first: Watched) -> str:
    stepped = [steps for steps in first.steps.values() if steps.count]
    held = _stepped_on(first)
    if not held:
        return "no optimizer stepped on a gradient in the first call"
    if any(steps.count > 1 or "closure" in steps.traits for steps in stepped):
        return "an optimizer steps several times in a call, or by a closure"
    if len({frozenset(steps.passes) for steps in stepped}) > 1:
        return "several optimizers descend losses of their own"
    if any(held.isdisjoint(reached) for reached in first.passes.values()):
        return "a backward pass of the step is of another part's loss"
    if loss_in(first.result) is None:
        return "the step returns no number"
    return ""


def _stepped_on(first: Watched) -> set[int]:
    """Return what an optimizer steps on: gradients of this call, or of it as the next begins."""
    leading = [first.optimizers[key] for key, one in first.steps.items() if "leads" in one.traits]
    waiting = {id(p) for optimizer in leading for p in parameters_of(optimizer)}
    return first.at_step or waiting & first.gradients.keys()


def _slope(
    session: Session, along: Mapping[int, Tensor], length: float, least: float, times: float = 1.0
) -> float:
    """Return the slope of the loss along a direction of so much length.

    Weights are moved by `SHIFTS` so many `times`, by their norm, which counts as `least` at least.
    """
    session.rewind()
    weights = times * max(_length(session.parameters[key].detach() for key in along), least)
    wide, narrow = (_secant(session, along, length, shift * weights) for shift in SHIFTS)
    if abs(wide - narrow) > _AGREE * max(abs(wide), abs(narrow)):
        raise _UntellableError("the loss is too curved or too noisy for a slope")
    return narrow


def _secant(
    session: Session, gradients: Mapping[int, Tensor], length: float, shift: float
) -> float:
    ends: list[float] = []
    for sign in (1.0, -1.0):
        session.rewind()
        for key, gradient in gradients.items():
            weights = session.parameters[key].data
            weights.copy_(widened(weights) + sign * shift / length * widened(gradient))
        session.snapshot.restore_random_numbers()
        try:
            loss = loss_in(session.call())
        except Exception as error:  # noqa: BLE001 - the user's, on weights that we moved
            raise _UntellableError(
                f"on weights moved a little the step raises {said(error)}"
            ) from None
        if loss is None or not math.isfinite(loss):
            raise _UntellableError("on weights moved a little the loss is not finite")
        ends.append(loss)
    difference = ends[0] - ends[1]
    kinds = {session.parameters[key].dtype for key in gradients} & {torch.float16, torch.bfloat16}
    rounding = max(_ROUNDING, *(4.0 * torch.finfo(kind).eps for kind in kinds), 0.0)
    if (difference or kinds) and abs(difference) <= rounding * max(map(abs, ends)):
        raise _UntellableError("the loss does not change by more than rounding")
    return difference / (2.0 * shift)


def _added(first: Watched, gradients: Mapping[int, Tensor], length: float) -> float | None:
    """Return the norm of what backward passes left, where it only was scaled afterwards."""
    sizes = {key: norm(gradient) for key, gradient in gradients.items()}
    if set(sizes) - set(first.raw):
        return None
    raw = math.sqrt(math.fsum(first.raw[key] ** 2 for key in sizes))
    ratio = raw / length
    is_scaled = all(abs(first.raw[key] - ratio * size) <= 1e-3 * raw for key, size in sizes.items())
    return raw if is_scaled else None


def _length(tensors: object) -> float:
    return math.sqrt(math.fsum(norm(t) ** 2 for t in tensors))  # type: ignore[attr-defined]


# ---- halves of the batch


def half_influence(
    session: Session, first: Watched, calls: int
) -> tuple[tuple[HalfInfluence, ...], str]:
    """Replace each half of the batch by the other; return what follows, or why nothing is told.

    A half without influence on the first gradient is followed through all calls: a part of the loss
    may fade in, and several optimizer steps may each look at their own part of the batch.
    """
    samples = session.samples
    half = samples // 2
    tensors = rows_in(session.given.batch)
    if samples < 2:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors[:4]) or "there are none"
        return (), f"the tensors of the batch have no samples in common ({shapes})"
    if not first.gradients:
        return (), "no gradient was seen"
    if all(torch.equal(t[:half], t[half : 2 * half]) for t in tensors):
        return (), "both halves of the batch are equal"
    ends = list(range(half, samples))
    starts = list(range(half))
    first_by_second = [*(ends[i % len(ends)] for i in starts), *ends]
    second_by_first = [*starts, *(starts[i % half] for i in range(len(ends)))]
    orders = (first_by_second, second_by_first)
    runs = []
    try:
        for order in orders:
            session.rewind()
            runs.append(session.watched(session.watch(), session.changed_batch(order)))
        effects = [_difference(first, seen) for seen in runs]
        for place, effect in enumerate(effects):
            if not effect:
                usual, other = session.after(calls), session.after(calls, orders[place])
                effects[place] = max((_relative(usual[k], other[k]) for k in usual), default=0.0)
    except Exception as error:  # noqa: BLE001 - the user's, on a batch that we changed
        return (), f"on samples that repeat the step raises {said(error)}"
    rows = [seen.rows[0] if len(seen.rows) == 1 else None for seen in (first, *runs)]
    made = (
        HalfInfluence(
            name,
            (half, samples - half)[place],
            effects[place],
            base and base[place],
            moved and moved[1 - place],
        )
        for place, (name, base, moved) in enumerate(
            (("first", rows[0], rows[2]), ("second", rows[0], rows[1]))
        )
    )
    return tuple(made), ""


def _relative(a: Tensor, b: Tensor) -> float:
    return distance(a, b) / ((norm(a) or 1.0) if a.shape == b.shape else 1.0)


def _difference(a: Watched, b: Watched) -> float:
    """Return by how much a gradient differs, the most of all, by the norm of the first one's."""
    found = [0.0]
    for key in {*a.gradients, *b.gradients}:
        one, other = a.gradients.get(key), b.gradients.get(key)
        if one is not None and other is not None:
            found.append(_relative(one, other))
        else:
            left = one if other is None else other
            found.append(float(left is not None and bool(left.any())))
    return max(found)


# ---- gradients of the call before


def left_over(session: Session, first: Watched) -> LeftOver | None:
    """Clear each gradient once an optimizer has stepped on it; return what that changes.

    Two calls are made either way, three where the first has nothing to step on yet. What differs is
    held against what they moved.
    """
    calls = 2 + any("leads" in steps.traits for steps in first.steps.values())
    try:
        start, moved = session.after(0), session.after(calls, watch=session.watch())
        cleared = session.after(calls, watch=session.watch(clears=True))
    except Exception:  # noqa: BLE001 - the user's, without the gradients that it counts on
        return None
    found = []
    for key, end in moved.items():
        if end.shape == cleared[key].shape == start[key].shape:
            found.append((distance(end, cleared[key]) / (distance(end, start[key]) or 1.0), key))
    effect, key = max(found, default=(0.0, 0))
    names = {id(p): name for name, p in session.model.named_parameters()}
    layer, _, own = names.get(key, "").rpartition(".")
    return LeftOver(effect, layer, own)


# ---- parameters without gradient


def slope_without_gradient(session: Session, seen: list[Watched]) -> tuple[tuple[str, ...], float]:
    """Return trainable parameters without gradient that the returned loss depends on, and how.

    They ran, an optimizer that stepped holds them, and they are moved together along one random
    direction.
    """
    reached = {key for one in seen for key in (*one.added, *one.gradients)}
    reached |= {key for one in seen for key, size in one.changes.items() if size}
    stepped = {
        id(p) for one in seen for optimizer in one.optimizers.values()
        for p in parameters_of(optimizer)
    }  # fmt: skip
    asked = {
        id(p): name
        for name, p in session.model.named_parameters()
        if p.requires_grad and id(p) in stepped - reached and p.is_floating_point() and p.numel()
        and id(p) in session.parameters
    }  # fmt: skip
    if not asked:
        return (), 0.0
    generator = torch.Generator().manual_seed(_SEED)
    along = {
        key: torch.randn(session.parameters[key].shape, generator=generator, dtype=torch.float64)
        for key in asked
    }
    along = {key: one.to(session.parameters[key].device) for key, one in along.items()}
    try:
        slope = _slope(session, along, _length(along.values()), 1e-2, times=100.0)
    except _UntellableError:
        return (), 0.0
    return (tuple(asked.values()), slope) if slope else ((), 0.0)


_SEED = 20_240_229
