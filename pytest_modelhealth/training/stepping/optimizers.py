"""The optimizers of a step: what they hold, what they do, and designs that mean it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.passive.updates import parameters_of
from pytest_modelhealth.report import SteppedOptimizer, SteppedParameter
from pytest_modelhealth.training.stepping.calls import Calls
from pytest_modelhealth.training.stepping.session import Session
from pytest_modelhealth.training.stepping.watching import Steps, Watched, inner, norm, widened


def stepped_parameters(session: Session, made: Calls) -> Iterator[SteppedParameter]:
    """Yield what was done to each parameter of the model."""
    held = {id(p) for optimizer in all_optimizers(session, made) for p in parameters_of(optimizer)}
    stepping = {key for seen in made.seen for key in seen.steps}
    stepped = [one for one in all_optimizers(session, made) if id(one) in stepping]
    owners = [{id(p) for p in parameters_of(optimizer)} for optimizer in stepped]
    if not all_optimizers(session, made):  # the step moves them itself, or means to
        held = made.moved or {key for _, key, _ in session.named}
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
            gradients=tuple(
                norm(seen.gradients[key]) if key in seen.at_step else None for seen in made.seen
            ),
            updates=tuple(seen.updated.get(key, 0.0) for seen in made.seen),
            changes=tuple(seen.changes.get(key, 0.0) for seen in made.seen),
            rates=tuple(seen.rates.get(key) for seen in made.seen),
            left_over=tuple(key in seen.left_over for seen in made.seen),
            swallowed=made.swallowed.get(key, 0.0),
            erased=all(key in seen.erased for seen in made.seen),
            is_zero=key in session.zeros,
            shared=len({len(one) for one in owners if key in one}) > 1,
        )


def strays(session: Session, made: Calls) -> Iterator[str]:
    """Yield parameters outside of the model's registry, or newer than it, that nobody moves.

    They have a gradient, and no optimizer holds them.
    """
    held = {id(p) for optimizer in all_optimizers(session, made) for p in parameters_of(optimizer)}
    reached = {key for seen in made.seen for key, size in seen.added.items() if size}
    for key, name in session.strays.items():
        if key in reached - held - made.moved:
            yield name
    known = set(session.parameters)
    yield from (
        name
        for name, key, trainable in made.names
        if trainable and key not in known and key not in held
    )


def mixed(session: Session, first: Watched) -> str:
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


def climbs(session: Session, made: Calls) -> float | None:
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
    return _cosine(product, moves, gradients)


_FOLLOWERS = frozenset({"target", "teacher", "ema", "momentum", "shadow", "slow", "average"})


def untied_weights(model: nn.Module) -> tuple[str, ...]:
    """Return weights that a configuration of transformers ties, and the model does not."""
    every = model.named_parameters(remove_duplicate=False)
    names = {id(parameter): name for name, parameter in every}
    found = []
    for module in model.modules():
        if not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            continue
        given, taken = _embedding(module, "input"), _embedding(module, "output")
        if given is None or taken is None or given.shape != taken.shape:
            continue
        if given.data_ptr() != taken.data_ptr():
            found += [names.get(id(taken), ""), names.get(id(given), "")]
            break
    return tuple(found)


def frozen_in_vain(model: nn.Module) -> Iterator[str]:
    """Yield modules that were given an attribute ``requires_grad``, which freezes nothing."""
    for name, module in model.named_modules():
        wanted = vars(module).get("requires_grad")
        if isinstance(wanted, bool) and any(p.requires_grad != wanted for p in module.parameters()):
            yield name or type(module).__name__


def _embedding(module: nn.Module, which: str) -> Tensor | None:
    try:
        layer = getattr(module, f"get_{which}_embeddings")()
    except Exception:  # noqa: BLE001 - a method of the user's, or none
        return None
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def copies(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return parts that are called followers and are copies now, each with what it is equal to."""
    parts = {name: part for name, part in model.named_modules() if name}
    followers = [name for name in parts if not _FOLLOWERS.isdisjoint(_words(name))]
    leaders = [name for name in parts if _words(name)[0] not in _FOLLOWERS]
    found = []
    for name in followers:
        equal = (o for o in leaders if o != name and _are_equal(parts[name], parts[o]))
        found += [(name, other) for other in islice(equal, 1)]
    return tuple(found)


def _words(name: str) -> list[str]:
    return name.rpartition(".")[2].lower().split("_")


def _are_equal(part: nn.Module, other: nn.Module) -> bool:
    """Whether both have the same parameters, by name and value, and some at all."""
    own, others = dict(part.named_parameters()), dict(other.named_parameters())
    is_alike = bool(own) and own.keys() == others.keys()
    return is_alike and all(torch.equal(own[name], others[name]) for name in own)


def moved_copies(
    found: tuple[tuple[str, str], ...], model: nn.Module, seen: list[Watched]
) -> tuple[tuple[str, str], ...]:
    """Return those of `copies` that an optimizer moved since."""
    moved = {key for one in seen for key, size in one.updated.items() if size > 0.0}
    return tuple(
        (name, other)
        for name, other in found
        if any(id(p) in moved for p in model.get_submodule(name).parameters())
    )


def stepped_optimizers(session: Session, made: Calls) -> Iterator[SteppedOptimizer]:
    """Yield what each optimizer did."""
    known = {id(p) for p in session.model.parameters()}
    given = {id(optimizer) for optimizer in session.given.optimizers}
    for optimizer in session.given.optimizers:  # those of accelerate step one that they hold
        held = getattr(optimizer, "__dict__", {}).values()
        given |= {id(one) for one in held if isinstance(one, torch.optim.Optimizer)}
    reached = {key for seen in made.seen for key in (*seen.added, *seen.gradients)}
    for optimizer in all_optimizers(session, made):
        key, held = id(optimizer), parameters_of(optimizer)
        steps = [seen.steps.get(key) or Steps() for seen in made.seen]
        ran = [one for one in steps if one.count]
        traits = set[str]().union(*(one.traits for one in ran))
        traits -= {"leads", "empty"}
        if any({"leads", "empty"} <= one.traits for one in steps[1:]):
            traits.add("stale")
        if key not in given and len(ran) == 1:
            traits.add("anew")
        if all(len(one.evaluations) > 1 and len({*one.evaluations, 0.0}) == 2 for one in steps):
            traits.add("constant")
        keys, groups = {id(p) for p in held}, optimizer.param_groups
        if any(group.get("maximize") for group in groups):
            traits.add("maximizes")
        if keys & reached:
            traits.add("reached")
        rates = [rate for g in groups if (rate := _number(g, "lr")) > 0.0]
        frozen = [all(not p.requires_grad for p in g["params"]) for g in groups if g["params"]]
        initial = [float(g["initial_lr"]) for g in groups if "initial_lr" in g]
        yield SteppedOptimizer(
            type_name=type(optimizer).__name__,
            given=key in given,
            holds=len(held),
            foreign=sum(id(p) not in known for p in held),
            steps=tuple(one.count for one in steps),
            rates=tuple(
                seen.steps[key].rate if key in seen.steps else seen.at_end.get(key, 0.0)
                for seen in made.seen
            ),
            initial_rate=max(initial, default=None),
            decay=max((_number(g, "lr") * _number(g, "weight_decay") for g in groups), default=0.0),
            eps=max(
                (float(g["eps"]) for g in groups if isinstance(g.get("eps"), int | float)),
                default=None,
            ),
            second_moment=_second_moment(optimizer),
            layer=next((n.rpartition(".")[0] for n, k, _ in session.named if k in keys), ""),
            betas=next((tuple(map(float, g["betas"])) for g in groups if "betas" in g), ()),
            spread=min(rates) / max(rates) if rates else 1.0,
            frozen_groups=0 if all(frozen) else sum(frozen),
            direction=_cosine(*ran[0].along) if ran else None,
            traits=frozenset(traits),
        )


def _number(group: dict[str, Any], name: str) -> float:
    return float(group.get(name) or 0.0)


def _cosine(product: float, update: float, gradient: float) -> float | None:
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
