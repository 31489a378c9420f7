"""In which modes the layers ran while a step was called."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from pytest_modelhealth.report import LayerMode
from pytest_modelhealth.training.stepping.calls import Calls
from pytest_modelhealth.training.stepping.session import Session
from pytest_modelhealth.training.stepping.watching import Watched


def layer_modes(session: Session, made: Calls) -> Iterator[LayerMode]:
    """Yield the modes of each layer that ran."""
    for name, module in session.model.named_modules():
        ran = [seen.modes.get(module, set()) for seen in made.seen]
        if not any(ran):
            continue
        own = list(module.parameters(recurse=False))
        moved, kind = _moved(module, session), _kind(module)
        is_trainable = any(p.requires_grad for p in own)
        is_written = any(changes.get(id(p)) for changes in made.changes for p in own)
        with_gradient = [{training for training, enabled in one if enabled} for one in ran]
        yield LayerMode(
            layer=name,
            training=tuple(any(modes) if modes else None for modes in with_gradient),
            without_gradient=not any(with_gradient),
            trainable=is_trainable,
            kind=kind,
            still=moved is False and any((True, True) in one for one in ran),
            unseen=any((True, False) in one and (True, True) in one for one in ran),
            drifts=bool(moved and own and not is_trainable and not is_written),
            hasty=kind == "batch_norm" and (getattr(module, "momentum", 0) or 0) > 0.5,
        )


def _moved(module: nn.Module, session: Session) -> bool | None:
    """Whether the running mean of a layer moved; ``None`` where it keeps none."""
    before = session.first_statistics.get(module)
    return None if before is None else not torch.equal(before, module.running_mean)  # type: ignore[arg-type]


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


def switches_on_purpose(first: Watched) -> bool:
    """Whether the step itself brings the model to evaluation mode, and not for a validation."""
    runs = first.runs
    return (
        first.began
        and bool(runs)
        and not any(training for training, _ in runs)
        and all(enabled for _, enabled in runs)
    )
