"""What a step leaves to the next: modes, running statistics, its batch, its state, its options."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.report import HalfInfluence, LayerMode, Stepped
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.training.contract.fault import broken, fault, listed, looks_for, whole

# ---- modes ---------------------------------------------------------------------------------------


@looks_for("training_mode")
def _in_evaluation(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield what trains in evaluation mode: dropouts, and batch normalisations that learn."""
    affected = [mode for mode in step.modes if _is_affected(mode)]
    if not affected:
        return
    root = next((mode for mode in step.modes if mode.layer == ""), None)
    outermost = _outermost(step) if root is None else [root]
    names = [mode.layer for mode in affected]
    call = min(mode.training.index(False) for mode in affected) + 1
    since = f" from call {call} on" if call > 1 else ""
    if outermost and all(any(t is False for t in mode.training) for mode in outermost):
        yield broken(
            check,
            f"the model trains in evaluation mode{since}: {_effects(affected)} ({listed(names)})",
            "model.train() is missing: after a validation, after from_pretrained, which returns a "
            "model in evaluation mode, or before the first step",
            ["", *names[1:]],
            value=float(len(affected)),
            severity="warn" if step.switched and call == 1 else "fail",
        )
    elif part := _part(affected, step):
        yield broken(
            check,
            f"a part of the model trains in evaluation mode{since}: "
            f"{_effects(part)} ({listed([mode.layer for mode in part])})",
            "eval() was called on this part, which an optimizer moves: call train() again, or "
            "freeze it",
            [part[0].layer],
            value=float(len(part)),
            severity="warn",
            independent=False,
        )


def _is_affected(mode: LayerMode) -> bool:
    ran_so = any(training is False for training in mode.training)
    return ran_so and (mode.kind == "dropout" or (mode.kind == "batch_norm" and mode.trainable))


def _outermost(stepped: Stepped) -> list[LayerMode]:
    """Return the layers that ran and lie in no other one that did."""
    names = {mode.layer for mode in stepped.modes}
    return [
        mode
        for mode in stepped.modes
        if not any(mode.layer.startswith(f"{name}.") for name in names)
    ]


def _effects(affected: list[LayerMode]) -> str:
    kinds = {mode.kind for mode in affected}
    said = {
        "dropout": "nothing is dropped",
        "batch_norm": "batch normalisation takes its running statistics",
    }
    return " and ".join(said[kind] for kind in sorted(kinds, reverse=True))


def _part(affected: list[LayerMode], stepped: Stepped) -> list[LayerMode]:
    """Return those whose own part of the model an optimizer moves."""
    moved = {p.layer for p in stepped.parameters if any(p.updates)}
    found = []
    for mode in affected:
        around = mode.layer.rpartition(".")[0]
        if any(layer == around or layer.startswith(f"{around}.") for layer in moved if around):
            found.append(mode)
    return found


# ---- running statistics --------------------------------------------------------------------------


def _odd(trait: str, what: str, cause: str, *, learns: bool, grade: Severity = "warn") -> None:
    """Add a fault of running statistics: of those of layers that learn, or of any."""
    fault(
        "running_statistics",
        lambda step: (
            mode for mode in step.modes if trait in mode.traits and (mode.trainable or not learns)
        ),
        "the running statistics of {names} " + what,
        cause,
        grade=grade,
        tensor="running_mean",
    )


_odd(
    "still",
    "do not move in training, so that evaluation normalises by what they were at the start",
    "momentum=0 (torch's momentum is the share of the new batch: 0.1 is usual), or buffers "
    "that are written back",
    learns=True,
    grade="fail",
)
_odd(
    "drifts",
    "move, although their normalisations are frozen",
    "requires_grad_(False) leaves statistics alone: call eval() on the frozen part too",
    learns=False,
)
fault(
    "running_statistics",
    lambda step: (
        mode for mode in step.modes if "unseen" in mode.traits and mode.kind == "batch_norm"
    ),
    "the running statistics of {names} also move in a forward without gradients, which "
    "runs in training mode",
    "a forward for logging, counting or a look ahead: call eval() around it",
    grade="warn",
    tensor="running_mean",
)
_odd(
    "hasty",
    "are made of the latest batch by more than half",
    "torch's momentum is the share of the new batch, 0.1 as a rule: 0.9 or 0.99 is how "
    "other frameworks write 0.1 or 0.01",
    learns=True,
)

# ---- the batch -----------------------------------------------------------------------------------


def _idle_half(step: Stepped) -> list[HalfInfluence]:
    """Return the half without effect, if one is, and not as no gradient comes to its samples."""
    idle = [h for h in step.halves if not h.effect and not h.rows == h.moved_rows == 1.0]
    return idle if len(idle) == 1 else []


fault(
    "batch_influence",
    whole(
        lambda step: (
            step.halves
            and not any(half.effect for half in step.halves)
            and any(any(p.changes) for p in step.parameters)
        )
    ),
    "none of the {samples} samples of the batch has an influence on what the step does: "
    "replaced by one another, they leave every parameter as it was",
    "the step reads another batch, from around it, or writes over the gradient; a step "
    "that needs no data takes None for a batch",
    facts=lambda _, step: {"samples": sum(half.samples for half in step.halves)},
)
fault(
    "batch_influence",
    _idle_half,
    "the {one.half} half of the batch ({one.samples} samples) has no influence on the "
    "gradient: replaced by other samples, it leaves every number as it was",
    "a slice of the batch, a loop over micro-batches of which one is kept, a part whose "
    "backward pass is missing, or a mask over places instead of samples",
    grade=lambda some, _: "warn" if some[0].rows == 1.0 else "fail",
)

# ---- later calls, and those after loading --------------------------------------------------------

_LARGE = 0.05
_RAISED = {
    "second time": "something with its graph is carried from call to call: a hidden state, a "
    "running mean, a loss; detach() it",
    "inplace": "something with its graph is carried from call to call: a hidden state, a "
    "running mean, a loss; detach() it",
    "StopIteration": "an iterator that the step reads from runs out, which cannot be put back: "
    "have the step work on the batch that it is given",
    "": "the step leaves something behind that the next call cannot work with",
}
"""The likely cause, by what the error has in it."""


@looks_for("later_calls")
def _diverging(check: Listed, step: Stepped, settings: Settings) -> Iterator[Finding]:
    """Yield that the loss is not finite in a later call, or far larger than in the first."""
    limit = settings["max_loss_growth"]
    losses = [loss for loss in step.losses if loss is not None]
    bad = next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), None)
    most = limit.value * losses[0] if losses and losses[0] > 0.0 else math.inf
    grown = next((n for n, loss in enumerate(losses) if loss > most), None)
    if bad is not None:
        yield broken(
            check,
            f"the loss of call {bad + 1} is {losses[bad]}",
            "see run_inspection for the layer where it begins"
            if not bad
            else "the update before it was too large: the learning rate, a scale that was not "
            "removed, or gradients that are not clipped",
            value=losses[bad],
        )
    elif grown is not None:
        # by small updates, a loss may grow that starts at next to nothing
        sizes = [size for p in step.parameters for size in p.updates if p.dimensions > 1]
        yield broken(
            check,
            f"on one batch the loss grows from {losses[0]:.4g} to {losses[grown]:.4g} by call "
            f"{grown + 1}",
            "the learning rate is too large, the gradient is not what it should be, or the update "
            "has the wrong sign",
            value=losses[grown] / losses[0],
            limit=limit,
            severity="fail" if max(sizes, default=0.0) > _LARGE else "warn",
        )


fault(
    "later_calls",
    whole(lambda step: step.raised),
    "call {step.raised_at} of the step raises {step.raised}",
    "{why}",
    measure=lambda step: float(step.raised_at),
    facts=lambda _, step: {
        "why": next(why for words, why in _RAISED.items() if words in step.raised)
    },
)
fault(
    "later_calls",
    lambda step: step.growing,
    "{names} grows by a tensor with its graph in every call, which keeps the memory of every step",
    "a loss or an output is appended as it is: append .detach() or .item()",
)


def _resumed(step: Stepped) -> str:
    resumed = step.resumed or ""
    what = f"the step after loading the saved state differs: {resumed} is another"
    return resumed if resumed.startswith("the step") else what


def _parameter(step: Stepped) -> tuple[str, str]:
    """Return the layer and own name of the parameter that differs, if one does."""
    names = {p.name: (p.layer, p.own) for p in step.parameters}
    return names.get(step.resumed or "", ("", ""))


fault(
    "resumption",
    whole(lambda step: step.resumed),
    "{what}",
    "something that the step goes on from is not saved: a plain attribute, a buffer with "
    "persistent=False, a scheduler, a scaler or a moving average that is not in restore=",
    at=_parameter,
    facts=lambda _, step: {"what": _resumed(step)},
)

# ---- what is tied, and what is a copy ------------------------------------------------------------

fault(
    "weight_ties",
    whole(lambda step: step.untied),
    "{out} is tied to {into} by the configuration (tie_word_embeddings), and is a tensor "
    "of its own in the model",
    "one of them was replaced, copied or loaded by assignment after tying: call "
    "model.tie_weights()",
    at=lambda step: step.untied[0].rpartition(".")[::2],
    facts=lambda _, step: {
        "out": step.untied[0] or "the output embedding",
        "into": step.untied[1] or "the input embedding",
    },
)
fault(
    "learning_copies",
    lambda step: step.copies,
    "{one[0]!r} starts as a copy of {one[1]!r}, and an optimizer moves it",
    "a slow copy is updated from the other's weights under no_grad: freeze it by "
    "requires_grad_(False) and leave it out of the optimizer",
    each=True,
    grade="warn",
    at=lambda pair: (pair[0], ""),
)

# ---- options that are legal and in no recipe -----------------------------------------------------

_SPREAD = 1e-5
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
    lambda step: (o for o in step.optimizers if o.spread < _SPREAD),
    "the learning rates of the groups of {one.type_name} differ by {times:.2g}",
    "a decay by layer that is applied to each parameter, or other units",
    each=True,
    grade="warn",
    facts=lambda some, _: {"times": 1.0 / some[0].spread},
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
    whole(lambda step: step.seeds),
    "every call draws the very same random numbers: the same units are dropped, the same "
    "noise is added",
    "a seed is set in the step",
)
fault(
    "optimizer_settings",
    lambda step: step.idle_schedules,
    "no call advances the {names} that restore names",
    "scheduler.step() is missing, or another schedule is made in the step",
    grade="warn",
)
fault(
    "optimizer_settings",
    lambda step: [p.name for p in step.parameters if p.shared],
    "several optimizers step {count} parameters: {names}",
    "an optimizer was made of the whole model in place of a part",
    grade="warn",
)
