"""Calls of a step under changed conditions: shifted weights, other samples, a loaded state."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from pytest_modelhealth.capture.passive.hooks import parameters_of
from pytest_modelhealth.errors import in_one_line
from pytest_modelhealth.progress import track
from pytest_modelhealth.report import LossSlope
from pytest_modelhealth.training.rows import rows_in
from pytest_modelhealth.training.stepping.session import Session, loss_in
from pytest_modelhealth.training.stepping.watching import Call, Watch, norm, widened

# ---- the slope of the loss

SHIFTS = (1e-3, 3e-4)
"""How far weights are moved along the gradient, by their norm."""
_AGREE = 0.2
_FAR, _ROUND = 0.01, 1e-3
"""A step that moves weights by less of their size leaves the slope as it was."""
_ROUNDING = 200 * 2.0**-23
"""A difference of losses below this share of the loss is rounding of float32."""


def loss_slope(session: Session, first: Call) -> LossSlope | None:
    """Hold the gradient at the optimizer's step against the slope of the loss that is returned.

    ``None`` where it cannot be measured, or optimizers descend several losses.
    """
    steps = list(first.steps.values())
    if any(one.count > 1 or one.evaluations for one in steps) or not first.at_step:
        return None
    of_parts = any(first.at_step.isdisjoint(reached) for reached in first.passes.values())
    if of_parts or len({frozenset(one.passes) for one in steps}) > 1:
        return None
    own = {id(p) for p in session.model.parameters()}
    gradients = {key: first.gradients[key] for key in first.at_step & own}
    length = _length(gradients.values())
    if loss_in(first.result) is None or not length or not math.isfinite(length):
        return None
    slope = _slope(session, gradients, length, first, 1e-3)
    is_far = first.goes_on and max(first.updated.values(), default=0.0) > _FAR
    times = length / slope if slope else 0.0
    if is_far and abs(times - len(first.passes)) > 0.01 * times:
        return None  # the loss may be of a later run, of weights that the step has moved
    added, scale = _added(first, gradients, length), session.scale
    if added is None or added / scale < length * (1.0 - _ROUND):
        scale = 1.0  # no scaler scaled the loss
    added = None if added is None else added / scale
    return None if slope is None else LossSlope(slope, length, added, scale)


def slope_without_gradient(session: Session, calls: list[Call]) -> tuple[tuple[str, ...], float]:
    """Return trainable parameters without gradient that the returned loss depends on, and how.

    They ran, an optimizer that stepped holds them, and they are moved together along one random
    direction.
    """
    reached = {key for one in calls for key in (*one.added, *one.gradients)}
    reached |= {key for one in calls for key, size in one.changes.items() if size}
    stepping = [steps.optimizer for one in calls for steps in one.steps.values()]
    stepped = {id(p) for optimizer in stepping for p in parameters_of(optimizer)}
    asked = {
        id(p): name
        for name, p in session.model.named_parameters()
        if p.requires_grad and id(p) in (stepped - reached) & session.parameters.keys()
        and p.is_floating_point() and p.numel()
    }  # fmt: skip
    generator = torch.Generator().manual_seed(20_240_229)
    along = {}
    for key in asked:
        weight = session.parameters[key]
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        along[key] = drawn.to(weight.device)
    length = _length(along.values())
    slope = _slope(session, along, length, calls[0], 1e-2, times=100.0) if along else None
    return (tuple(asked.values()), slope) if slope else ((), 0.0)


def _slope(
    session: Session,
    along: Mapping[int, Tensor],
    length: float,
    first: Call,
    least: float,
    times: float = 1.0,
) -> float | None:
    """Return the slope of the loss along a direction of so much length; ``None``: not smooth.

    Weights are moved by `SHIFTS` so many `times`, by their norm, which counts as `least` at least.
    The wide shift is made where the loss of the `first` call is not half-way between the ends of
    the narrow one.
    """
    session.guard.rewind()
    weights = times * max(_length(session.parameters[key].detach() for key in along), least)
    wide, narrow = SHIFTS
    if (ends := _ends(session, along, narrow * weights / length)) is None:
        return None
    slope, middle = (ends[0] - ends[1]) / (2.0 * narrow * weights), loss_in(first.result)
    is_straight = middle is not None and _agree(ends[0] - middle, middle - ends[1])
    if not is_straight:
        if (ends := _ends(session, along, wide * weights / length)) is None:
            return None
        is_straight = _agree(slope, (ends[0] - ends[1]) / (2.0 * wide * weights))
    return slope if is_straight else None


def _agree(a: float, b: float) -> bool:
    return abs(a - b) <= _AGREE * max(abs(a), abs(b))


def _ends(
    session: Session, along: Mapping[int, Tensor], times: float
) -> tuple[float, float] | None:
    """Return the loss of weights moved either way; ``None``: they differ by rounding alone."""
    ends: list[float] = []
    for sign in (times, -times):
        session.guard.rewind()
        for key, direction in along.items():
            weights = session.parameters[key].data
            weights.copy_(torch.add(widened(weights), widened(direction), alpha=sign))
        try:
            loss = loss_in(session.call())
        except Exception:  # noqa: BLE001 - the user's, on weights that we moved
            return None
        if loss is None or not math.isfinite(loss):
            return None
        ends.append(loss)
    kinds = {session.parameters[key].dtype for key in along} & {torch.float16, torch.bfloat16}
    rounding = max(_ROUNDING, *(4.0 * torch.finfo(kind).eps for kind in kinds), 0.0)
    is_lost = abs(ends[0] - ends[1]) <= rounding * max(map(abs, ends))
    return None if is_lost and (ends[0] != ends[1] or kinds) else (ends[0], ends[1])


def _added(first: Call, gradients: Mapping[int, Tensor], length: float) -> float | None:
    """Return the norm of what backward passes left, where it only was scaled afterwards."""
    sizes = {key: norm(gradient) for key, gradient in gradients.items()}
    if set(sizes) - set(first.added):
        return None
    added = math.sqrt(math.fsum(first.added[key] ** 2 for key in sizes))
    is_scaled = all(
        abs(first.added[key] - added / length * size) <= 1e-3 * added for key, size in sizes.items()
    )
    return added if is_scaled else None


def _length(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(math.fsum(norm(t) ** 2 for t in tensors))


# ---- halves of the batch


def half_influence(session: Session, first: Call, calls: int) -> tuple[bool, ...]:
    """Replace each half of the batch by the other; return whether that changes the first gradient.

    No call is made where the first one shows that it comes from both. A half without influence on
    it is followed through all calls: a part of the loss may fade in, and several optimizer steps
    may each look at their own part of the batch. Nothing is returned where that cannot be told.
    """
    length = _length(first.gradients.values()) if session.reaches_halves else 0.0
    if length and _added(first, first.gradients, length) is not None:
        return True, True  # as the one backward pass shows, whose gradient was scaled at most
    samples, tensors = session.samples, rows_in(session.given.batch)
    half = samples // 2
    are_equal = all(torch.equal(t[:half], t[half : 2 * half]) for t in tensors)
    if samples < 2 or not first.gradients or are_equal:
        return ()
    numbers, influences = list(range(samples)), []
    starts, ends = numbers[:half], numbers[half:]
    first_by_second = [*ends[:half], *ends]
    second_by_first = [*starts, *(starts[i % half] for i in range(len(ends)))]
    try:
        for order in (first_by_second, second_by_first):
            session.guard.rewind()
            other = Watch(session).call(session.changed_batch(order))
            influences.append(
                _differ(_nonzero(first.gradients), _nonzero(other.gradients))
                or _differ(session.after(calls), session.after(calls, order))
            )
    except Exception:  # noqa: BLE001 - the user's, on a batch that we changed
        return ()
    return tuple(influences)


def _nonzero(gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {key: gradient for key, gradient in gradients.items() if bool(gradient.any())}


def _differ(a: Mapping[int, Tensor], b: Mapping[int, Tensor]) -> bool:
    return a.keys() != b.keys() or not all(torch.equal(a[key], b[key]) for key in a)


# ---- on request


def overfitted(session: Session, calls: int) -> tuple[float, float, int]:
    """Call the step on the one batch again and again; return the first and least loss, and when."""
    session.guard.rewind()
    losses = [math.nan] * calls
    with suppress(Exception):  # a later call, of which another check says that it raises
        for number in track(range(calls), "overfitting"):
            loss = loss_in(session.call())
            losses[number] = math.nan if loss is None else loss
    best = min(range(calls), key=lambda n: losses[n] if math.isfinite(losses[n]) else math.inf)
    return losses[0], losses[best], best + 1


def resumed(session: Session) -> str:
    """Save after one call, make another; load into what was before, and make that call again.

    The first call is on the batch's samples in another order, so that it shows what the second one
    takes of it; where they differ, all is done with the batch as it is as well.

    Returns:
        What differs, the first such; ``""`` if nothing does, bit for bit.
    """
    with suppress(Exception):  # the user's, on a batch that we changed
        backwards = list(range(session.samples))[::-1]
        if session.samples > 1 and not (other := _resumed(session, backwards)):
            return ""
        if session.samples > 1 and not _resumed(session, None):
            return f"the step uses what an earlier batch left: after other samples {other} differs"
    try:
        return _resumed(session, None)
    except Exception as error:  # noqa: BLE001 - the user's, in an order that we chose
        return f"the step cannot be resumed: {in_one_line(error)}"


def _resumed(session: Session, order: list[int] | None) -> str:
    """Return what differs where the first call is on samples in this order."""
    session.guard.rewind()
    session.call(None if order is None else session.changed_batch(order))
    stateful = (session.model, *session.given.optimizers, *session.given.restore)
    saved = [copy.deepcopy(one.state_dict()) for one in stateful]
    once = _next(session)
    session.guard.rewind()
    for one, state in zip(stateful, saved, strict=True):
        one.load_state_dict(state)
    again = _next(session)
    for name, value in once.items():
        other = again.get(name)
        if other is None or other.shape != value.shape:
            return name
        if not torch.allclose(value, other.to(value), rtol=0.0, atol=0.0, equal_nan=True):
            return name
    return ""


def _next(session: Session) -> dict[str, Tensor]:
    """Make a call, and return all that it leaves."""
    session.guard.restore_numbers()
    session.guard.leaves.clear()
    loss = loss_in(session.call())
    state = session.model.state_dict().items()
    left = {name: tensor.clone() for name, tensor in state if isinstance(tensor, Tensor)}
    return {"the loss": torch.tensor(math.nan if loss is None else loss), **left}


def sets_a_seed(session: Session, end: Tensor) -> bool:
    """Whether a call leaves the random numbers there from another start, too.

    A step that draws in its first call only leaves them as they are in later ones.
    """
    session.guard.rewind()
    torch.rand(1)
    with suppress(Exception):  # the user's
        session.call()
        return torch.equal(torch.get_rng_state(), end)
    return False
