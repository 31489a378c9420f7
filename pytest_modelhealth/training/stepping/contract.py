"""Calls a training step a few times and takes down what it did, as a `Stepped`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.autograd_graph import is_made_by_a_loss, sign_of
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import Selection
from pytest_modelhealth.report import (
    LayerMode,
    Observation,
    Stepped,
    SteppedOptimizer,
    SteppedParameter,
)
from pytest_modelhealth.training.stepping.designs import (
    copies_that_learn,
    frozen_in_vain,
    untied_weights,
)
from pytest_modelhealth.training.stepping.growing import Lists
from pytest_modelhealth.training.stepping.interventions import (
    half_influence,
    left_over,
    loss_slope,
    said,
    slope_without_gradient,
)
from pytest_modelhealth.training.stepping.requested import overfitted, resumed
from pytest_modelhealth.training.stepping.session import Session, TrainingStep, loss_in
from pytest_modelhealth.training.stepping.watching import (
    Watched,
    inner,
    norm,
    parameters_of,
    rate_of,
    widened,
)


@dataclass
class _Calls:
    """What the first series of calls showed.

    Args:
        seen: a record a call.
        changes: how far each parameter moved in each call, by the norm of its values before.
        relative: the same of its optimizers' steps.
        swallowed: share of elements with a gradient that did not change, where that was counted.
        observation: the layers of the first call.
        ends_at: where every call leaves the random numbers, if it draws any and all end there.
        raised: what a later call raised.
    """

    seen: list[Watched] = field(default_factory=list)
    changes: list[dict[int, float]] = field(default_factory=list)
    relative: list[dict[int, float]] = field(default_factory=list)
    outside: dict[int, Tensor] = field(default_factory=dict)
    names: list[tuple[str, int, bool]] = field(default_factory=list)
    observation: Observation | None = None
    rates: list[dict[int, float]] = field(default_factory=list)
    swallowed: dict[int, float] = field(default_factory=dict)
    raised: str = ""
    advances: bool = False
    ends_at: Tensor | None = None
    sign: int = 0
    is_loss: bool = False
    restored: list[int | None] = field(default_factory=list)


class Asked(NamedTuple):
    """What is asked of a step.

    Args:
        calls: how often it is called from the beginning.
        overfit: how often on the one batch; ``None`` not at all.
        resume: whether it has to resume from its saved state.
    """

    calls: int = 3
    overfit: int | None = None
    resume: bool = False

    def require_sound(self) -> None:
        """Do nothing if all of it is of the right type.

        Raises:
            InspectionError: something is not; the message says what is expected.
        """
        _require_number(self.calls, "calls", 1)
        if self.overfit is not None:
            _require_number(self.overfit, "overfit", 2)
        if not isinstance(self.resume, bool):
            raise InspectionError(f"resume must be True or False, not {self.resume!r}")


def _require_number(value: object, name: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InspectionError(f"{name} must be a whole number from {least} on, not {value!r}")


def run_contract(
    model: nn.Module, given: TrainingStep, asked: Asked, selection: Selection
) -> Observation:
    """Return what the step did, and the layers of its first call; all else is as it was.

    Raises:
        InspectionError: the step returns no loss.
        Exception: whatever the first call raises, untouched.
    """
    start = time.perf_counter()
    given.require_sound()
    asked.require_sound()
    session = Session(model, given, selection)
    with session.open():
        untied, lists = untied_weights(model), Lists(model, given.step)
        made = _call(session, asked.calls, lists)
        first = made.seen[0]
        copies = copies_that_learn(session, made.seen)
        optimizers = list(_optimizers(session, made))
        parameters = tuple(_parameters(session, made))
        modes = tuple(_modes(model, made, session))
        left = left_over(session) if any(seen.left_over for seen in made.seen[:2]) else None
        slope = loss_slope(session, first)
        unlearned = slope_without_gradient(session, made.seen, made.changes)
        halves, why_no_halves = half_influence(session, first, len(made.seen))
        seeds = _ends_at(session, made.ends_at)
        best = None if asked.overfit is None else overfitted(session, asked.overfit)
        differs = resumed(session) if asked.resume else None
    stepped = Stepped(
        step=given.name,
        losses=tuple(loss_in(seen.result) for seen in made.seen),
        parameters=parameters,
        optimizers=tuple(optimizers),
        modes=modes,
        slope=slope,
        halves=halves,
        why_no_halves=why_no_halves,
        left_over=left,
        unlearned=unlearned,
        passes=len(first.passes),
        mixed=_mixed(session, first),
        climbs=_outside_climb(session, made),
        switched=_switches_on_purpose(first),
        advances=made.advances,
        seeds=seeds,
        sign=made.sign,
        is_loss=made.is_loss,
        strays=tuple(_strays(session, made)),
        switches=tuple(frozen_in_vain(model)),
        idle_schedules=_idle_schedules(session, made),
        raised=made.raised,
        raised_at=len(made.seen) + 1 if made.raised else 0,
        growing=tuple(lists.growing),
        untied=untied,
        copies=copies,
        overfit=best,
        resumed=differs,
        calls=session.called,
        seconds=time.perf_counter() - start,
    )
    assert made.observation is not None
    notes = (*made.observation.notes, *_notes(session))
    return replace(made.observation, stepped=stepped, notes=notes)


def _notes(session: Session) -> Iterator[str]:
    for kind in dict.fromkeys(session.snapshot.iterators):
        yield (
            f"the step reads an iterator from around it ({kind}), which cannot be put back: it has "
            f"moved on by what {session.called} calls take; give the batch as an argument"
        )


def _call(session: Session, calls: int, lists: Lists) -> _Calls:
    """Call the step several times from the beginning."""
    made, watch = _Calls(), session.watch()
    counting = _Swallowed(session)
    session.restored = [_epoch(one) for one in session.given.restore]
    schedules, starts, ends = _schedules(session), list[Tensor](), list[Tensor]()
    number = -1
    while (number := number + 1) < calls or (number < _MOST_CALLS and _waits(session, made)):
        before = {key: p.detach().clone() for key, p in session.parameters.items()}
        starts.append(torch.get_rng_state())
        try:
            if number:
                seen = session.watched(watch)
            else:
                seen, made.observation = session.observed(watch)
        except Exception as error:
            if not number:
                raise
            made.raised = said(error)
            break
        if not number:
            _require_loss(session, seen.result)
            if isinstance(seen.result, Tensor):
                made.sign, made.is_loss = sign_of(seen.result), is_made_by_a_loss(seen.result)
        sizes = {key: norm(value) or 1.0 for key, value in before.items()}
        made.seen.append(seen)
        if not number:
            made.outside = _outside(before, seen)
            made.names = [(n, id(p), p.requires_grad) for n, p in session.model.named_parameters()]
        made.changes.append(
            {key: _change(session.parameters[key], before[key]) / sizes[key] for key in before}
        )
        made.relative.append({key: size / sizes[key] for key, size in seen.updated.items()})
        given = session.given.optimizers
        made.rates.append({id(optimizer): rate_of(optimizer) for optimizer in given})
        ends.append(torch.get_rng_state())
        counting.add(seen)
        lists.look()
        _let_go(seen, keep=number < _COMPARED)
    made.swallowed = counting.shares()
    made.advances = _schedules(session) != schedules
    made.restored = [_epoch(one) for one in session.given.restore]
    draws = bool(ends) and not torch.equal(starts[0], ends[0])
    same = len(ends) > 1 and all(torch.equal(ends[0], end) for end in ends[1:])
    made.ends_at = ends[0] if draws and same else None
    return made


def _ends_at(session: Session, end: Tensor | None) -> bool:
    """Whether a call leaves the random numbers there from another start, too: it sets a seed.

    A step that draws in its first call only leaves them as they are in later ones.
    """
    if end is None:
        return False
    session.rewind()
    torch.rand(1)
    try:
        session.call()
    except Exception:  # noqa: BLE001 - the user's
        return False
    return torch.equal(torch.get_rng_state(), end)


_COMPARED = 2
_MOST_CALLS = 32
"""A step that seems to wait for its turn is called so often to see whether it comes."""


def _waits(session: Session, made: _Calls) -> bool:
    """Whether nothing has moved so far, and more calls may tell: gradients add up, say."""
    if any(any(changes.values()) for changes in made.changes) or len(made.seen) < _COMPARED:
        return False
    overflows = any(not math.isfinite(size) for seen in made.seen for size in seen.added.values())
    no_step = not any(seen.steps_in_all for seen in made.seen)
    adds_up = no_step and any(
        made.seen[-1].added.get(key, 0.0) > size for key, size in made.seen[0].added.items() if size
    )
    return overflows or adds_up


def _epoch(one: Any) -> int | None:
    kinds = torch.optim.lr_scheduler.LRScheduler
    return one.last_epoch if isinstance(one, kinds) else None


def _idle_schedules(session: Session, made: _Calls) -> tuple[str, ...]:
    """Return the schedules in `restore` that no call advances."""
    return tuple(
        type(one).__name__
        for one, before, after in zip(
            session.given.restore, session.restored, made.restored, strict=True
        )
        if before is not None and before == after
    )


def _schedules(session: Session) -> list[int]:
    """Return how far each learning rate schedule is that the step reaches."""
    kinds = torch.optim.lr_scheduler.LRScheduler
    return [one.last_epoch for one in session.snapshot.found if isinstance(one, kinds)]


def _let_go(seen: Watched, *, keep: bool) -> None:
    """Keep no graph of a call, and gradients only of those that others are held against."""
    seen.result, seen.at_first = loss_in(seen.result), {}
    if not keep:
        seen.gradients = {key: g.new_zeros(()) for key, g in seen.gradients.items()}


def _require_loss(session: Session, result: Any) -> None:
    if loss_in(result) is None:
        shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
        kind = "nothing" if result is None else type(result).__name__
        raise InspectionError(
            f"{session.given.name} returned {kind}{shape}, not the loss: return "
            "it as a scalar tensor, a number, or under the key 'loss' of a mapping"
        )


def _outside(before: dict[int, Tensor], seen: Watched) -> dict[int, Tensor]:
    """Return what changed parameters in a call before their optimizer first stepped."""
    found = {}
    for key, now in seen.at_first.items():
        start = before[key]
        if now.shape == start.shape and not torch.equal(now, start):
            found[key] = widened(now) - widened(start)
    return found


def _change(parameter: Tensor, before: Tensor) -> float:
    now = parameter.detach()
    if now.shape != before.shape:
        return 1.0
    if torch.equal(now, before):
        return 0.0
    return norm(widened(now) - widened(before))


class _Swallowed:
    """Counts the weights that have a gradient and do not move."""

    def __init__(self, session: Session) -> None:
        self._parameters = {k: p for k, p in session.parameters.items() if p.is_floating_point()}
        self._before = {k: p.detach().clone() for k, p in self._parameters.items()}
        self._asked = {k: torch.zeros_like(p, dtype=torch.bool) for k, p in self._before.items()}

    def add(self, seen: Watched) -> None:
        """Take in one call."""
        for key in seen.at_step & self._parameters.keys():
            self._asked[key] |= seen.gradients[key] != 0

    def shares(self) -> dict[int, float]:
        """Return the share of each parameter."""
        found = {}
        for key, asked in self._asked.items():
            still = asked & (self._parameters[key].detach() == self._before[key])
            found[key] = float(still.sum()) / max(int(asked.sum()), 1)
        return found


# ---- what was seen, as data


def _parameters(session: Session, made: _Calls) -> Iterator[SteppedParameter]:
    held = {id(p) for optimizer in _all_optimizers(session, made) for p in parameters_of(optimizer)}
    stepped = [one for one in _all_optimizers(session, made) if id(one) in _stepping(made)]
    owners = [{id(p) for p in parameters_of(optimizer)} for optimizer in stepped]
    for name, key, parameter in session.named:
        layer, _, own = name.rpartition(".")
        yield SteppedParameter(
            name=name,
            layer=layer,
            own=own,
            dimensions=parameter.ndim,
            dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=parameter.requires_grad,
            held=key in held,
            added=tuple(seen.added.get(key) for seen in made.seen),
            gradients=tuple(_gradient(seen, key) for seen in made.seen),
            updates=tuple(relative.get(key, 0.0) for relative in made.relative),
            changes=tuple(changes.get(key, 0.0) for changes in made.changes),
            rates=tuple(seen.rates.get(key) for seen in made.seen),
            left_over=tuple(key in seen.left_over for seen in made.seen),
            swallowed=made.swallowed.get(key, 0.0),
            erased=all(key in seen.erased for seen in made.seen),
            is_zero=key in session.zeros,
            shared=len({len(one) for one in owners if key in one}) > 1,
        )


def _strays(session: Session, made: _Calls) -> Iterator[str]:
    """Yield parameters outside of the model's registry, or newer than it, that nobody moves.

    They have a gradient, and no optimizer holds them.
    """
    held = {id(p) for optimizer in _all_optimizers(session, made) for p in parameters_of(optimizer)}
    reached = {key for seen in made.seen for key, size in seen.added.items() if size}
    moved = {key for changes in made.changes for key, size in changes.items() if size}
    for key, name in session.strays.items():
        if key in reached - held - moved:
            yield name
    known = set(session.parameters)
    yield from (
        name
        for name, key, trainable in made.names
        if trainable and key not in known and key not in held
    )


def _mixed(session: Session, first: Watched) -> str:
    """Return an optimizer that steps on two losses, one of which trains another one's part.

    A pass that reaches only its parameters, and one that reaches another's too, both go into its
    first step.
    """
    owners = [
        (optimizer, {id(p) for p in parameters_of(optimizer)})
        for optimizer in session.given.optimizers
    ]
    for optimizer, own in owners:
        others = [held - own for other, held in owners if other is not optimizer]
        steps = first.steps.get(id(optimizer))
        within = [] if steps is None else [first.passes.get(task, set()) for task in steps.passes]
        shared = [any(reached & held for held in others) for reached in within]
        if any(shared) and not all(shared):
            return type(optimizer).__name__
    return ""


def _outside_climb(session: Session, made: _Calls) -> float | None:
    """Return the cosine between what moved weights outside of optimizers, and their gradient.

    ``None`` where nothing did, in the first call.
    """
    first, product, moves, gradients = made.seen[0], 0.0, 0.0, 0.0
    for key, moved in made.outside.items():
        gradient = first.gradients.get(key)
        if gradient is not None and gradient.shape == moved.shape:
            wide = widened(gradient)
            product += inner(moved, wide)
            moves += norm(moved) ** 2
            gradients += norm(wide) ** 2
    return product / math.sqrt(moves * gradients) if moves and gradients else None


def _switches_on_purpose(first: Watched) -> bool:
    """Whether the step itself brings the model to evaluation mode, and not for a validation."""
    runs = first.runs
    return (
        first.began
        and bool(runs)
        and not any(training for training, _ in runs)
        and all(enabled for _, enabled in runs)
    )


def _stepping(made: _Calls) -> set[int]:
    return {key for seen in made.seen for key in seen.steps}


def _gradient(seen: Watched, key: int) -> float | None:
    return norm(seen.gradients[key]) if key in seen.at_step else None


def _all_optimizers(session: Session, made: _Calls) -> list[Any]:
    given = {id(optimizer): optimizer for optimizer in session.given.optimizers}
    for seen in made.seen:
        given |= {key: one for key, one in seen.optimizers.items() if key not in given}
    return list(given.values())


def _optimizers(session: Session, made: _Calls) -> Iterator[SteppedOptimizer]:
    known = {id(p) for p in session.model.parameters()}
    given = {id(optimizer) for optimizer in session.given.optimizers}
    for optimizer in _all_optimizers(session, made):
        key, held = id(optimizer), parameters_of(optimizer)
        steps = [seen.steps.get(key) for seen in made.seen]
        rates = [
            rates.get(key, 0.0) if one is None else one.rate
            for one, rates in zip(steps, made.rates, strict=True)
        ]
        groups = optimizer.param_groups
        initial = [float(g["initial_lr"]) for g in groups if "initial_lr" in g]
        yield SteppedOptimizer(
            type_name=type(optimizer).__name__,
            given=key in given,
            holds=len(held),
            foreign=sum(id(p) not in known for p in held),
            steps=tuple(0 if one is None else one.count for one in steps),
            rates=tuple(rates),
            initial_rate=max(initial, default=None),
            decay=max((_decay(group) for group in groups), default=0.0),
            eps=max((float(g["eps"]) for g in groups if _is_number(g.get("eps"))), default=None),
            second_moment=_second_moment(optimizer),
            maximizes=any(group.get("maximize") for group in groups),
            reached=any(any(_have_gradients(seen, held)) for seen in made.seen),
            anew=key not in given and sum(one is not None for one in steps) == 1,
            layer=_layer_of(session, held),
            closure=any(one is not None and one.closure for one in steps),
            piled=any(one is not None and one.piled for one in steps),
            constant=all(one is not None and _is_constant(one.evaluations) for one in steps),
            betas=_betas(groups),
            spread=_spread(groups),
            frozen_groups=_frozen_groups(groups),
            repeated=any(one is not None and one.repeated for one in steps),
            stale=any(one is not None and one.stale for one in steps),
            direction=next((_cosine(one.along) for one in steps if one is not None), None),
        )


def _have_gradients(seen: Watched, held: list[Tensor]) -> Iterator[bool]:
    """Yield for each of these parameters whether it had a gradient, zeros too."""
    for parameter in held:
        yield id(parameter) in seen.added or id(parameter) in seen.gradients


def _layer_of(session: Session, held: list[Tensor]) -> str:
    """Return the layer of the first parameter that an optimizer holds; ``""`` if it has none."""
    keys = {id(p) for p in held}
    return next((n.rpartition(".")[0] for n, key, _ in session.named if key in keys), "")


def _is_constant(evaluations: list[float]) -> bool:
    """Whether a closure returned the very same number, not zero, at every evaluation."""
    return len(evaluations) > 1 and len(set(evaluations)) == 1 and bool(evaluations[0])


def _betas(groups: list[dict[str, Any]]) -> tuple[float, ...]:
    betas = next((g["betas"] for g in groups if isinstance(g.get("betas"), tuple)), ())
    return tuple(float(beta) for beta in betas)


def _spread(groups: list[dict[str, Any]]) -> float:
    """Return the least positive learning rate of a group by the largest."""
    rates = [float(g.get("lr") or 0.0) for g in groups if float(g.get("lr") or 0.0) > 0.0]
    return min(rates) / max(rates) if rates else 1.0


def _frozen_groups(groups: list[dict[str, Any]]) -> int:
    frozen = [all(not p.requires_grad for p in g["params"]) for g in groups if g["params"]]
    return sum(frozen) if not all(frozen) else 0


def _decay(group: dict[str, Any]) -> float:
    return float(group.get("lr") or 0.0) * float(group.get("weight_decay") or 0.0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _cosine(along: tuple[float, float, float]) -> float | None:
    product, update, gradient = along
    return product / math.sqrt(update * gradient) if update and gradient else None


def _second_moment(optimizer: Any) -> float | None:
    """Return the median over parameters of the root mean square of the gradient, as it keeps it."""
    roots = []
    for kept in getattr(optimizer, "state", {}).values():
        moment = kept.get("exp_avg_sq", kept.get("square_avg")) if isinstance(kept, dict) else None
        if isinstance(moment, Tensor) and moment.numel():
            roots.append(math.sqrt(max(float(moment.double().mean()), 0.0)))
    return statistics.median(roots) if roots else None


def _modes(model: nn.Module, made: _Calls, session: Session) -> Iterator[LayerMode]:
    still = _still_statistics(session, made)
    for name, module in model.named_modules():
        ran = [seen.modes.get(module, set()) for seen in made.seen]
        if not any(ran):
            continue
        own = list(module.parameters(recurse=False))
        with_gradient = [{training for training, enabled in one if enabled} for one in ran]
        yield LayerMode(
            layer=name,
            training=tuple(any(modes) if modes else None for modes in with_gradient),
            without_gradient=not any(with_gradient),
            trainable=any(p.requires_grad for p in own),
            kind=_kind(module),
            still=module in still,
            unseen=any((True, False) in one and (True, True) in one for one in ran),
            drifts=_drifts(module, session, made),
            hasty=_kind(module) == "batch_norm" and (getattr(module, "momentum", 0) or 0) > 0.5,
        )


def _drifts(module: nn.Module, session: Session, made: _Calls) -> bool:
    """Whether a normalisation that is frozen, and that nothing else moves, keeps new statistics."""
    own = list(module.parameters(recurse=False))
    if module not in session.first_statistics or not own or any(p.requires_grad for p in own):
        return False
    moved = any(changes.get(id(p)) for changes in made.changes for p in own)
    mean = module.running_mean
    return not moved and not torch.equal(mean, session.first_statistics[module])  # type: ignore[arg-type]


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0:
        return "dropout"
    if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
        return "dropout"
    if isinstance(module, nn.MultiheadAttention) and module.dropout:
        return "dropout"
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    if is_norm and module.running_mean is not None:
        return "batch_norm"
    return ""


def _still_statistics(session: Session, made: _Calls) -> set[nn.Module]:
    """Return the normalisations that ran in training mode and kept their statistics."""
    before = session.first_statistics
    return {
        module
        for module, mean in before.items()
        if any((True, True) in seen.modes.get(module, set()) for seen in made.seen)
        and torch.equal(mean, module.running_mean)  # type: ignore[arg-type]
    }
