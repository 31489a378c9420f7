"""What calls of a step did to each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.capture.passive.updates import parameters_of
from pytest_modelhealth.report import SteppedParameter
from pytest_modelhealth.training.stepping.calls import Calls
from pytest_modelhealth.training.stepping.optimizers import all_optimizers
from pytest_modelhealth.training.stepping.session import Session
from pytest_modelhealth.training.stepping.watching import Watched, inner, norm, widened


def stepped_parameters(session: Session, made: Calls) -> Iterator[SteppedParameter]:
    """Yield what was done to each parameter of the model."""
    held = {id(p) for optimizer in all_optimizers(session, made) for p in parameters_of(optimizer)}
    stepped = [one for one in all_optimizers(session, made) if id(one) in _stepping(made)]
    owners = [{id(p) for p in parameters_of(optimizer)} for optimizer in stepped]
    moved = {key for changes in made.changes for key, size in changes.items() if size}
    if not all_optimizers(session, made):  # the step moves them itself, or means to
        held = moved or {key for _, key, _ in session.named}
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


def _gradient(seen: Watched, key: int) -> float | None:
    return norm(seen.gradients[key]) if key in seen.at_step else None


def _stepping(made: Calls) -> set[int]:
    return {key for seen in made.seen for key in seen.steps}


def strays(session: Session, made: Calls) -> Iterator[str]:
    """Yield parameters outside of the model's registry, or newer than it, that nobody moves.

    They have a gradient, and no optimizer holds them.
    """
    held = {id(p) for optimizer in all_optimizers(session, made) for p in parameters_of(optimizer)}
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
    return product / math.sqrt(moves * gradients) if moves and gradients else None
