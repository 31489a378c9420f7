"""Whether what `torch.compile` makes of a model computes the same."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.conversion import copied
from pytest_modelhealth.capture.step.loss_value import compute_loss
from pytest_modelhealth.capture.step.tasks import TaskLosses
from pytest_modelhealth.capture.step.training_step import is_run_by_training_step
from pytest_modelhealth.comparing import compare
from pytest_modelhealth.data_sets.modes import in_mode
from pytest_modelhealth.errors import ModelHealthError
from pytest_modelhealth.plugin.suite.making import Made, seeded
from pytest_modelhealth.plugin.suite.saving import outputs_of, same
from pytest_modelhealth.plugin.suite.subject import Unjudged
from pytest_modelhealth.rendering.notation import shorten

if TYPE_CHECKING:
    from pytest_modelhealth.plugin.suite.case import Case

_COMPILERS = ("c++", "g++", "clang++", "cl")


def compiled_equals_eager(case: Case) -> None:
    """The compiled model gives the outputs and gradients of the eager one, but for rounding.

    In evaluation mode, as compiled dropouts draw other numbers.

    Raises:
        ModelHealthError: it does not, or cannot be compiled.
        Unjudged: there is nothing to compile with.
    """
    __tracebackhide__ = True
    case.require_numbers()
    subject = case.subject
    made, batch = subject.made, subject.made.batch
    if is_run_by_training_step(Request(made.model, **batch, by_training_step=True)):
        raise Unjudged(
            f"what runs of {subject.label} is its training_step, which nobody compiles: return "
            "inputs, target and a loss for its forward"
        )
    backend = subject.suite.backend or backend_for(made.model)
    seed = subject.suite.seed
    if not same(outputs_of(made, made, seed), outputs_of(made, made, seed + 1)):
        raise Unjudged(
            f"{subject.label} draws random numbers in evaluation mode, and compiled code draws "
            "others"
        )
    with seeded(seed), in_mode(made.model, False), _quiet():
        torch.compiler.reset()  # else the limit of recompilations leaves a ninth suite eager
        try:
            if _agree(made, backend, seed):
                return
            compiled = torch.compile(made.model, backend=backend)
            comparison = compare(
                made.model, compiled, batch["inputs"], batch["target"], loss=batch["loss"]
            )
        except Unjudged:
            raise
        except Exception as error:  # noqa: BLE001 - any the compiler raises
            said = " ".join(str(error).split())
            text = f"torch.compile(model, backend={backend!r}) raises {type(error).__name__}: "
            case.fail(
                ModelHealthError(f"{text}{shorten(said, 300)}\n\nThe eager model does not."), None
            )
    case.settle_comparison(comparison)


def _agree(made: Made, backend: str, seed: int) -> bool:
    """Whether outputs and gradients are equal but for some rounding, which one compilation tells.

    A comparison of every layer compiles a second time, with an operator around each: that is for
    what differs by more.

    Raises:
        Unjudged: this Python or platform has no `torch.compile`.
    """
    eager, copy = copied(made.model), copied(made.model)
    try:
        compiled = torch.compile(copy, backend=backend)
    except RuntimeError as error:
        raise Unjudged(f"torch.compile is not to be had here: {error}") from None
    ours = _results(eager, eager, made, seed)
    theirs = _results(compiled, copy, made, seed)
    return all(len(a) == len(b) and _are_close(a, b) for a, b in zip(ours, theirs, strict=True))


def _results(
    call: Callable[..., Any], model: nn.Module, made: Made, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that a model gives, and the gradients of its parameters."""
    batch, trained = made.batch, [p for p in model.parameters() if p.requires_grad]
    inputs, loss = Inputs.of(batch["inputs"]), batch["loss"]
    loss = TaskLosses(loss) if isinstance(loss, Mapping) else loss
    with seeded(seed):
        output = call(*inputs.args, **inputs.kwargs)
        given = [tensor.detach().clone() for tensor in find_tensors(output)]
        value = compute_loss(output, batch["target"], loss)
    if value is None or not value.requires_grad or not trained:
        return given, []
    gradients: Any = torch.autograd.grad(value, trained, allow_unused=True)
    return given, [torch.zeros(()) if g is None else g for g in gradients]


def _are_close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    largest = max((float(a.double().norm()) for a in ours if a.is_floating_point()), default=0.0)
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return False
            continue
        apart = float((a.double() - b.double()).norm())
        limit = max(_LEAST, 4 * torch.finfo(a.dtype).eps)
        if not apart <= limit * max(float(a.double().norm()), _SMALL * largest):
            return False
    return True


_LEAST = 1e-5
"""How far apart two tensors may be, by the norm of one, for no question to be asked."""
_SMALL = 1e-3
"""A gradient that is smaller than this part of the largest is held against that part."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the compiler's warnings and its trace, hundreds of lines, out of what pytest shows."""
    trace = logging.getLogger("torch.__trace")
    was, trace.disabled = trace.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        trace.disabled = was


def backend_for(model: nn.Module) -> str:
    """Return inductor where it has a compiler to hand code to, else what needs none."""
    if any(parameter.is_cuda for parameter in model.parameters()):
        return "inductor"  # which brings Triton along
    compilers = (*filter(None, [os.environ.get("CXX")]), *_COMPILERS)
    return "inductor" if any(map(shutil.which, compilers)) else "aot_eager"
