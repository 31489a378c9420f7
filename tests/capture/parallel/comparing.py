"""Inspects a model and trains on, beside a twin that nobody inspects."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.inspector import Inspector
from tests.capture.parallel.engines import (
    Case,
    EndedError,
    batch,
    held,
    loss_of,
    make,
    same,
    train,
)


def differences(cases: Iterable[Case]) -> dict[Case, str]:
    """Return what is not as without the inspection, for each case; ``""`` is nothing."""
    warnings.simplefilter("ignore")
    return {case: difference(*case) for case in cases}


def difference(engine: str, steps: int, way: str) -> str:
    """Return what of one case is different."""
    (model, optimizer), (twin, its) = models = [make(engine), make(engine)]
    for each, steps_of in models:
        for step in range(steps):
            train(engine, each, steps_of, step)
        if way == "after evaluation":
            evaluate(engine, each)
    objects = [(p, p.grad) for p in model.parameters()]
    before = torch.get_rng_state()
    try:
        inspect(engine, model, way)
    except Exception as error:  # noqa: BLE001 - it is told
        return f"inspection: {type(error).__name__}: {error}"
    if not torch.equal(before, torch.get_rng_state()):
        return "random state"
    now = [(p, p.grad) for p in model.parameters()]
    if not all(a is c and b is d for (a, b), (c, d) in zip(now, objects, strict=True)):
        return "objects"
    return _unlike(model, twin) or _trained_on(engine, (model, optimizer), (twin, its))


def _trained_on(engine: str, *models: tuple[nn.Module, torch.optim.Optimizer]) -> str:
    """Return what is different after one of three steps more, or what cannot be run."""
    for step in range(10, 13):
        try:
            for model, optimizer in models:
                train(engine, model, optimizer, step)
        except Exception as error:  # noqa: BLE001 - it is told
            return f"step {step}: {type(error).__name__}: {error}"
        if unlike := _unlike(models[0][0], models[1][0]):
            return f"step {step}: {unlike}"
    return ""


def _unlike(model: nn.Module, twin: nn.Module) -> str:
    a, b = held(model), held(twin)
    return ", ".join([str(key) for key in a if not same(a[key], b.get(key))][:3])


def evaluate(engine: str, model: nn.Module) -> None:
    """Run the model without gradients, as between two epochs."""
    model.eval()
    with torch.no_grad():
        model(batch(engine, 77)[0])
    model.train()


def inspect(engine: str, model: nn.Module, way: str) -> None:
    """Inspect it in one of the ways; where ranks need not wait for each other, one alone raises.

    The others are told so.
    """
    raises = dist.get_rank() == 1 or not engine.startswith("DDP")
    x, y = batch(engine, 99)
    inspector = Inspector(model)
    if way == "forward raises":
        layer = dict(model.named_modules())[_last(model)]
        handle = layer.register_forward_pre_hook(_raise) if raises else None
        try:
            inspector.run_inspection(x, y, loss=loss_of)
        except EndedError:
            assert raises
        except InspectionError as told:
            _require_of_rank_1(told, raises=raises)
        finally:
            if handle is not None:
                handle.remove()
        return
    errors = {"loss raises": EndedError, "Ctrl-C": KeyboardInterrupt}
    error = errors.get(way) if raises else None

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if error is not None:
            raise error
        return loss_of(output, target)

    try:
        inspector.run_inspection(
            x, y, loss=loss, backward=False if way == "forward alone" else None
        )
    except (EndedError, KeyboardInterrupt):
        assert error is not None
    except InspectionError as told:
        _require_of_rank_1(told, raises=error is not None)


def _require_of_rank_1(told: InspectionError, *, raises: bool) -> None:
    if raises or "rank 1" not in str(told):
        raise told


def _last(model: nn.Module) -> str:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1]


def _raise(*_: Any) -> None:
    raise EndedError
