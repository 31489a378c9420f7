"""What a step leaves to the next: modes, running statistics, its batch, its state, its options."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.report import Finding, Stepped
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import is_inside, parent
from pytest_modelhealth.training.contract import Broken, Table, listed, marked

_DROPOUTS: Table = {
    "anew": (
        "the backward pass runs {} again by other random numbers than those of the loss",
        "preserve_rng_state=False in a checkpoint, or a seed that is set around it",
        "fail",
    ),
    "aside": (
        "the dropout of {} is on, though it only runs without gradients",
        "a teacher or a reference that should say the same each time: call eval() on it",
        "warn",
    ),
}


def training_mode(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield what trains in evaluation mode: dropouts, and batch normalisations that learn."""
    yield from marked(step.modes, _DROPOUTS, broken)
    affected = [
        mode
        for mode in step.modes
        if False in mode.training
        if mode.kind == "dropout" or (mode.kind == "batch_norm" and mode.trainable)
    ]
    outermost = [m for m in step.modes if not any(is_inside(m.layer, n.layer) for n in step.modes)]
    is_whole = all(any(t is False for t in mode.training) for mode in outermost)
    if not is_whole:  # a part, of which an optimizer moves something
        moved = [p.layer for p in step.parameters if any(p.updates)]
        affected = [
            mode
            for mode in affected
            if (outer := parent(mode.layer))
            and any(layer == outer or is_inside(layer, outer) for layer in moved)
        ]
    if not affected:
        return
    call = min(mode.training.index(False) for mode in affected) + 1
    yield broken(
        f"{'the' if is_whole else 'a part of the'} model trains in evaluation mode"
        f"{f' from call {call} on' if call > 1 else ''}, without dropout or statistics of the "
        f"batch ({listed(affected)})",
        "model.train() is missing: after a validation, or after from_pretrained"
        if is_whole
        else "eval() was called on this part, which an optimizer moves: call train(), or freeze it",
        ["", *affected[1:]] if is_whole else affected[:1],
        value=float(len(affected)),
        severity="fail" if is_whole and not (step.switched and call == 1) else "warn",
        independent=is_whole,
    )


_MOVES: Table = {
    "still": (
        "the running statistics of {} do not move in training: evaluation normalises by the first",
        "momentum=0 (torch's is the share of the new batch), or buffers that are written back",
        "fail",
    ),
    "twice": (
        "the running statistics of {} take each batch twice: the backward pass runs it again",
        "keep batch normalisations out of a checkpoint, or its momentum at 0 in the second run",
        "warn",
    ),
    "drifts": (
        "the running statistics of {} move, although their normalisations are frozen",
        "requires_grad_(False) leaves statistics alone: call eval() on the frozen part too",
        "warn",
    ),
    "unseen": (
        "the running statistics of {} also move in a forward without gradients",
        "a forward for logging, counting or a look ahead, in training mode: call eval() around it",
        "warn",
    ),
    "hasty": (
        "the running statistics of {} are made of the latest batch by more than half",
        "torch's momentum is the share of the new batch, 0.1 as a rule: others write it as 0.9",
        "warn",
    ),
}


def running_statistics(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield the batch normalisations whose statistics do not follow what they learn from."""
    yield from marked(step.modes, _MOVES, broken, tensor="running_mean")


def batch_influence(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield that the batch, or a half of it, changes nothing, or is changed itself."""
    if step.writes:
        yield broken(
            "the step writes to its batch, so that a batch that is used again is another",
            "an operation in place (sub_, +=, x[...] = ...) on the batch: work on a copy",
            severity="warn",
        )
    if 0 < step.dropped < step.passes:
        yield broken(
            f"{step.dropped} of {step.passes} backward passes of a call are cleared by the next, "
            "before any optimizer has stepped on them",
            "the last window of micro-batches is not full: step after it as well",
            severity="warn",
        )
    idle = [h for h, counts in zip(("first", "second"), step.halves, strict=False) if not counts]
    if len(idle) == 1:
        yield broken(
            f"the {idle[0]} half of the batch ({step.samples // 2} samples) has no influence on "
            "the gradient",
            "a slice of the batch, one of several micro-batches that is kept, or a mask over "
            "places instead of samples",
            value=1.0,
            # a loss may weigh samples on purpose; what no layer sees is forgotten
            severity="warn" if step.runs_whole else "fail",
        )
    elif idle and any(any(p.changes) for p in step.parameters):
        yield broken(
            f"none of the {step.samples} samples of the batch has an influence on the parameters",
            "the step reads another batch, from around it; one that needs no data takes None",
            value=1.0,
        )


_LARGE = 0.05


def later_calls(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield what a later call raises, a loss that leaps, and graphs that are kept."""
    limit = settings["max_loss_growth"]
    losses = [loss for loss in step.losses if loss is not None]
    # by small updates, a loss may grow that starts at next to nothing
    leaps = any(size > _LARGE for p in step.parameters if p.dimensions > 1 for size in p.updates)
    most = limit.value * losses[0] if leaps and losses[0] > 0.0 else math.inf
    for call, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            cause = "the update before it was too large: the learning rate, or a scale left in it"
            if call == 1:
                cause = "see run_inspection for the layer where it begins"
            yield broken(f"the loss of call {call} is {loss}", cause, value=loss)
            break
        if loss > most:
            yield broken(
                f"on one batch the loss grows from {losses[0]:.4g} to {loss:.4g} by call {call}",
                "the learning rate is too large, or the update has the wrong sign",
                value=loss / losses[0],
                limit=limit,
            )
            break
    if step.raised:
        cause = "the step leaves something behind that the next call cannot work with"
        if "StopIteration" in step.raised:
            cause = "an iterator that the step reads from runs out: use the batch that it is given"
        elif "second time" in step.raised or "inplace" in step.raised:
            cause = "a hidden state, a mean or a loss is carried on with its graph; detach() it"
        yield broken(f"call {len(step.losses) + 1} of the step raises {step.raised}", cause)
    if step.growing:
        yield broken(
            f"{listed(step.growing)} grows by the graph of every call, which keeps the memory of "
            "all steps",
            "a loss or an output is kept, or added up, as it is: keep .detach() or .item()",
        )


_STALE = "the step uses"


def resumption(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield what differs after the saved state is loaded."""
    if step.resumed:
        what = f"the step after loading the saved state differs: {step.resumed} is another"
        cause = "it is not saved: a plain attribute, a buffer with persistent=False, or a "
        cause += "scheduler, scaler or moving average that is not in restore="
        if step.resumed.startswith(_STALE):
            cause = (
                "outputs, targets or weights of an earlier batch are kept, and used for this one"
            )
        yield broken(
            step.resumed if step.resumed.startswith("the step") else what,
            cause,
            [p for p in step.parameters if p.name == step.resumed],
        )


def weight_ties(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield weights that are tied by configuration, and two in the model."""
    if step.untied:
        output, source, who = step.untied
        layer, _, own = output.rpartition(".")
        yield broken(
            f"{output or 'the output embedding'} is tied to {source or 'the input embedding'} by "
            f"{who}, and is a tensor of its own in the model",
            "one was replaced, copied or loaded by assignment after tying: tie it again, by "
            "model.tie_weights() or as its __init__ does",
            [layer],
            tensor=own,
        )


_OPTIONS: Table = {
    "constant": (
        "is given a closure that returns the very same loss at every evaluation",
        "the loss is computed once, outside of the closure",
        "fail",
    ),
    "twice": (
        "holds a parameter twice in a group, which moves twice in each step",
        "parameters of two lists were joined that share one: keep each once",
        "fail",
    ),
    "emptied": (
        "has lost its state, its averages, before each later call",
        "state.clear(), load_state_dict or a new state in each step: keep what it has learnt",
        "fail",
    ),
    "hurried": (
        "takes one step where its schedule takes several, in each call: the rate runs ahead",
        "scheduler.step() in the loop over micro-batches, or called twice",
        "warn",
    ),
    "partly": (
        "has groups of one rate, of which only some follow its schedule",
        "a plan that changes the first group, or zips groups with a shorter list",
        "warn",
    ),
    "early": (
        "steps after its schedule: the first rate is skipped, and none is what it says",
        "call scheduler.step() after optimizer.step(), as torch asks for",
        "warn",
    ),
}
"""What an optimizer does by a trait of it, and the likely cause."""
_SPREAD = 1e5
"""Layer-wise decay of 0.65 over 24 layers makes 3e4."""


def optimizer_settings(step: Stepped, settings: Settings, broken: Broken) -> Iterator[Finding]:
    """Yield options that are legal and in no recipe."""
    if step.clips and not any(step.clips) and step.passes:
        yield broken(
            "nothing that clip_grad_norm_ is given has a gradient, so that it clips nothing",
            "it is called before backward(), with another model's parameters, or with a generator "
            "that was gone through before",
        )
    for one in step.optimizers:
        if len(one.betas) > 1 and one.betas[0] > one.betas[1]:
            yield broken(
                f"the betas of {one.type_name} are {one.betas[0]:g} and {one.betas[1]:g}: the "
                "average of the gradient is slower than that of its square",
                "the two are the wrong way round",
            )
        for trait in one.traits & _OPTIONS.keys():
            what, cause, grade = _OPTIONS[trait]
            yield broken(f"{one.type_name} {what}", cause, severity=grade)
        if one.spread > _SPREAD:
            yield broken(
                f"the learning rates of the groups of {one.type_name} differ by {one.spread:.2g}",
                "a decay by layer that is applied to each parameter, or other units",
                severity="warn",
            )
        if one.frozen_groups:
            yield broken(
                f"{one.type_name} has {one.frozen_groups} groups of frozen parameters alone",
                "requires_grad_(True) is missing after another stage, or the group is not needed",
                severity="warn",
            )
    if step.switches:
        yield broken(
            f"{listed(step.switches)} has an attribute requires_grad that freezes nothing: its "
            "parameters are trained",
            "module.requires_grad = False is no setting; call requires_grad_(False)",
        )
    if step.seeds:
        yield broken(
            "every call draws the very same random numbers, for dropout and noise",
            "a seed is set in the step",
        )
    shared = [p.name for p in step.parameters if "shared" in p.traits]
    if shared:
        what = f"several optimizers step {len(shared)} parameters: {listed(shared)}"
        yield broken(what, "an optimizer was made of the whole model", severity="warn")
