"""Sees the calls of torch's loss functions and tells what they were given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_modelhealth.capture.observing.loss_graph import Origin, origin
from pytest_modelhealth.report import ClassTargets, LossCall, Option
from pytest_modelhealth.statistics import TensorStatistics, UnsupportedTensorError, reduce

_NAMES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)

LOSS_FUNCTIONS: dict[Callable[..., Any], str] = {getattr(F, name): name for name in _NAMES}
"""torch's loss functions; those in `torch.nn` call them."""

_PLAIN = frozenset({bool, int, float, str})
_MOST_ROWS = 1024


def loss_call(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    value: Any,
    *,
    layer: str | None,
    samples: int,
) -> LossCall:
    """Return what one call of a loss function was given and gave.

    Args:
        call: a function in `LOSS_FUNCTIONS`.
        args: its positional arguments.
        kwargs: its keyword arguments.
        value: what it returned.
        layer: the layer whose forward called it; ``None`` where none did.
        samples: the size of the batch.
    """
    function = LOSS_FUNCTIONS[call]
    names = _parameter_names(call)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    values = given.get(names[0])
    target = given.get("target", given.get("targets", given.get(names[1])))
    options: dict[str, Option] = {n: v for n, v in given.items() if type(v) in _PLAIN}
    options |= {
        name: True for name in ("weight", "pos_weight") if isinstance(given.get(name), Tensor)
    }
    with torch.no_grad():
        dimension = _class_dimension(function, values)
        rows = _Rows()
        made_by = Origin()
        if isinstance(values, Tensor):
            rows = _rows(values, dimension, samples)
            made_by = origin(values)
        return LossCall(
            function=function,
            layer=layer,
            input=_statistics(values),
            target=_statistics(target),
            options=options,
            value=_value(value),
            classes=0 if values is None or dimension is None else values.shape[dimension],
            rows=rows.kind,
            over_batch=rows.over_batch,
            log_normalizer=rows.log_normalizer,
            made_by=made_by.function,
            made_along=made_by.dimension,
            targets=_class_targets(function, target, given, values, samples),
        )


@cache
def _parameter_names(call: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(call).parameters)


def _class_dimension(function: str, values: Any) -> int | None:
    """Return where the classes lie in the input; ``None`` where there are none."""
    if not isinstance(values, Tensor) or not values.ndim:
        return None
    if function in ("cross_entropy", "nll_loss"):
        return 1 if values.ndim > 1 else 0
    if function in ("ctc_loss", "kl_div"):
        return values.ndim - 1
    return None


def _statistics(tensor: Any) -> TensorStatistics | None:
    if not isinstance(tensor, Tensor):
        return None
    try:
        return reduce(tensor)
    except UnsupportedTensorError:
        return None


def _value(value: Any) -> float | None:
    if not isinstance(value, Tensor) or value.is_meta or not value.numel():
        return None
    return float(value.detach().double().mean())


class _Rows(NamedTuple):
    kind: str = ""
    over_batch: bool = False
    log_normalizer: float | None = None


def _rows(values: Tensor, dimension: int | None, samples: int) -> _Rows:
    """Tell whether the input holds probabilities, log-probabilities or neither.

    Of a large input a sample of rows is looked at.
    """
    if dimension is None or values.shape[dimension] < 2 or not values.numel():
        return _Rows()
    classes = values.shape[dimension]
    step = max(1, values.shape[0] // _MOST_ROWS) if dimension else 1
    rows = values[::step].movedim(dimension, -1).reshape(-1, classes)
    rows = rows[:: max(1, len(rows) // _MOST_ROWS)].double()
    if bool(torch.isnan(rows).any()):
        return _Rows()
    eps = torch.finfo(values.dtype).eps
    kind = _kind(rows, eps)
    normalizer = float(rows.logsumexp(-1).abs().median())
    over_batch = (
        not kind
        and values.ndim >= 2
        and dimension != 0
        and values.shape[0] == samples > 1
        and bool(_kind(values.detach().movedim(0, -1).reshape(-1, samples).double(), eps))
    )
    return _Rows(kind, over_batch, normalizer)


def _kind(rows: Tensor, eps: float) -> str:
    """Return what every row is: ``"probabilities"``, ``"log_probabilities"`` or ``""``."""
    tolerance = max(1e-4, 16 * eps)
    if bool((rows >= 0).all()):
        return "probabilities" if bool(((rows.sum(-1) - 1).abs() <= tolerance).all()) else ""
    if bool((rows <= tolerance).all()):
        normalizer = rows.logsumexp(-1)
        return "log_probabilities" if bool((normalizer.abs() <= 8 * tolerance).all()) else ""
    return ""


def _class_targets(
    function: str, target: Any, given: Mapping[str, Any], values: Any, samples: int
) -> ClassTargets | None:
    """Count class indices; ``None`` where the target is none of them."""
    if function not in ("cross_entropy", "nll_loss"):
        return None
    if not isinstance(target, Tensor) or target.is_floating_point() or not target.numel():
        return None
    ignore = int(given.get("ignore_index", -100))
    classes = values.shape[min(values.ndim - 1, 1)]
    flat = target.detach().reshape(-1)
    kept = flat[flat != ignore]
    valid = kept[(kept >= 0) & (kept < classes)]
    counts = torch.bincount(valid, minlength=1)
    tail, share = _constant_tail(flat, samples)
    return ClassTargets(
        count=target.numel(),
        ignored=target.numel() - len(kept),
        distinct=int((counts > 0).sum()),
        largest_share=float(counts.max()) / max(len(valid), 1),
        tail=tail,
        tail_share=share,
    )


def _constant_tail(flat: Tensor, samples: int) -> tuple[int | None, float]:
    """Return the index that sequences end in, repeated, and how many of the targets are such ends.

    Padding looks like this: in several sequences, the last two or more targets are one index.
    """
    if samples < 2 or len(flat) % samples or len(flat) // samples < 4:
        return None, 0.0
    rows = flat.reshape(samples, -1)
    last = int(rows[:, -1].mode().values)
    run = (rows == last).flip(1).long().cumprod(1).sum(1)
    run = run[run >= 2]
    if len(run) < 2:
        return None, 0.0
    return last, float(run.sum()) / len(flat)
