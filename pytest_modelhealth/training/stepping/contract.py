"""Calls a training step a few times and takes down what it did, as a `Stepped`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.passive.hooks import parameters_of
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import Selection
from pytest_modelhealth.report import Observation, Stepped, SteppedOptimizer, SteppedParameter
from pytest_modelhealth.training.stepping.calls import Calls, call_step, layer_modes
from pytest_modelhealth.training.stepping.interventions import (
    half_influence,
    loss_slope,
    overfitted,
    resumed,
    sets_a_seed,
    slope_without_gradient,
)
from pytest_modelhealth.training.stepping.session import Session, TrainingStep, loss_in
from pytest_modelhealth.training.stepping.watching import Steps, cosine, norm


def run_contract(
    given: TrainingStep,
    selection: Selection,
    *,
    calls: int = 3,
    overfit: int | None = None,
    resume: bool = False,
) -> Observation:
    """Return what the step did, and the layers of its first call; all else is as it was.

    Args:
        given: the step, and what it works on.
        selection: which roles of which layers to observe in the first call.
        calls: how often the step is called from the beginning.
        overfit: how often on the one batch; ``None`` not at all.
        resume: whether it has to resume from its saved state.

    Raises:
        InspectionError: an argument is wrong, or the step returns no loss.
        Exception: whatever the first call raises, untouched.
    """
    given.require_sound()
    numbers: list[tuple[str, object, int]] = [("calls", calls, 1)]
    numbers += [] if overfit is None else [("overfit", overfit, 2)]
    for name, value, least in numbers:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InspectionError(f"{name} must be a whole number from {least} on, not {value!r}")
    model, session = given.model, Session(given, selection)
    with session.open():
        untied = untied_weights(model)
        made = call_step(session, calls)
        first = made.seen[0]
        stepped = Stepped(
            losses=tuple(loss_in(seen.result) for seen in made.seen),
            parameters=tuple(stepped_parameters(session, made)),
            optimizers=tuple(stepped_optimizers(session, made)),
            modes=tuple(layer_modes(session, made)),
            samples=session.samples,
            runs_whole=session.samples in first.sizes,
            passes=len(first.passes),
            # the step itself brings the model to evaluation mode, and not for a validation
            switched=first.began and first.modes.get(model) == {(False, True)},
            strays=tuple(strays(session, made)),
            switches=tuple(frozen_in_vain(model)),
            untied=untied,
            slope=loss_slope(session, first),
            unlearned=slope_without_gradient(session, made.seen),
            halves=half_influence(session, first, len(made.seen)),
            seeds=made.ends_at is not None and sets_a_seed(session, made.ends_at),
            overfit=None if overfit is None else overfitted(session, overfit),
            resumed=resumed(session) if resume else "",
            **made.facts,
        )
    assert made.observation is not None
    notes = (
        f"the step reads an iterator from around it ({kind}), which cannot be put back: it has "
        f"moved on by what {session.called} calls take; give the batch as an argument"
        for kind in dict.fromkeys(session.reached.iterators)
    )
    return replace(made.observation, stepped=stepped, notes=(*made.observation.notes, *notes))


def all_optimizers(session: Session, made: Calls) -> list[Any]:
    """Return the optimizers that were given, then others that stepped."""
    every = [*session.given.optimizers]
    every += [steps.optimizer for seen in made.seen for steps in seen.steps.values()]
    return list({id(optimizer): optimizer for optimizer in every}.values())


def _held(session: Session, made: Calls) -> set[int]:
    return {id(p) for optimizer in all_optimizers(session, made) for p in parameters_of(optimizer)}


def stepped_parameters(session: Session, made: Calls) -> Iterator[SteppedParameter]:
    """Yield what was done to each parameter of the model."""
    held, calls = _held(session, made), made.seen
    if not all_optimizers(session, made):  # the step moves them itself, or means to
        held = made.moved or {key for _, key, _ in session.named}
    stepping = {key: steps.optimizer for seen in calls for key, steps in seen.steps.items()}
    owners = [{id(p) for p in parameters_of(optimizer)} for optimizer in stepping.values()]
    for name, key, parameter in session.named:
        yield SteppedParameter(
            name=name,
            dimensions=parameter.ndim,
            dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=parameter.requires_grad,
            held=key in held,
            added=tuple(seen.added.get(key) for seen in calls),
            gradients=tuple(
                norm(seen.gradients[key]) if key in seen.at_step else None for seen in calls
            ),
            updates=tuple(seen.updated.get(key, 0.0) for seen in calls),
            changes=tuple(seen.changes.get(key, 0.0) for seen in calls),
            swallowed=made.swallowed.get(key, 0.0),
            used_again=any(key in seen.used_again for seen in calls),
            erased=all(key in seen.erased for seen in calls),
            is_zero=key in session.zeros,
            shared=len({len(one) for one in owners if key in one}) > 1,
        )


def strays(session: Session, made: Calls) -> Iterator[str]:
    """Yield parameters outside of the model's registry, or newer than it, that nobody moves.

    They have a gradient, and no optimizer holds them.
    """
    held = _held(session, made)
    reached = {key for seen in made.seen for key, size in seen.added.items() if size}
    for key, name in session.strays.items():
        if key in reached - held - made.moved:
            yield name
    for name, key, trainable in made.names:
        if trainable and key not in session.parameters and key not in held:
            yield name


def stepped_optimizers(session: Session, made: Calls) -> Iterator[SteppedOptimizer]:
    """Yield what each optimizer did."""
    known = {id(p) for p in session.model.parameters()}
    given = {id(optimizer) for optimizer in session.given.optimizers}
    for optimizer in session.given.optimizers:  # those of accelerate step one that they hold
        inside = getattr(optimizer, "__dict__", {}).values()
        given |= {id(one) for one in inside if isinstance(one, torch.optim.Optimizer)}
    names = {key: name for name, key, _ in session.named}
    reached = {key for seen in made.seen for key in (*seen.added, *seen.gradients)}
    for optimizer in all_optimizers(session, made):
        key, groups = id(optimizer), optimizer.param_groups
        held = {id(p) for p in parameters_of(optimizer)}
        steps = [seen.steps.get(key) or Steps(optimizer) for seen in made.seen]
        ran = [one for one in steps if one.count]
        losses = [one.evaluations for one in ran]
        traits = {
            "maximizes": any(group.get("maximize") for group in groups),
            "anew": key not in given and len(ran) == 1,
            "closure": any(losses),
            "unreached": key in given and ran and held and not held & reached,
            "constant": ran and all(len(one) > 1 and len({*one, 0.0}) == 2 for one in losses),
        }
        initial = [float(group["initial_lr"]) for group in groups if "initial_lr" in group]
        rates = [rate for group in groups if (rate := _number(group, "lr")) > 0.0]
        frozen = [all(not p.requires_grad for p in g["params"]) for g in groups if g["params"]]
        decays = [_number(group, "lr") * _number(group, "weight_decay") for group in groups]
        yield SteppedOptimizer(
            type_name=type(optimizer).__name__,
            given=key in given,
            holds=len(held),
            foreign=len(held - known),
            first=next((names[id(p)] for p in parameters_of(optimizer) if id(p) in names), ""),
            steps=tuple(one.count for one in steps),
            rates=tuple(one.rate for one in ran),
            initial_rate=max(initial, default=None),
            decay=max(decays, default=0.0),
            betas=next((tuple(map(float, g["betas"])) for g in groups if "betas" in g), ()),
            spread=max(rates) / min(rates) if rates else 1.0,
            frozen_groups=0 if all(frozen) else sum(frozen),
            direction=cosine(*ran[0].along) if ran else None,
            traits=frozenset(name for name, applies in traits.items() if applies),
        )


def _number(group: dict[str, Any], name: str) -> float:
    return float(group.get(name) or 0.0)


def untied_weights(model: nn.Module) -> tuple[str, ...]:
    """Return weights that a configuration of transformers ties, and the model does not."""
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    for module in model.modules():
        if getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            source, output = _embedding(module, "input"), _embedding(module, "output")
            if source is None or output is None or source.shape != output.shape:
                continue
            if source.data_ptr() != output.data_ptr():
                return names.get(id(output), ""), names.get(id(source), "")
    return ()


def _embedding(module: nn.Module, which: str) -> Tensor | None:
    try:
        weight = getattr(module, f"get_{which}_embeddings")().weight
    except Exception:  # noqa: BLE001 - a method of the user's, or none
        return None
    return weight if isinstance(weight, Tensor) else None


def frozen_in_vain(model: nn.Module) -> Iterator[str]:
    """Yield modules that were given an attribute ``requires_grad``, which freezes nothing."""
    for name, module in model.named_modules():
        wanted = vars(module).get("requires_grad")
        if isinstance(wanted, bool) and any(p.requires_grad != wanted for p in module.parameters()):
            yield name or type(module).__name__
