"""Checks of what a step leaves to the next: modes, running statistics, its batch, its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.report import LayerMode, Stepped
from pytest_modelhealth.settings import Factor, Settings, Severity
from pytest_modelhealth.training.contract.step_check import StepCheck, listed


class TrainingMode(StepCheck):
    """Dropouts drop and batch normalisations normalise by the batch while the model learns."""

    name = "training_mode"
    summary = "A training step runs dropouts and trainable batch normalisations in training mode."
    rank = 65
    role = "activations"

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield what runs in evaluation mode."""
        affected = [mode for mode in stepped.modes if _is_affected(mode)]
        if not affected:
            return
        root = next((mode for mode in stepped.modes if mode.layer == ""), None)
        whole = _outermost(stepped) if root is None else [root]
        names = [mode.layer for mode in affected]
        call = min(mode.training.index(False) for mode in affected) + 1
        severity: Severity = "warn" if stepped.switched and call == 1 else "fail"
        since = f" from call {call} on" if call > 1 else ""
        if whole and all(any(t is False for t in mode.training) for mode in whole):
            yield self.broken(
                f"the model trains in evaluation mode{since}: {_effects(affected)} "
                f"({listed(names)})",
                "model.train() is missing: after a validation, after from_pretrained, which "
                "returns a model in evaluation mode, or before the first step",
                value=float(len(affected)),
                affected=names[1:],
                severity=severity,
            )
            return
        part = _part(affected, stepped)
        if part:
            yield self.broken(
                f"a part of the model trains in evaluation mode{since}: "
                f"{_effects(part)} ({listed([mode.layer for mode in part])})",
                "eval() was called on this part, which an optimizer moves: call train() "
                "again, or freeze it",
                layer=part[0].layer,
                value=float(len(part)),
                warns=True,
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


class RunningStatistics(StepCheck):
    """Batch normalisations that learn keep statistics that move."""

    name = "running_statistics"
    summary = "Running statistics of a batch normalisation that learns move in training."
    rank = 72
    role = "buffers"

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield the normalisations whose statistics do not follow the batches."""
        for odd in _ODD:
            names = [mode.layer for mode in stepped.modes if odd.applies(mode)]
            if names:
                yield self.broken(
                    f"the running statistics of {listed(names)} {odd.what}",
                    odd.cause,
                    layer=names[0],
                    value=float(len(names)),
                    tensor="running_mean",
                    affected=names[1:],
                    severity=odd.severity,
                    independent=odd.severity == "fail",
                )


class _Odd(NamedTuple):
    applies: Callable[[LayerMode], bool]
    what: str
    cause: str
    severity: Severity = "warn"


_ODD = (
    _Odd(
        lambda mode: "still" in mode.traits and mode.trainable,
        "do not move in training, so that evaluation normalises by what they were at the start",
        "momentum=0 (torch's momentum is the share of the new batch: 0.1 is usual), or buffers "
        "that are written back",
        "fail",
    ),
    _Odd(
        lambda mode: "drifts" in mode.traits,
        "move, although their normalisations are frozen",
        "requires_grad_(False) leaves statistics alone: call eval() on the frozen part too",
    ),
    _Odd(
        lambda mode: "unseen" in mode.traits and mode.kind == "batch_norm",
        "also move in a forward without gradients, which runs in training mode",
        "a forward for logging, counting or a look ahead: call eval() around it",
    ),
    _Odd(
        lambda mode: "hasty" in mode.traits and mode.trainable,
        "are made of the latest batch by more than half",
        "torch's momentum is the share of the new batch, 0.1 as a rule: 0.9 or 0.99 is how other "
        "frameworks write 0.1 or 0.01",
    ),
)


class BatchInfluence(StepCheck):
    """No half of the batch is dropped on the way to the optimizer."""

    name = "batch_influence"
    summary = "Each half of the batch changes the gradient that the optimizer steps on."
    rank = 64
    role = "inputs"

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield the half that is dropped."""
        idle = [half for half in stepped.halves if not half.effect]
        # where no gradient comes to the samples, wherever they stand, it is them that are masked
        idle = [half for half in idle if not half.rows == half.moved_rows == 1.0]
        moves = any(any(p.changes) for p in stepped.parameters)
        if moves and stepped.halves and not any(half.effect for half in stepped.halves):
            yield self.broken(
                f"none of the {sum(half.samples for half in stepped.halves)} samples of the batch "
                "has an influence on what the step does: replaced by one another, they leave every "
                "parameter as it was",
                "the step reads another batch, from around it, or writes over the gradient; a "
                "step that needs no data takes None for a batch",
            )
        if len(idle) != 1:
            return
        half = idle[0]
        yield self.broken(
            f"the {half.half} half of the batch ({half.samples} samples) has no influence on the "
            "gradient: replaced by other samples, it leaves every number as it was",
            "a slice of the batch, a loop over micro-batches of which one is kept, a part "
            "whose backward pass is missing, or a mask over places instead of samples",
            severity="warn" if half.rows == 1.0 else "fail",
        )


_LARGE = 0.05


class LaterCalls(StepCheck):
    """The second call is as good as the first."""

    name = "later_calls"
    summary = "A step can be called again, keeps no graph of the call before, and does not diverge."
    rank = 70
    role = "activations"
    settings = (
        Factor(
            "max_loss_growth",
            default=100.0,
            help="largest loss of a later call of a training step on one batch, by that of the "
            "first",
            per_layer=False,
        ),
    )

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield what goes wrong after the first call."""
        if stepped.raised:
            yield self.broken(
                f"call {stepped.raised_at} of the step raises {stepped.raised}",
                _why_raised(stepped.raised),
                value=float(stepped.raised_at),
            )
        if stepped.growing:
            yield self.broken(
                f"{listed(stepped.growing)} grows by a tensor with its graph in every call, which "
                "keeps the memory of every step",
                "a loss or an output is appended as it is: append .detach() or .item()",
                value=float(len(stepped.growing)),
            )
        limit = settings["max_loss_growth"]
        losses = [loss for loss in stepped.losses if loss is not None]
        bad = next((n for n, loss in enumerate(losses) if not math.isfinite(loss)), None)
        most = limit.value * losses[0] if losses and losses[0] > 0.0 else math.inf
        grown = next((n for n, loss in enumerate(losses) if loss > most), None)
        if bad is not None:
            yield self.broken(
                f"the loss of call {bad + 1} is {losses[bad]}",
                "see run_inspection for the layer where it begins"
                if not bad
                else "the update before it was too large: the learning rate, a scale that was not "
                "removed, or gradients that are not clipped",
                value=losses[bad],
            )
        elif grown is not None:
            # by small updates, a loss may grow that starts at next to nothing
            sizes = [size for p in stepped.parameters for size in p.updates if p.dimensions > 1]
            yield self.broken(
                f"on one batch the loss grows from {losses[0]:.4g} to {losses[grown]:.4g} by call "
                f"{grown + 1}",
                "the learning rate is too large, the gradient is not what it should be, or "
                "the update has the wrong sign",
                value=losses[grown] / losses[0],
                limit=limit,
                severity="fail" if max(sizes, default=0.0) > _LARGE else "warn",
            )


def _why_raised(text: str) -> str:
    if "second time" in text or "inplace" in text:
        return (
            "something with its graph is carried from call to call: a hidden state, a running "
            "mean, a loss; detach() it"
        )
    if text.startswith("StopIteration"):
        return (
            "an iterator that the step reads from runs out, which cannot be put back: have the "
            "step work on the batch that it is given"
        )
    return "the step leaves something behind that the next call cannot work with"


class Resumption(StepCheck):
    """All that a step goes on from is in what is saved."""

    name = "resumption"
    summary = "After loading the saved state, the next step is the same, bit for bit."
    rank = 76
    role = "parameters"

    def judge(self, stepped: Stepped, settings: Settings) -> Iterator[Finding]:
        """Yield what differs."""
        if not stepped.resumed:
            return
        layer, _, own = stepped.resumed.rpartition(".")
        is_named = stepped.resumed in {p.name for p in stepped.parameters}
        what = (
            stepped.resumed
            if stepped.resumed.startswith("the step")
            else f"the step after loading the saved state differs: {stepped.resumed} is another"
        )
        yield self.broken(
            what,
            "something that the step goes on from is not saved: a plain attribute, a buffer "
            "with persistent=False, a scheduler, a scaler or a moving average that is not in "
            "restore=",
            layer=layer if is_named else "",
            value=1.0,
            tensor=own if is_named else "",
        )
