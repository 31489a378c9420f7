"""The target and the loss that go with what a model returned."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.checks.loss import Loss
from pytest_modelhealth.guessing.drawing import Candidate, Drawn, whole
from pytest_modelhealth.guessing.trying import Trial
from pytest_modelhealth.inspector import Inspector

_FUNCTIONAL = ("import torch.nn.functional as F",)
_CROSS_ENTROPY = Drawn("F.cross_entropy", lambda: F.cross_entropy, _FUNCTIONAL)
_LIKELIHOOD = Drawn("F.nll_loss", lambda: F.nll_loss, _FUNCTIONAL)
_PROJECTION = "without a loss: a fixed random projection of the outputs stands for it"


def with_loss(candidate: Candidate, output: Any, model: nn.Module, trial: Trial) -> Candidate:
    """Return a candidate that ran, with a target and a loss where what it returned says which.

    Class logits of shape (samples, classes) get random labels and cross-entropy, by themselves or
    as ``output["logits"]``; log probabilities get the negative log-likelihood. A model that
    returned a loss has its own. Anything else gets none.
    """
    if candidate.loss is not None or candidate.target is not None:
        return candidate
    if _has_own_loss(output):
        return replace(candidate, how=f"{candidate.how}; the model computes its own loss")
    taught = _with_targets(candidate, model, trial)
    if taught is not None:
        return taught
    classified = _classified(candidate, output, _batch_size(candidate, trial), model)
    if classified is not None and not _is_objected(classified, model, trial):
        return classified
    return replace(candidate, how=f"{candidate.how}; {_PROJECTION}")


def _classified(candidate: Candidate, output: Any, size: int, model: nn.Module) -> Candidate | None:
    """Return a candidate with labels and a loss, where an output has the shape of logits."""
    if _is_log_probabilities(output, size):
        said = f"it returns log probabilities of {output.shape[1]} classes"
        loss, rows = _LIKELIHOOD, output
    elif _is_logits(output, size, model):
        said = f"{output.shape[1]} outputs a sample, taken for class logits"
        loss, rows = _CROSS_ENTROPY, output
    elif isinstance(output, Mapping) and _is_logits(output.get("logits"), size, model):
        rows = output["logits"]
        said = f"its output has logits of {rows.shape[1]} classes"
        loss = _OF_LOGITS
    else:
        return None
    labels = whole(rows.shape[1], (size,))
    return replace(candidate, target=labels, loss=loss, how=f"{candidate.how}; {said}")


def _is_objected(candidate: Candidate, model: nn.Module, trial: Trial) -> bool:
    """Whether what is known of losses speaks against this one: what it is given are no logits.

    A policy behind a tanh has the shape of logits; that nobody trains it by cross-entropy is seen
    by the check of losses, which knows where the output comes from.
    """
    assert candidate.target is not None
    assert candidate.loss is not None
    with trial.drawing():
        args, kwargs = candidate.made()
        target = candidate.target.make()
        try:
            report = Inspector(copy.deepcopy(model) if trial.is_lazy else model).run_inspection(
                Inputs(*args, **kwargs), target, loss=candidate.loss.make()
            )
        except Exception:  # noqa: BLE001 - it will be seen where the model is inspected for itself
            return False
    return any(violation.check == Loss.name for violation in report.violations)


_TARGETS = ("targets", "target", "labels")


def _with_targets(candidate: Candidate, model: nn.Module, trial: Trial) -> Candidate | None:
    """Return a candidate with the targets that forward may be given, if a loss comes back."""
    takes = inspect.signature(model.forward).parameters
    name = next((n for n in _TARGETS if n in takes and n not in candidate.kwargs), None)
    if name is None or takes[name].default is not None or len(candidate.args) != 1:
        return None
    first = candidate.args[0]  # of its kind are the targets of a language model
    taught = replace(
        candidate,
        kwargs={**candidate.kwargs, name: Drawn(first.source, first.make, first.imports)},
        how=f"{candidate.how}; with {name} of the same kind the model computes its own loss",
    )
    output = trial.run(taught).output
    if _has_own_loss(output):
        return taught
    for i, one in enumerate(output if isinstance(output, tuple) else ()):
        if isinstance(one, Tensor) and one.ndim == 0 and one.is_floating_point():
            return replace(taught, loss=Drawn(f"lambda output: output[{i}]", partial(_item, i)))
    return None


def _item(index: int) -> Callable[[Any], Any]:
    return lambda output: output[index]


def _of_logits(output: Any, target: Any) -> Any:
    return F.cross_entropy(output["logits"], target)


_OF_LOGITS = Drawn(
    'lambda output, target: F.cross_entropy(output["logits"], target)',
    lambda: _of_logits,
    _FUNCTIONAL,
)


def _has_own_loss(output: Any) -> bool:
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return isinstance(own, Tensor) and own.ndim == 0


def _batch_size(candidate: Candidate, trial: Trial) -> int:
    with trial.drawing():
        tensors = find_tensors(candidate.made())
    return next((len(t) for t in tensors if t.ndim), 0)


def _is_logits(output: Any, size: int, model: nn.Module) -> bool:
    """Whether an output is one row of classes a sample: of a linear layer, and no copy's width."""
    if not isinstance(output, Tensor) or output.ndim != 2 or not output.is_floating_point():
        return False
    if output.shape[0] != size or not 2 <= output.shape[1] <= _MOST_CLASSES:
        return False
    linear = [m for m in model.modules() if isinstance(m, nn.Linear | nn.LazyLinear)]
    inward = {m.in_features for m in linear[:1]}
    return not linear or output.shape[1] not in inward  # an autoencoder gives back its width


_MOST_CLASSES = 1_000


def _is_log_probabilities(output: Any, size: int) -> bool:
    """Whether an output is as behind a log-softmax: each row's exponentials sum to one."""
    if not isinstance(output, Tensor) or output.ndim != 2 or not output.is_floating_point():
        return False
    if output.shape[0] != size or output.shape[1] < 2:
        return False
    sums = output.double().exp().sum(1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
