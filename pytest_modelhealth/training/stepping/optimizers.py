"""What calls of a step did with each optimizer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.passive.updates import parameters_of
from pytest_modelhealth.report import SteppedOptimizer
from pytest_modelhealth.training.stepping.calls import Calls
from pytest_modelhealth.training.stepping.session import Session
from pytest_modelhealth.training.stepping.watching import Watched


def stepped_optimizers(session: Session, made: Calls) -> Iterator[SteppedOptimizer]:
    """Yield what each optimizer did."""
    known = {id(p) for p in session.model.parameters()}
    given = {id(optimizer) for optimizer in session.given.optimizers}
    given |= {id(one) for optimizer in session.given.optimizers for one in _wrapped(optimizer)}
    for optimizer in all_optimizers(session, made):
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
            stale=any(one is not None and one.stale for one in steps)
            or any(one is not None and one.leads and one.empty for one in steps[1:]),
            direction=next((_cosine(one.along) for one in steps if one is not None), None),
        )


def _wrapped(optimizer: Any) -> list[Any]:
    """Return the optimizers that one steps in its place, as those of accelerate do."""
    held = getattr(optimizer, "__dict__", {}).values()
    return [one for one in held if isinstance(one, torch.optim.Optimizer)]


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


def all_optimizers(session: Session, made: Calls) -> list[Any]:
    """Return the optimizers that were given, then others that stepped."""
    given = {id(optimizer): optimizer for optimizer in session.given.optimizers}
    for seen in made.seen:
        given |= {key: one for key, one in seen.optimizers.items() if key not in given}
    return list(given.values())
