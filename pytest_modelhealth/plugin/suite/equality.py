"""Whether a model that was saved and loaded, or compiled, computes the same."""

from __future__ import annotations

import io
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture import Request, find_engine
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import copied
from pytest_modelhealth.capture.step.batch import Inputs, is_run_by_training_step
from pytest_modelhealth.capture.step.loss import TaskLosses, compute_loss
from pytest_modelhealth.comparing import compare
from pytest_modelhealth.data_sets.running import in_mode
from pytest_modelhealth.errors import InspectionError, ModelHealthError
from pytest_modelhealth.plugin.suite.case import FEW_STEPS, Unjudged
from pytest_modelhealth.plugin.suite.making import Made, seeded
from pytest_modelhealth.probes.conventions import Conventions
from pytest_modelhealth.probes.intervening.running import Runs
from pytest_modelhealth.rendering.notation import plural, shorten

if TYPE_CHECKING:
    from pytest_modelhealth.comparison.comparison import Comparison
    from pytest_modelhealth.plugin.suite.case import Case


_LISTED = 4
_CAUSE = (
    "state that is no parameter and no buffer is not saved: register_buffer(name, tensor), an "
    "nn.Parameter, or get_extra_state and set_extra_state; modules belong into an nn.ModuleList "
    "rather than a list"
)


def state_survives_saving(case: Case) -> None:
    """A new model that loads what was saved gives the same outputs, bit for bit.

    The saved model has made a few training steps, so that what moves in training has moved; the
    new one is made under another seed.

    Raises:
        ModelHealthError: it does not.
        Unjudged: it cannot be told.
    """
    __tracebackhide__ = True
    case.require_numbers()
    subject = case.subject
    fresh = subject.anew(subject.suite.seed + 1)
    if fresh is None:
        raise Unjudged(
            f"{subject.maker} gives the same model each time, so that there is no new one to "
            "load the state into: make it anew in each call"
        )
    saved = subject.trained
    seed = subject.suite.seed
    ours = outputs_of(case, saved.model, saved, seed)
    if not same(ours, outputs_of(case, saved.model, saved, seed)):
        raise Unjudged("the model does not repeat itself: see test_deterministic")
    _load(case, saved.model, fresh.model, saved, seed)
    if same(ours, outputs_of(case, fresh.model, saved, seed)):
        return
    lost = list(_lost(saved.model, fresh.model))
    comparison = _compared(saved, fresh.model, seed)
    case.keep(comparison)
    case.fail(ModelHealthError(_text(case, lost, comparison), comparison), comparison)


def _compared(saved: Made, fresh: nn.Module, seed: int) -> Comparison:
    """Return where two models part, which run as they are inspected."""
    request = Request(saved.model, **saved.batch, by_training_step=True)
    engine = find_engine(saved.model)
    with (
        engine.called(request) as call,
        engine.called(replace(request, model=fresh)),
        seeded(seed),
        in_mode(saved.model, False),
        in_mode(fresh, False),
    ):
        return compare(saved.model, fresh, call.inputs, backward=False)


def _load(case: Case, saved: nn.Module, fresh: nn.Module, batch: Made, seed: int) -> None:
    """Save the state of a model and load it into another.

    Raises:
        ModelHealthError: it cannot be saved, or not be loaded.
    """
    file = io.BytesIO()
    doing = "saved"
    try:
        torch.save(saved.state_dict(), file)
        file.seek(0)
        doing = "loaded into a new model"
        fresh.load_state_dict(torch.load(file, weights_only=False))
    except Exception as error:  # noqa: BLE001 - the user's own state_dict
        case.fail(
            ModelHealthError(
                f"the state is lost: it cannot be {doing}: {type(error).__name__}: {error}\n\n"
                f"likely cause: {_CAUSE}"
            ),
            None,
        )


def outputs_of(case: Case, model: nn.Module, batch: Made, seed: int) -> list[Tensor]:
    """Return the tensors that a model gives for a batch in evaluation mode.

    Raises:
        InspectionError: it raises there.
    """
    request = Request(model, **batch.batch, by_training_step=True)
    engine, seen = find_engine(model), case.subject.ran(training=True).observation
    with engine.called(request) as call, seeded(seed):
        runs = Runs(engine, call, seen, case.settings, Conventions())
        ran = runs.forward(Inputs.of(call.inputs))
    if ran.error:
        raise InspectionError(f"in evaluation mode {case.subject.label} raises {ran.error}")
    return ran.outputs


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether outputs are the same, bit for bit; a NaN is the same as another."""
    return len(ours) == len(theirs) and all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and (torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num()))
        for a, b in zip(ours, theirs, strict=True)
    )


def _lost(saved: nn.Module, fresh: nn.Module) -> Iterator[str]:
    """Yield what a model has that no state_dict holds, and the new one has otherwise."""
    others = dict(fresh.named_modules())
    for name, module in saved.named_modules():
        other, prefix = others.get(name), f"{name}." if name else ""
        unsaved = {n: module._buffers.get(n) for n in module._non_persistent_buffers_set}
        for own, value in {**vars(module), **unsaved}.items() if other is not None else ():
            if own in _OWN or own.startswith("__"):
                continue
            kind = "a buffer with persistent=False" if own in unsaved else _kind(value)
            if kind and not _is_alike(value, getattr(other, own, None)):
                yield f"{prefix}{own} ({kind})"


_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module."""


def _kind(value: Any) -> str:
    """Return what an attribute is, in words; ``""`` where it is no state."""
    if isinstance(value, Tensor):
        return "a tensor in a plain attribute"
    if isinstance(value, list | tuple | dict):
        return f"tensors in a plain {type(value).__name__}" if find_tensors(value) else ""
    is_state = isinstance(value, int | float) or type(value).__module__ == "numpy"
    return f"a plain attribute, {type(value).__name__}" if is_state else ""


def _is_alike(value: Any, there: Any) -> bool:
    ours, theirs = find_tensors(value), find_tensors(there)
    if ours or theirs:
        return same(ours, theirs)
    try:
        return bool((value == there) if isinstance(value, int | float) else (value == there).all())
    except Exception:  # noqa: BLE001 - an object of the user's
        return False


def _text(case: Case, lost: list[str], comparison: Comparison) -> str:
    model = case.subject.label
    more = f" and {len(lost) - _LISTED} more" if len(lost) > _LISTED else ""
    listed = f"{', '.join(lost[:_LISTED])}{more}" or "something that the outputs depend on"
    how = (
        f"A {model} that made {plural(FEW_STEPS, 'training step')} was saved, and its state loaded "
        "into a new one, made under another seed: the two give other outputs in evaluation mode."
    )
    lines = [f"the state is lost: {listed} is not in the state_dict", "", how]
    parting = comparison.first_divergence
    if parting is not None:
        told = f"{parting.label}: {parting.story}"
        lines += [f"they part at:  {told}" + (f" ({parting.cause})" if parting.cause else "")]
    return "\n".join([*lines, f"likely cause:  {_CAUSE}"])


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
    ours, others = (outputs_of(case, made.model, made, seed + n) for n in (0, 1))
    if not same(ours, others):
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
    case.keep(comparison)
    failure = comparison._failure()
    if failure is not None:
        case.fail(failure, comparison)


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
    both = zip(
        _results(eager, eager, made, seed), _results(compiled, copy, made, seed), strict=True
    )
    return all(len(ours) == len(theirs) and _are_close(ours, theirs) for ours, theirs in both)


def _results(
    call: Callable[..., Any], model: nn.Module, made: Made, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that a model gives, and the gradients of its parameters."""
    batch, trained = made.batch, [p for p in model.parameters() if p.requires_grad]
    inputs, loss = Inputs.of(batch["inputs"]), batch["loss"]
    with seeded(seed):
        output = inputs.call(call)
        given = [tensor.detach().clone() for tensor in find_tensors(output)]
        loss = TaskLosses(loss) if isinstance(loss, Mapping) else loss
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
    compilers = (os.environ.get("CXX", "c++"), "c++", "g++", "clang++", "cl")
    return "inductor" if any(map(shutil.which, compilers)) else "aot_eager"
