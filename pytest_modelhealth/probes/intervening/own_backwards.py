"""Custom functions of autograd by themselves: their backward, held against slopes in float64."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Function

from pytest_modelhealth.capture.observing.autograd_graph import snake_case
from pytest_modelhealth.capture.observing.flow.origins import is_own
from pytest_modelhealth.capture.observing.flow.rows import line_of, place_of
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import converted_batch
from pytest_modelhealth.capture.step.batch import copied_batch
from pytest_modelhealth.capture.step.guard import exited_whole
from pytest_modelhealth.checks.facts import at, flow_of
from pytest_modelhealth.errors import in_one_line
from pytest_modelhealth.probes.conventions import (
    Effects,
    NotApplicableError,
    UntellableError,
    on_several_ranks,
)
from pytest_modelhealth.probes.intervening.batches import SEED
from pytest_modelhealth.probes.intervening.running import Runs
from pytest_modelhealth.report import Parting
from pytest_modelhealth.report.flow import near

_CHANGED = "each custom autograd.Function by itself, along random directions in float64"
_STEP, _WIDE = 1e-6, 1e-5
"""How far an argument is moved, by its root mean square; in float64 both leave 6 digits or more."""
_NUDGES = (0.1, 0.0)
"""How far arguments are moved first: off exact zeros, where a forward may have a kink, and where
weights of zero hide a wrong gradient; not where it is not defined there."""
_NOTICED = 5e-3
"""Errors below are not looked into: of half a million numbers a few lie within a step of a kink."""
_SIDEWAYS = 0.3
"""Errors are relative to this part of a gradient's norm at least, along any direction."""
_PLACES = 16
_FEW_VALUES = 16
"""As many as four bits tell apart; what is scaled besides has a slope of its scale alone."""
_MOST_KINDS = 4
"""Calls of one function that are judged: of other dtypes, dimensions or options."""


class Call(NamedTuple):
    """One call of a custom function."""

    function: type[Function]
    args: tuple[Any, ...]  # tensors copied
    wanted: tuple[int, ...]  # the places of those that require a gradient
    layer: str  # whose own code calls it; ``""`` is the model
    line: str  # of that code, ``path:line``; ``""`` if unknown


def what_backwards_give(runs: Runs) -> Effects:
    """Record what each custom function is called with, and hold its backward against slopes."""
    calls, error = _recorded_calls(runs)
    if not calls:
        if error or runs.observation.own_functions:
            raise UntellableError(
                f"run again, the model raises {error}"
                if error
                else "its custom functions are classes made anew in each forward, or are called by "
                "no Function.apply; define them at the top of a module"
            )
        raise NotApplicableError("no custom torch.autograd.Function takes part in the run")
    if on_several_ranks():
        raise UntellableError(
            "on one of several ranks the slope of a collective is not that of all"
        )
    notes, doubts, partings = dict[str, None](), list[str](), dict[type, list[Parting]]()
    for call in calls:
        name = call.function.__name__
        try:
            with runs.kept(find_tensors([one.args for one in calls])), torch.enable_grad():
                wrong = _wrong_gradients(call)
        except NotApplicableError as meant:
            notes[f"{name!r} changes the gradient on purpose: {meant}"] = None
        except UntellableError as doubt:
            doubts.append(f"the backward of {name!r} is not held against slopes: {doubt}")
            notes[doubts[-1]] = None
        else:  # the first of each function that is wrong: one backward, one story
            partings[call.function] = partings.get(call.function) or wrong
    if not partings:
        end = UntellableError if doubts else NotApplicableError
        raise end("; ".join(doubts or notes), _CHANGED, tuple(notes))
    return Effects(_CHANGED, [p for own in partings.values() for p in own], tuple(notes))


# ---- what it is called with ----------------------------------------------------------------------

_exchanging = threading.RLock()
"""Functions are one for all threads, which exchange forwards one after the other."""


def _recorded_calls(runs: Runs) -> tuple[list[Call], str]:
    """Run the model and its loss once, as inspected; return calls, and the error that ended it.

    Of each function, the first call of each kind. One that was bound early, ``f = Swish.apply``,
    looks its forward up at each call, so that another can stand in for it meanwhile.
    """
    calls, counts = dict[tuple[Any, ...], Call](), Counter[type[Function]]()
    graph, callers = flow_of(runs.observation).graph, dict[str, list[str]]()  # in order
    for vertex in (graph.vertices[number] for number in graph.own_functions):
        layer = graph.calls[vertex.call].layer if vertex.call >= 0 else ""
        callers.setdefault(vertex.function, []).append(layer)

    def take(function: type[Function], args: tuple[Any, ...]) -> None:
        live = [n for n, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        wanted = tuple(n for n in live if not is_wrapped(args[n]))
        kind = (function, *map(_kind, args))
        if wanted and kind not in calls and sum(k[0] is function for k in calls) < _MOST_KINDS:
            layers = callers.get(snake_case(function.__name__), [""])
            layer = layers[counts[function] if counts[function] < len(layers) else 0]
            line = near(line_of(place_of(sys._getframe(2), None)))
            calls[kind] = Call(function, tuple(map(_copied, args)), wanted, layer, line)
        counts[function] += bool(wanted)

    def recording(function: type[Function]) -> Any:
        forward: Any = function.forward

        @functools.wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with suppress(Exception), torch.no_grad(), torch._C.DisableTorchFunction():
                take(function, args[_contexts(function) :])
            return forward(*args, **kwargs)

        return patch.object(function, "forward", staticmethod(recorded))

    with _exchanging, exited_whole(ExitStack()) as exchanged:
        # all are made before one is on: a class may have the forward of another
        for one in [recording(function) for function in filter(is_own, _subclasses(Function))]:
            exchanged.enter_context(one)
        batch = runs.whole.copy()
        with runs.kept((batch.args, batch.kwargs)):
            try:
                output = runs.output(batch)
            except Exception as error:  # noqa: BLE001 - the user's
                return [*calls.values()], in_one_line(error)
            with suppress(Exception):  # the loss may take functions of its own
                runs.loss_of(output, runs.whole.target)
    return [*calls.values()], ""


def _subclasses(function: type[Function]) -> set[type[Function]]:
    below = set(function.__subclasses__())
    return below.union(*map(_subclasses, below))


def _contexts(function: type[Function]) -> int:
    """Return how many contexts a forward gets: none where `setup_context` gets it in its stead."""
    return int(function.setup_context is Function.setup_context)


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.ndim, value.requires_grad
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copied_batch(value) if isinstance(value, list | tuple | dict) else value


# ---- what it gives -------------------------------------------------------------------------------


class _Point:
    """A function in float64 near the arguments of a call, with its gradients by random weights."""

    def __init__(self, call: Call, nudge: float) -> None:
        self.call, self.generator = call, torch.Generator().manual_seed(SEED)
        self.args = list(converted_batch(call.args, torch.float64))
        self.unit: dict[int, float] = {}
        for place in call.wanted:
            argument = self.args[place]
            if argument.is_complex() or argument.layout is not torch.strided:
                raise UntellableError("it takes complex or sparse numbers, which are not moved")
            self.unit[place] = float(argument.norm()) / max(argument.numel(), 1) ** 0.5 or 1.0
            argument += nudge * self.unit[place] * self.random(argument)
        live = {n: self.args[n].clone().requires_grad_() for n in call.wanted}
        try:
            outputs, again = self.outputs(live), self.outputs({})
            self.live = [n for n, output in enumerate(outputs) if output.requires_grad]
            self.values = [outputs[n] for n in self.live]
            self.weights = [self.random(output).to(output.dtype) for output in self.values]
            # a sum of its own: to be given weights, `grad` imports sympy, which takes a second
            pairs = zip(self.values, self.weights, strict=True)
            total: Any = sum((value * weight).sum() for value, weight in pairs)
            gradients = torch.autograd.grad(total, [*live.values()], materialize_grads=True)
        except Exception as error:
            raise UntellableError(f"in float64 it raises {in_one_line(error)}") from error
        if not all(map(torch.equal, outputs, again)):
            raise UntellableError("it is not the same twice on one input, or gives NaN")
        self.gradients = dict(zip(live, (one.detach() for one in gradients), strict=True))

    def random(self, like: Tensor) -> Tensor:
        """Return seeded normal numbers of a tensor's shape."""
        numbers = torch.randn(like.shape, generator=self.generator, dtype=torch.float64)
        return numbers.to(like.device)

    def outputs(self, moved: dict[int, Tensor]) -> list[Tensor]:
        """Return what it returns; of copies, since it may write to what it is called with."""
        live = {n: self.args[n].detach().requires_grad_() for n in self.call.wanted} | moved
        args = [live[n].clone() if n in live else _copied(a) for n, a in enumerate(self.args)]
        torch.manual_seed(SEED)
        return find_tensors(self.call.function.apply(*args))

    def rises(self, place: int, move: Tensor) -> list[Tensor]:
        """Return by how much it rises from one side of the point to the other."""
        points = [(self.args[place] + way * move).requires_grad_() for way in (1, -1)]
        above, below = (self.outputs({place: point}) for point in points)
        return [(above[n] - below[n]).detach() for n in self.live]

    def slope(self, place: int, direction: Tensor, step: float) -> float:
        """Return the slope of the weighted outputs along a direction."""
        far = self.unit[place] * step
        rises = zip(self.rises(place, direction * far), self.weights, strict=True)
        return sum(float((rise * weight).sum()) for rise, weight in rises) / (2 * far)

    def is_flat(self, place: int) -> bool:
        """Whether the forward does not change by a bit as some numbers move that get a gradient."""
        gradient = self.gradients[place]
        some = torch.randperm(gradient.numel(), generator=self.generator)[:_PLACES]
        move = torch.zeros_like(gradient).reshape(-1)
        move[some] = self.unit[place] * _STEP
        rises = self.rises(place, move.reshape(gradient.shape))
        return bool(gradient.reshape(-1)[some].any()) and not any(rise.any() for rise in rises)


def _wrong_gradients(call: Call) -> list[Parting]:
    """Return the gradients of a call that are not the slope."""
    for nudge in _NUDGES:
        try:
            point = _Point(call, nudge)
            break
        except UntellableError:
            if not nudge:
                raise
    if any(map(point.is_flat, call.wanted)):
        raise NotApplicableError("its forward is flat (rounding, a threshold), and has no slope")
    dtypes = {value.dtype for value in point.values} - {torch.float64}
    if dtypes:
        raise UntellableError(f"it computes in {dtypes.pop()} whatever it is given")
    wrong = [one for place in call.wanted if (one := _judged(point, place)) is not None]
    own = [point.args[place].reshape(-1) for place in call.wanted]
    if wrong and all(any(torch.equal(v.reshape(-1), a) for a in own) for v in point.values):
        raise NotApplicableError("its forward is the identity")
    few = max(len(value.unique()) for value in point.values)
    if wrong and few <= _FEW_VALUES and all(v.numel() > 4 * few for v in (*own, *point.values)):
        raise NotApplicableError("its forward rounds to a few values, scaled or not")
    return wrong


def _judged(point: _Point, place: int) -> Parting | None:
    """Return what is wrong with a gradient, if anything is, by the slopes along two directions."""
    gradient = point.gradients[place]
    directions = [point.random(gradient) for _ in range(2)]

    def along(candidate: Tensor) -> Tensor:
        return torch.stack([(candidate * one).sum().cpu() for one in directions])

    def slopes(step: float) -> Tensor:
        return torch.tensor([point.slope(place, d, step) for d in directions], dtype=torch.float64)

    slope = slopes(_STEP)
    if not slope.isfinite().all() or not gradient.isfinite().all():
        raise UntellableError("its forward has no finite slope in float64")

    # Along a direction at right angles to the gradient both are small by chance alone.
    given, least = along(gradient), _SIDEWAYS * float(gradient.norm())
    scale = given.abs().maximum(slope.abs()).clamp(min=least)
    errors = (given - slope).abs() / scale
    if not gradient.any() or errors.max() <= _NOTICED:
        return None  # a gradient that is forgotten is missing where it is looked for
    n = int(errors.argmax())
    ratio = float(slope[n] / given[n]) if given[n] else 0.0
    fits = (
        kind
        for kind, candidate in _candidates(point, place, ratio)
        if ((along(candidate) - slope).abs() <= _NOTICED * scale).all()
    )
    kind = next(fits, "approximation")
    if kind == "approximation" and ((slopes(_WIDE) - slope).abs() > 4 * _NOTICED * scale).any():
        return None  # it jumps
    function, line = point.call.function, point.call.line
    names = [*inspect.signature(function.forward).parameters][_contexts(function) :]
    names += map(str, range(len(names), place + 1))  # of *args
    by = f"{1 / ratio:.2f} times the slope" if ratio else "where there is none"
    detail = (
        f"{function.__name__!r}{at(line)} gives {names[place]!r} "
        f"a gradient of {float(given[n]):.4g} along a random direction, where the slope of its "
        f"forward is {float(slope[n]):.4g}: {by}"
    )
    return Parting(kind, float(errors[n]), point.call.layer, "gradients", line=line, detail=detail)


def _candidates(point: _Point, place: int, ratio: float) -> Iterator[tuple[str, Tensor]]:
    """Yield what may be right in place of a gradient, each with the kind of fault then."""
    own, others = point.gradients[place], point.gradients
    yield "factor", own * ratio
    if own.ndim >= 2 and own.shape[-1] == own.shape[-2] > 1:
        yield "transpose", own.mT
    for other in others:
        if other != place and others[other].shape == own.shape:
            yield "order", others[other]
