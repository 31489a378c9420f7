"""Custom functions of autograd by themselves: their backward, held against `gradcheck`."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_modelhealth.capture.observing.autograd_graph import snake_case
from pytest_modelhealth.capture.observing.flow.origins import is_own
from pytest_modelhealth.capture.observing.flow.rows import line_of, place_of
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import converted_batch
from pytest_modelhealth.capture.step.batch import copied_batch
from pytest_modelhealth.capture.step.isolation import exited_whole
from pytest_modelhealth.probes.conventions import Found, NotApplicableError, UntellableError
from pytest_modelhealth.probes.intervening.running import Ran, Runs, said
from pytest_modelhealth.report import Observation, Parting
from pytest_modelhealth.report.flow import near

_CHANGED = "each custom autograd.Function by itself, along random directions in float64"
_STEPS = (1e-5, 1e-6)
"""How far an argument is moved, by its root mean square; in float64 both leave 6 digits or more."""
_NOTICED = 5e-3
"""Errors below are not looked into: of half a million numbers a few lie within a step of a kink."""
_NUDGE = 0.1
"""How far an argument is moved off exact zeros, where a forward may have a kink."""
_SIDEWAYS = 0.3
"""Errors are relative to this part of a gradient's norm at least, along any direction."""
_PLACES = 16
_MOST_KINDS = 4
"""Calls of one function that are judged: of other dtypes, dimensions or options."""
_SEED = 20_240_229
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
"""Namespaces of the operations of `torch.distributed`."""


@dataclass(frozen=True)
class Call:
    """One call of a custom function.

    Args:
        function: its class.
        args: what it was called with, tensors copied.
        wanted: the places of the arguments that require a gradient.
        number: how many calls of this class came before.
        line: ``path:line`` of the user's code that called it; ``""`` if unknown.
        of: how many calls of it there are.
    """

    function: type[Function]
    args: tuple[Any, ...]
    wanted: tuple[int, ...]
    number: int
    line: str
    of: int = 0

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.function.__name__

    def argument(self, place: int) -> str:
        """Return the name that the forward has for an argument."""
        own = inspect.signature(self.function.forward).parameters.values()
        names = [p.name for p in own if p.kind is not inspect.Parameter.VAR_POSITIONAL]
        names = names[_contexts(self.function) :]
        return names[place] if place < len(names) else f"argument {place}"


def what_backwards_give(runs: Runs) -> Found:
    """Record what each custom function is called with, and hold its backward against slopes.

    Raises:
        UntellableError: none can be told, or each changes the gradient on purpose.
    """
    calls, ran = _recorded_calls(runs)
    if ran.error and not calls:
        raise UntellableError(f"run again, the model raises {ran.error}")
    if not calls and runs.observation.own_functions:
        raise UntellableError(
            "its custom functions are classes made anew in each forward, or are called by no "
            "Function.apply; define them at the top of a module"
        )
    if not calls:
        raise NotApplicableError("no custom torch.autograd.Function takes part in the run")
    notes, doubts, is_judged = list[str](), list[str](), False
    partings: dict[type, list[Parting]] = {}
    for call in calls:
        try:
            with runs.kept(find_tensors([one.args for one in calls])), torch.enable_grad():
                wrong = _wrong_gradients(call)
        except NotApplicableError as meant:
            notes.append(f"{call.name!r} changes the gradient on purpose: {meant}")
            continue
        except UntellableError as doubt:
            doubts.append(f"the backward of {call.name!r} is not held against slopes: {doubt}")
            notes.append(doubts[-1])
            continue
        is_judged = True
        if wrong:  # the first of each function: one backward, one story
            layer = _caller(call, runs.observation)
            partings.setdefault(call.function, [replace(one, layer=layer) for one in wrong])
    unique = tuple(dict.fromkeys(notes))
    if is_judged:
        return Found(_CHANGED, [*chain(*partings.values())], unique)
    if doubts:
        raise UntellableError("; ".join(doubts), _CHANGED)
    raise NotApplicableError("; ".join(unique), notes=unique)


def _caller(call: Call, observation: Observation) -> str:
    """Return the layer whose own code calls a function; the model where that is not known."""
    if observation.flow is None:
        return ""
    graph, named = observation.flow.graph, snake_case(call.name)
    own = [graph.vertices[n] for n in graph.own_functions]
    made = [vertex.call for vertex in own if vertex.function == named] or [-1]
    number = made[call.number] if len(made) == call.of else made[0]
    return graph.calls[number].layer if number >= 0 else ""


def _recorded_calls(runs: Runs) -> tuple[list[Call], Ran]:
    """Run the model and its loss once, as inspected, and return the calls of custom functions.

    Of each function, the first call of each kind. One that was bound early, ``f = Swish.apply``,
    looks its forward up at each call, so that another can stand in for it meanwhile.
    """
    calls: dict[tuple[Any, ...], Call] = {}
    counts: Counter[type[Function]] = Counter()
    inside = threading.local()

    def take(function: type[Function], args: tuple[Any, ...], line: str) -> None:
        wanted = tuple(n for n, arg in enumerate(args) if _is_wanted(arg))
        kind = (function, *map(_kind, args))
        if wanted and kind not in calls and sum(k[0] is function for k in calls) < _MOST_KINDS:
            copies = tuple(map(_copied, args))
            calls[kind] = Call(function, copies, wanted, counts[function], line)
        counts[function] += bool(wanted)

    def stand_in(function: type[Function]) -> Any:
        forward: Any = function.forward

        @functools.wraps(forward)
        def heard(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "call", False):  # of another's forward: no backward of it runs
                return forward(*args, **kwargs)
            with suppress(Exception), torch.no_grad(), torch._C.DisableTorchFunction():
                line = line_of(place_of(sys._getframe(1), None))
                take(function, args[_contexts(function) :], line)
            inside.call = True
            try:
                return forward(*args, **kwargs)
            finally:
                inside.call = False

        return staticmethod(heard)

    with _exchanging, exited_whole(ExitStack()) as exchanged:
        for function in filter(is_own, _subclasses(Function)):
            exchanged.callback(_put_back, function, vars(function).get("forward"))
            setattr(function, "forward", stand_in(function))  # noqa: B010 - mypy knows a method
        ran = runs.forward(runs.batch(), with_loss=True, evaluation=False)
    return [replace(call, of=counts[call.function]) for call in calls.values()], ran


_exchanging = threading.RLock()
"""Functions are one for all threads: each puts back what it found, one thread after the other."""


def _subclasses(function: type[Function]) -> set[type[Function]]:
    below = set(function.__subclasses__())
    return below.union(*map(_subclasses, below))


def _put_back(function: type[Function], forward: Any) -> None:
    if forward is not None:
        setattr(function, "forward", forward)  # noqa: B010
    elif "forward" in vars(function):
        delattr(function, "forward")


def _contexts(function: type[Function]) -> int:
    """Return how many contexts a forward gets: none where `setup_context` gets it in its stead."""
    return int(function.setup_context is Function.setup_context)


def _is_wanted(value: Any) -> bool:
    requires = isinstance(value, Tensor) and value.requires_grad
    return requires and not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.ndim, value.requires_grad
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copied_batch(value) if isinstance(value, list | tuple | dict) else value


# ---- what it gives ------------------------------------------------------------------------------


class _WithoutCollectives(TorchDispatchMode):
    """Raises at a collective, before other ranks are waited for.

    Slopes on one rank leave out what moves on the others, so that they tell nothing of its sum.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            name = func.overloadpacket.__name__.rstrip("_")
            raise UntellableError(
                f"it calls a collective ({name}), whose slope on one rank is not that on all"
            )
        return func(*args, **(kwargs or {}))


class _Point:
    """A function at one point, in float64, with its gradients there by random weights.

    Args:
        call: a call of it.
        nudged: whether to move the arguments to a point close by.

    Raises:
        UntellableError: it cannot be computed or differentiated there.
    """

    def __init__(self, call: Call, *, nudged: bool) -> None:
        self.call = call
        self.generator = torch.Generator().manual_seed(_SEED)
        self.args = list(converted_batch(call.args, torch.float64))
        self.unit: dict[int, float] = {}
        for place in call.wanted:
            argument = self.args[place]
            if argument.is_complex() or argument.layout is not torch.strided:
                raise UntellableError("it takes complex or sparse numbers, which are not moved")
            self.unit[place] = float(argument.norm()) / max(argument.numel(), 1) ** 0.5 or 1.0
            if nudged:
                argument += _NUDGE * self.unit[place] * self._random(argument)
        with _WithoutCollectives():  # type: ignore[no-untyped-call]
            self._differentiate()
        self.directions = {n: [self._random(self.args[n]) for _ in range(2)] for n in call.wanted}

    def _differentiate(self) -> None:
        live = {n: self.args[n].clone().requires_grad_() for n in self.call.wanted}
        outputs = self._outputs(live)
        self.live = [n for n, output in enumerate(outputs) if output.requires_grad]
        if not self.live:
            raise UntellableError("nothing that it returns has a gradient")
        if not all(map(torch.equal, outputs, self._outputs({}))):
            raise UntellableError("it is not the same twice on one input, or gives NaN")
        kept = [outputs[n] for n in self.live]
        self.dtype = next((o.dtype for o in kept if o.dtype is not torch.float64), torch.float64)
        self.weights = [self._random(output).to(output.dtype) for output in kept]
        try:
            gradients = torch.autograd.grad(
                kept, list(live.values()), self.weights, allow_unused=True, materialize_grads=True
            )
        except UntellableError:
            raise
        except Exception as error:
            raise UntellableError(f"its backward raises in float64: {said(error)}") from error
        self.gradients = dict(zip(live, (one.detach() for one in gradients), strict=True))

    def _random(self, like: Tensor) -> Tensor:
        numbers = torch.randn(like.shape, generator=self.generator, dtype=torch.float64)
        return numbers.to(like.device)

    def _outputs(self, moved: dict[int, Tensor]) -> list[Tensor]:
        """Return what it returns; of copies, since it may write to what it is given."""
        live = {n: self.args[n].detach().requires_grad_() for n in self.call.wanted} | moved
        args = [live[n].clone() if n in live else _copied(a) for n, a in enumerate(self.args)]
        torch.manual_seed(_SEED)
        try:
            return find_tensors(self.call.function.apply(*args))
        except UntellableError:
            raise
        except Exception as error:
            raise UntellableError(f"in float64 it raises {said(error)}") from error

    def at(self, moved: dict[int, Tensor]) -> list[Tensor]:
        """Return what it returns that has a gradient, with some arguments moved."""
        outputs = self._outputs(moved)
        return [outputs[n] for n in self.live]

    def sides(self, place: int, move: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what it returns on both sides of the point."""
        points = [(self.args[place] + way * move).requires_grad_() for way in (1, -1)]
        above, below = ([one.detach() for one in self.at({place: point})] for point in points)
        return list(zip(above, below, strict=True))

    def slope(self, place: int, direction: Tensor, step: float) -> float:
        """Return the slope of the weighted outputs along a direction."""
        far = self.unit[place] * step
        sides = zip(self.sides(place, direction * far), self.weights, strict=True)
        return sum(float(((a - b) * w).sum()) for (a, b), w in sides) / (2 * far)

    def passes(self, place: int) -> bool:
        """Whether `gradcheck` finds a gradient right along both directions, at both steps.

        It is given one number to differentiate by, how far the argument is moved: where a gradient
        is wrong, it would else look at each number of a large argument by itself.
        """

        def along(far: Tensor, direction: Tensor) -> Tensor:
            outputs = self.at({place: self.args[place] + far * direction})
            return torch.stack([(o * w).sum() for o, w in zip(outputs, self.weights, strict=True)])

        return all(
            gradcheck(
                functools.partial(along, direction=direction),
                direction.new_zeros((), requires_grad=True),
                eps=self.unit[place] * step,
                atol=_SIDEWAYS * _NOTICED * float(self.gradients[place].norm()),
                rtol=_NOTICED,
                raise_exception=False,
                check_undefined_grad=False,
                fast_mode=True,
            )
            for direction in self.directions[place]
            for step in _STEPS
        )

    def is_flat(self, place: int) -> bool:
        """Whether the forward does not change by a bit as some numbers move that get a gradient."""
        gradient = self.gradients[place].reshape(-1)
        some = torch.randperm(len(gradient), generator=self.generator)[:_PLACES]
        move = torch.zeros_like(gradient)
        move[some] = self.unit[place]
        move = move.reshape(self.args[place].shape)
        sides = (pair for step in _STEPS for pair in self.sides(place, move * step))
        return bool(gradient[some].any()) and all(torch.equal(a, b) for a, b in sides)

    def each(self, place: int) -> tuple[Tensor, Tensor]:
        """Return the slope along each number, and where the forward is flat.

        All are moved at once: right where each number of the output comes of the one in its place.
        """
        far = self.unit[place] * _STEPS[-1]
        ((above, below),) = self.sides(place, torch.full_like(self.args[place], far))
        return (above - below) * self.weights[0] / (2 * far), above == below

    def along(self, place: int, gradient: Tensor) -> Tensor:
        """Return what a gradient says along each direction."""
        return torch.stack([(gradient * one).sum().cpu() for one in self.directions[place]])


def _wrong_gradients(call: Call) -> list[Parting]:
    """Return the gradients of a call that are not the slope.

    Of their kinds, ``"slope"`` is meant by nobody; ``"approximation"``, ``"surrogate"`` (wrong only
    where the forward is flat) and ``"none"`` (zero throughout, or not given) may be.

    Raises:
        NotApplicableError: a gradient is another than the slope on purpose.
        UntellableError: nothing can be told.
    """
    point, close_by = _Point(call, nudged=False), None
    if point.dtype is not torch.float64:
        if any(map(point.is_flat, call.wanted)):
            raise NotApplicableError(_FLAT)
        raise UntellableError(f"it computes in {point.dtype} whatever it is given")
    with suppress(UntellableError):
        close_by = _Point(call, nudged=True)
    found = [one for place in call.wanted if (one := _judged(point, close_by, place)) is not None]
    wrong = [one for one in found if one.effect > _NOTICED]
    if wrong and _is_identity(close_by or point):
        raise NotApplicableError("its forward is the identity")
    if any(one.detail == _FLAT for one in found):
        raise NotApplicableError(_FLAT)
    if wrong and _is_quantised(point):
        raise NotApplicableError("its forward rounds to a few values, scaled or not")
    return wrong


def _judged(point: _Point, close_by: _Point | None, place: int) -> Parting | None:
    """Return what is wrong with a gradient, if anything is.

    A kink at the very point, such as that of a ReLU at the zeros of another one, is gone close by;
    there a slope is also seen that weights of zero hide.
    """
    if point.gradients[place].any() and point.passes(place):
        return None
    for one in filter(None, (close_by, point)):
        slopes = [[one.slope(place, d, step) for d in one.directions[place]] for step in _STEPS]
        if torch.tensor([*slopes[0], *slopes[1], one.gradients[place].norm()]).isfinite().all():
            return _looked_into(one, place, torch.tensor(slopes, dtype=torch.float64))
    raise UntellableError("its forward has no finite slope in float64")


def _looked_into(point: _Point, place: int, slopes: Tensor) -> Parting | None:
    """Return what is wrong with a gradient, by its slopes: a row a step, a column a direction."""
    gradient, slope = point.gradients[place], slopes[-1]
    given = point.along(place, gradient)
    # Along a direction at right angles to the gradient both are small by chance alone.
    scale = given.abs().maximum(slope.abs()).clamp(min=_SIDEWAYS * float(gradient.norm()))
    if not scale.any() or (given.any() and point.passes(place)):
        return None
    if point.is_flat(place):
        kind, why = "slope", _FLAT
    elif not gradient.any():
        kind, why = "none", _STOPS
    else:
        jumps = bool(((slopes[0] - slope).abs() > 4 * _NOTICED * scale).any())
        kind, why = "" if jumps else "approximation", _TERM
        for cause, may_be, candidate in _candidates(point, place, float(slope[0] / given[0])):
            if ((point.along(place, candidate) - slope).abs() <= _NOTICED * scale).all():
                kind, why = cause, may_be
                break
    errors = (given - slope).abs() / scale
    n = int(errors.argmax())
    found = Parting(
        kind,
        float(errors[n]),
        role="gradients",
        place=f"{point.call.name}.{point.call.argument(place)}",
        before=float(slope[n]),
        after=float(given[n]),
        line=near(point.call.line),
        detail=why,
    )
    return found if kind else None


def _candidates(point: _Point, place: int, ratio: float) -> Iterator[tuple[str, str, Tensor]]:
    """Yield what may be right in place of a gradient: the kind of fault then, what it is, and that.

    Args:
        point: has the gradient.
        place: of the argument that it is for.
        ratio: that of the slope to the gradient, along one direction.
    """
    own = point.gradients[place]
    if own.ndim >= 2 and own.shape[-1] == own.shape[-2] > 1:
        yield "slope", "the transpose of what is given is right", own.mT
    for other in point.call.wanted:
        if other != place and point.gradients[other].shape == own.shape:
            name = point.call.argument(other)
            why = f"what {name!r} is given is right: backward returns them in another order"
            yield "slope", why, point.gradients[other]
    yield "slope", "a sign", -own
    yield "slope", "a constant factor", own * ratio
    if [weight.shape for weight in point.weights] == [own.shape]:
        slope, is_flat = point.each(place)
        yield "surrogate", _PARTLY_FLAT, own.masked_fill(is_flat, 0.0)
        yield "slope", _MASK, torch.where((own == 0) | (slope == 0), slope, own)


_FLAT = "its forward is flat (rounding, a threshold), and has no slope to be told by"
_PARTLY_FLAT = (
    "it is given where the forward is flat too, and is right elsewhere: straight through by "
    "design, or the mask is left out of backward"
)
_STOPS = "backward gives it none: forgotten, or a stop like detach() by design"
_MASK = "a mask: numbers that should get none get one, or the other way round"
_TERM = (
    "a term is missing from backward, or a wrong tensor was saved for it; a gradient that is an "
    "approximation on purpose looks the same, and nothing that was seen tells"
)
_FEW_VALUES = 16
"""As many as four bits tell apart; what is scaled besides has a slope of its scale alone."""


def _is_identity(point: _Point) -> bool:
    """Whether all that it returns, and that has a gradient, is an argument as it was given."""
    given = [point.args[place].reshape(-1) for place in point.call.wanted]
    return all(any(torch.equal(o.reshape(-1), one) for one in given) for o in point.at({}))


def _is_quantised(point: _Point) -> bool:
    """Whether it returns few values of many, as weights of one bit times their scale."""
    few = max(len(output.unique()) for output in point.at({}))
    given = min(len(point.args[place].unique()) for place in point.call.wanted)
    return few <= _FEW_VALUES and given > 4 * few
