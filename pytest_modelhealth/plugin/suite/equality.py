"""Whether a model that was saved and loaded, or compiled, computes the same."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import copied, in_mode
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.loss import compute_loss
from pytest_modelhealth.comparing import compare
from pytest_modelhealth.comparison.comparison import Comparison
from pytest_modelhealth.plugin.suite.case import FEW_STEPS, Case, Unjudged
from pytest_modelhealth.plugin.suite.making import Made, seeded
from pytest_modelhealth.rendering.document import LINES, Document
from pytest_modelhealth.rendering.notation import shorten

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
    seed = case.suite.seed
    made = case.anew(seed + 1)
    if made is None:
        raise Unjudged(
            f"{case.maker} gives the same model each time, so that there is no new one to "
            "load the state into: make it anew in each call"
        )
    saved, fresh = case.trained, made.model
    file, doing = io.BytesIO(), "saved"
    try:
        torch.save(saved.model.state_dict(), file)
        file.seek(0)
        doing = "loaded into a new model"
        fresh.load_state_dict(torch.load(file, weights_only=False))
    except Exception as error:  # noqa: BLE001 - the user's own state_dict
        said = f"the state is lost: it cannot be {doing}: {type(error).__name__}: {error}"
        case.fail(f"{said}\n\nlikely cause: {_CAUSE}")
    lost = list(_lost(saved.model, fresh))  # before either runs
    with seeded(seed), in_mode(saved.model, False), in_mode(fresh, False):
        comparison = compare(saved.model, fresh, saved.batch["inputs"], backward=False)
    is_same = all(
        not one.diverged and (one.difference is None or not one.difference.unequal)
        for one in comparison.outputs
    )
    if comparison.first_divergence is not None or not is_same:
        case.fail(_text(case, lost, comparison), comparison)


def _lost(saved: nn.Module, fresh: nn.Module) -> Iterator[str]:
    """Yield what a model has that no state_dict holds, and the new one has otherwise."""
    others = dict(fresh.named_modules())
    for name, module in saved.named_modules():
        unsaved = {n: module._buffers.get(n) for n in module._non_persistent_buffers_set}
        for own, value in {**vars(module), **unsaved}.items():
            if name not in others or own in _OWN or own.startswith("__"):
                continue
            tensors, there = find_tensors(value), getattr(others[name], own, None)
            if tensors and not _are_same(tensors, find_tensors(there)):
                what = "a tensor in a plain attribute"
                what = "a buffer with persistent=False" if own in unsaved else what
            elif type(value) in (int, float) and value != there:
                what = f"a plain attribute, {type(value).__name__}"
            else:
                continue
            yield f"{name}.{own} ({what})".removeprefix(".")


_OWN = frozenset(vars(nn.Module()))  # attributes that torch gives every module


def _are_same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether tensors are the same, bit for bit; a NaN is the same as another."""
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(ours, theirs, strict=True)
    )


def _text(case: Case, lost: list[str], comparison: Comparison) -> str:
    more = f" and {len(lost) - _LISTED} more" if len(lost) > _LISTED else ""
    listed = f"{', '.join(lost[:_LISTED])}{more}" or "something that the outputs depend on"
    how = (
        f"A {case.label} that made {FEW_STEPS} training steps was saved, and its state loaded "
        "into a new one, made under another seed: the two give other outputs in evaluation mode."
    )
    parting = comparison.first_divergence
    where = [parting.label, parting.story, parting.cause] if parting is not None else []
    parted = [f"they part at: {': '.join(filter(None, where))}"] if where else []
    return Document(
        f"the state is lost: {listed} is not in the state_dict",
        facts=["", how],
        code=[*parted, f"likely cause: {_CAUSE}"],
    ).text(width=None, lines=LINES)


def compiled_equals_eager(case: Case) -> None:
    """The compiled model gives the outputs and gradients of the eager one, but for rounding.

    In evaluation mode, as compiled dropouts draw other numbers. One compilation tells whether the
    two are close; a comparison of every layer compiles a second time, with an operator around each,
    and is for what differs by more.

    Raises:
        ModelHealthError: it does not, or cannot be compiled.
        Unjudged: there is nothing to compile with.
    """
    __tracebackhide__ = True
    case.require_numbers()
    model, batch, seed = case.made.model, case.made.batch, case.suite.seed
    backend = case.suite.backend
    with seeded(seed), in_mode(model, False), _quiet():
        eager, copy = copied(model), copied(model)
        ours, other = (_results(eager, eager, case.made, seed + n) for n in (0, 1))
        if not _are_same(ours[0], other[0]):
            raise Unjudged(
                f"{case.label} draws random numbers in evaluation mode, and compiled code draws "
                "others"
            )
        torch.compiler.reset()  # else the limit of recompilations leaves a ninth suite eager
        try:
            compiled = torch.compile(copy, backend=backend)
        except RuntimeError as error:
            raise Unjudged(f"torch.compile is not to be had here: {error}") from None
        try:
            theirs = _results(compiled, copy, case.made, seed)
            if all(map(_are_close, ours, theirs)):
                return
            comparison = compare(
                model,
                torch.compile(model, backend=backend),
                batch["inputs"],
                batch["target"],
                loss=batch["loss"],
            )
        except Exception as error:  # noqa: BLE001 - any the compiler raises
            said = shorten(" ".join(str(error).split()), 300)
            text = f"torch.compile(model, backend={backend!r}) raises {type(error).__name__}: "
            case.fail(f"{text}{said}\n\nThe eager model does not.")
    failure = comparison._failure()
    if failure is not None:
        case.fail(str(failure), comparison)
    case.keep(comparison)


def _results(
    call: Callable[..., Any], model: nn.Module, made: Made, seed: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that a model gives, and the gradients of its parameters."""
    batch, trained = made.batch, [p for p in model.parameters() if p.requires_grad]
    loss = batch["loss"]
    with seeded(seed):
        output = Inputs.of(batch["inputs"]).call(call)
        given = [tensor.detach().clone() for tensor in find_tensors(output)]
        value = compute_loss(output, batch["target"], loss)
    if value is None or not value.requires_grad or not trained:
        return given, []
    gradients: Any = torch.autograd.grad(value, trained, allow_unused=True)
    return given, [torch.zeros(()) if g is None else g for g in gradients]


def _are_close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether tensors are apart by rounding, by the norm of each.

    A gradient that is less than a thousandth of the largest is held against that thousandth.
    """
    if [(a.shape, a.dtype) for a in ours] != [(b.shape, b.dtype) for b in theirs]:
        return False
    largest = max((float(a.double().norm()) for a in ours if a.is_floating_point()), default=0.0)
    for a, b in zip(ours, theirs, strict=True):
        limit = 0.0
        if a.is_floating_point():
            relative = max(1e-5, 4 * torch.finfo(a.dtype).eps)
            limit = relative * max(float(a.double().norm()), 1e-3 * largest)
        if not float((a.double() - b.double()).norm()) <= limit:
            return False
    return True


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
