"""What a step leaves to the next: modes, running statistics, its batch, its state, its options."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.report import Finding, LayerMode, Stepped
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.contract.fault import broken, fault, listed, looks_for

# ---- modes ---------------------------------------------------------------------------------------

_EFFECTS = {
    "dropout": "nothing is dropped",
    "batch_norm": "batch normalisation takes its running statistics",
}


@looks_for("training_mode")
def _in_evaluation(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield what trains in evaluation mode: dropouts, and batch normalisations that learn."""
    affected = [
        mode
        for mode in step.modes
        if False in mode.training
        if mode.kind == "dropout" or (mode.kind == "batch_norm" and mode.trainable)
    ]
    names = {mode.layer for mode in step.modes}
    outermost = [m for m in step.modes if not any(_is_inside(m.layer, name) for name in names)]
    is_whole = all(any(t is False for t in mode.training) for mode in outermost)
    if not is_whole:  # a part, of which an optimizer moves something
        moved = [p.layer for p in step.parameters if any(p.updates)]
        around = {mode.layer: mode.layer.rpartition(".")[0] for mode in affected}
        affected = [
            mode
            for mode in affected
            if (outer := around[mode.layer])
            and any(layer == outer or _is_inside(layer, outer) for layer in moved)
        ]
    if not affected:
        return
    call = min(mode.training.index(False) for mode in affected) + 1
    kinds = sorted({mode.kind for mode in affected}, reverse=True)
    layers = [mode.layer for mode in affected]
    yield broken(
        check,
        f"{'the' if is_whole else 'a part of the'} model trains in evaluation mode"
        f"{f' from call {call} on' if call > 1 else ''}: "
        f"{' and '.join(_EFFECTS[kind] for kind in kinds)} ({listed(layers)})",
        "model.train() is missing: after a validation, after from_pretrained, which returns a "
        "model in evaluation mode, or before the first step"
        if is_whole
        else "eval() was called on this part, which an optimizer moves: call train() again, or "
        "freeze it",
        ["", *layers[1:]] if is_whole else layers[:1],
        value=float(len(affected)),
        severity="fail" if is_whole and not (step.switched and call == 1) else "warn",
        independent=is_whole,
    )


def _is_inside(layer: str, outer: str) -> bool:
    return layer != outer and layer.startswith(f"{outer}." if outer else "")


# ---- running statistics --------------------------------------------------------------------------


def _with(trait: str, *, learns: bool = False) -> Callable[[Stepped], Iterator[LayerMode]]:
    """Return what gives the layers of a trait, of those that learn or of any."""
    return lambda step: (
        mode for mode in step.modes if trait in mode.traits and (mode.trainable or not learns)
    )


fault(
    "running_statistics",
    _with("still", learns=True),
    "the running statistics of {names} do not move in training, so that evaluation normalises by "
    "what they were at the start",
    "momentum=0 (torch's momentum is the share of the new batch: 0.1 is usual), or buffers "
    "that are written back",
    tensor="running_mean",
)
fault(
    "running_statistics",
    _with("drifts"),
    "the running statistics of {names} move, although their normalisations are frozen",
    "requires_grad_(False) leaves statistics alone: call eval() on the frozen part too",
    grade="warn",
    tensor="running_mean",
)
fault(
    "running_statistics",
    _with("unseen"),
    "the running statistics of {names} also move in a forward without gradients, which "
    "runs in training mode",
    "a forward for logging, counting or a look ahead: call eval() around it",
    grade="warn",
    tensor="running_mean",
)
fault(
    "running_statistics",
    _with("hasty", learns=True),
    "the running statistics of {names} are made of the latest batch by more than half",
    "torch's momentum is the share of the new batch, 0.1 as a rule: 0.9 or 0.99 is how "
    "other frameworks write 0.1 or 0.01",
    grade="warn",
    tensor="running_mean",
)

# ---- the batch -----------------------------------------------------------------------------------


@looks_for("batch_influence")
def _idle_samples(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield that the batch, or a half of it, changes nothing."""
    idle = [
        half for half, counts in zip(("first", "second"), step.halves, strict=False) if not counts
    ]
    if len(idle) == 1:
        yield broken(
            check,
            f"the {idle[0]} half of the batch ({step.samples // 2} samples) has no influence on "
            "the gradient: replaced by other samples, it leaves every number as it was",
            "a slice of the batch, a loop over micro-batches of which one is kept, a part whose "
            "backward pass is missing, or a mask over places instead of samples",
            value=1.0,
            # a loss may weigh samples on purpose; what no layer sees is forgotten
            severity="warn" if step.runs_whole else "fail",
            independent=not step.runs_whole,
        )
    elif idle and any(any(p.changes) for p in step.parameters):
        yield broken(
            check,
            f"none of the {step.samples} samples of the batch has an influence on what the step "
            "does: replaced by one another, they leave every parameter as it was",
            "the step reads another batch, from around it, or writes over the gradient; a step "
            "that needs no data takes None for a batch",
            value=1.0,
        )


# ---- later calls, and those after loading --------------------------------------------------------

_LARGE = 0.05


@looks_for("later_calls")
def _diverging(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield that the loss is not finite in a call, or far larger than in the first."""
    limit = settings["max_loss_growth"]
    losses = [loss for loss in step.losses if loss is not None]
    most = limit.value * losses[0] if losses and losses[0] > 0.0 else math.inf
    # by small updates, a loss may grow that starts at next to nothing
    leaps = any(size > _LARGE for p in step.parameters if p.dimensions > 1 for size in p.updates)
    for call, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            yield broken(
                check,
                f"the loss of call {call} is {loss}",
                "see run_inspection for the layer where it begins"
                if call == 1
                else "the update before it was too large: the learning rate, a scale that was not "
                "removed, or gradients that are not clipped",
                value=loss,
            )
            return
        if loss > most and leaps:
            yield broken(
                check,
                f"on one batch the loss grows from {losses[0]:.4g} to {loss:.4g} by call {call}",
                "the learning rate is too large, the gradient is not what it should be, or the "
                "update has the wrong sign",
                value=loss / losses[0],
                limit=limit,
            )
            return


@looks_for("later_calls")
def _raising(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield what a later call raises."""
    if not step.raised:
        return
    cause = "the step leaves something behind that the next call cannot work with"
    if "StopIteration" in step.raised:
        cause = (
            "an iterator that the step reads from runs out, which cannot be put back: have the "
            "step work on the batch that it is given"
        )
    elif "second time" in step.raised or "inplace" in step.raised:
        cause = (
            "something with its graph is carried from call to call: a hidden state, a running "
            "mean, a loss; detach() it"
        )
    call = len(step.losses) + 1
    yield broken(check, f"call {call} of the step raises {step.raised}", cause, value=float(call))


fault(
    "later_calls",
    lambda step: step.growing,
    "{names} grows by a tensor with its graph in every call, which keeps the memory of every step",
    "a loss or an output is kept as it is: keep .detach() or .item()",
)


@looks_for("resumption")
def _resuming(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield what differs after the saved state is loaded."""
    if step.resumed:
        names = {p.name: p for p in step.parameters}
        place = names.get(step.resumed)
        yield broken(
            check,
            step.resumed
            if step.resumed.startswith("the step")
            else f"the step after loading the saved state differs: {step.resumed} is another",
            "something that the step goes on from is not saved: a plain attribute, a buffer with "
            "persistent=False, a scheduler, a scaler or a moving average that is not in restore=",
            [place.layer] if place else [],
            value=1.0,
            tensor=place.own if place else "",
        )


@looks_for("weight_ties")
def _untied(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield weights that are tied by configuration, and two in the model."""
    if step.untied:
        output, source = step.untied
        layer, _, own = output.rpartition(".")
        yield broken(
            check,
            f"{output or 'the output embedding'} is tied to {source or 'the input embedding'} by "
            "the configuration (tie_word_embeddings), and is a tensor of its own in the model",
            "one of them was replaced, copied or loaded by assignment after tying: call "
            "model.tie_weights()",
            [layer],
            value=1.0,
            tensor=own,
        )


# ---- options that are legal and in no recipe -----------------------------------------------------

_SPREAD = 1e5
"""Layer-wise decay of 0.65 over 24 layers makes 3e4."""
fault(
    "optimizer_settings",
    lambda step: (o for o in step.optimizers if len(o.betas) > 1 and o.betas[0] > o.betas[1]),
    "the betas of {one.type_name} are {one.betas[0]:g} and {one.betas[1]:g}: the average "
    "of the gradient is slower than that of its square",
    "the two are the wrong way round",
    each=True,
)
fault(
    "optimizer_settings",
    lambda step: (o for o in step.optimizers if "constant" in o.traits),
    "the closure of {one.type_name} returns the very same loss at every evaluation",
    "the loss is computed once, outside of the closure",
    each=True,
)
fault(
    "optimizer_settings",
    lambda step: (o for o in step.optimizers if o.spread > _SPREAD),
    "the learning rates of the groups of {one.type_name} differ by {one.spread:.2g}",
    "a decay by layer that is applied to each parameter, or other units",
    each=True,
    grade="warn",
)
fault(
    "optimizer_settings",
    lambda step: (o for o in step.optimizers if o.frozen_groups),
    "{one.type_name} has {one.frozen_groups} groups in which every parameter is frozen",
    "requires_grad_(True) is missing after another stage; what is frozen needs no group",
    each=True,
    grade="warn",
)
fault(
    "optimizer_settings",
    lambda step: step.switches,
    "{names} has an attribute requires_grad that freezes nothing: its parameters are trained",
    "module.requires_grad = False is no setting; call requires_grad_(False)",
)
fault(
    "optimizer_settings",
    lambda step: [step] if step.seeds else [],
    "every call draws the very same random numbers: the same units are dropped, the same "
    "noise is added",
    "a seed is set in the step",
)
fault(
    "optimizer_settings",
    lambda step: [p.name for p in step.parameters if p.shared],
    "several optimizers step {count} parameters: {names}",
    "an optimizer was made of the whole model in place of a part",
    grade="warn",
)
