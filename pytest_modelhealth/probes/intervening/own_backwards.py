"""Custom functions of autograd by themselves: what their backward gives, against slopes."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_modelhealth.capture.observing.flow.own_functions import is_own
from pytest_modelhealth.capture.observing.flow.places import Place, line_of, place_of
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import copied_batch
from pytest_modelhealth.capture.step.conversion import converted_batch
from pytest_modelhealth.capture.step.interruption import exited_whole
from pytest_modelhealth.probes.intervening.running import Ran, Runs, said

STEPS = (1e-5, 1e-6)
"""How far an argument is moved, by its root mean square; in float64 both leave 6 digits or more."""

NOTICED = 5e-3
"""Errors below are not looked into: of half a million numbers a few lie within a step of a kink."""

_NUDGE = 0.1
"""How far an argument is moved, by its root mean square, off exact zeros, where a forward may have
a kink. Nearer, more numbers would lie within a step of it."""

_DIRECTIONS = 2
_PLACES = 16
_HUNTED = 3
_MOST_KINDS = 4
"""Calls of one function that are judged: of other dtypes, dimensions or options."""
_SEED = 20_240_229


@dataclass(frozen=True)
class Call:
    """One call of a custom function.

    Args:
        function: its class.
        args: what it was called with, tensors copied.
        wanted: the places of the arguments that require a gradient.
        number: how many calls of this class came before.
        of: how many calls of it there are.
        line: ``path:line`` of the user's code that called it; ``""`` if unknown.
    """

    function: type[Function]
    args: tuple[Any, ...]
    wanted: tuple[int, ...]
    number: int
    of: int = 0
    line: str = ""

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.function.__name__

    def argument(self, place: int) -> str:
        """Return the name that the forward has for an argument."""
        parameters = list(inspect.signature(self.function.forward).parameters.values())
        own = parameters if _has_setup(self.function) else parameters[1:]
        if place < len(own) and own[place].kind is not inspect.Parameter.VAR_POSITIONAL:
            return own[place].name
        return f"argument {place}"


@dataclass(frozen=True)
class Held:
    """A gradient, held against the slope of the forward.

    Args:
        argument: the name of the argument that it is for.
        error: how far the two are apart, by the larger of them.
        given: the gradient along a random direction.
        slope: the slope of the forward along it.
        why: what is likely wrong, a phrase; ``""`` where nothing is known.
        is_surrogate: whether it is wrong only where the forward is flat, and right elsewhere.
        is_none: whether it is zero throughout, or not given at all.
    """

    argument: str
    error: float
    given: float
    slope: float
    why: str = ""
    is_surrogate: bool = False
    is_none: bool = False


@dataclass
class Verdict:
    """What became of one function.

    Args:
        call: its call.
        wrong: the gradients that are not the slope.
        meant: why its gradient is another than the slope on purpose; ``""`` where it is not.
        doubt: why nothing can be told; ``""`` where something can.
    """

    call: Call
    wrong: list[Held] = field(default_factory=list)
    meant: str = ""
    doubt: str = ""


# What is called.


def recorded_calls(runs: Runs) -> tuple[list[Call], Ran]:
    """Run the model and its loss once, as inspected, and return the calls of custom functions.

    Of each function, the first call of each kind.
    """
    recorder = _Recorder()
    with _listens, exited_whole(recorder.listening()):
        ran = runs.forward(runs.batch(), with_loss=True, evaluation=False)
    return recorder.calls, ran


_listens = threading.RLock()
"""Functions are one for all threads: each puts back what it found, one thread after the other."""


class _Recorder:
    """Takes down arguments, by standing in for the forward of each function while it listens.

    A function that was bound early, ``f = Swish.apply``, looks its forward up at each call.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._counts: Counter[type[Function]] = Counter()
        self._kinds: Counter[type[Function]] = Counter()
        self._is_inside = False

    @property
    def calls(self) -> list[Call]:
        """What was called, in order."""
        return [replace(call, of=self._counts[call.function]) for call in self._calls.values()]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Put every forward back at the end, however it comes."""
        exchanged = [
            (function, vars(function).get("forward"), self._heard(function))
            for function in _own_functions()
        ]
        try:
            for function, _, stand_in in exchanged:
                setattr(function, "forward", stand_in)  # noqa: B010 - mypy knows it as a method
            yield
        finally:
            for function, before, _ in exchanged:
                if before is not None:
                    setattr(function, "forward", before)  # noqa: B010
                elif "forward" in vars(function):
                    delattr(function, "forward")

    def _heard(self, function: type[Function]) -> Any:
        forward: Any = function.forward
        first = 0 if _has_setup(function) else 1

        @functools.wraps(forward)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # a forward that calls another one: no backward of that runs
                return forward(*args, **kwargs)
            with suppress(Exception), torch.no_grad(), torch._C.DisableTorchFunction():
                self._take(function, args[first:], place_of(sys._getframe(1), None))
            self._is_inside = True
            try:
                return forward(*args, **kwargs)
            finally:
                self._is_inside = False

        return staticmethod(stand_in)

    def _take(self, function: type[Function], args: tuple[Any, ...], place: Place | None) -> None:
        wanted = tuple(n for n, arg in enumerate(args) if _is_wanted(arg))
        if not wanted:
            return
        number = self._counts[function]
        self._counts[function] += 1
        kind = (function, *map(_kind, args))
        if kind in self._calls or self._kinds[function] >= _MOST_KINDS:
            return
        self._kinds[function] += 1
        self._calls[kind] = Call(
            function, tuple(map(_copied, args)), wanted, number, line=line_of(place)
        )


def _own_functions() -> list[type[Function]]:
    found: dict[type[Function], None] = {}
    waiting: list[Any] = [Function]
    while waiting:
        for function in waiting.pop().__subclasses__():
            if function not in found:
                found[function] = None
                waiting.append(function)
    return [function for function in found if is_own(function)]


def _has_setup(function: type[Function]) -> bool:
    """Whether a forward gets no context, which `setup_context` gets in its stead."""
    return function.setup_context is not Function.setup_context


def _is_wanted(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.requires_grad
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.ndim, value.requires_grad
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copied_batch(value) if isinstance(value, list | tuple | dict) else value


# What it gives.


def held_to_slopes(runs: Runs, calls: Sequence[Call]) -> list[Verdict]:
    """Hold the gradients of each call against slopes, in float64."""
    given = [tensor for call in calls for tensor in find_tensors(call.args)]
    verdicts = []
    for call in calls:
        with runs.beside.put_back(given, evaluation=False), torch.enable_grad():
            verdicts.append(_verdict(call))
    return verdicts


class _UntellableError(Exception):
    """Why nothing can be told."""


class _WithoutCollectives(TorchDispatchMode):
    """Raises at a collective, before other ranks are waited for.

    Slopes on one rank leave out what moves on the others, so that they tell nothing of its sum.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            name = func.overloadpacket.__name__.rstrip("_")
            raise _UntellableError(
                f"it calls a collective ({name}), whose slope on one rank is not that on all"
            )
        return func(*args, **(kwargs or {}))


_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
"""Namespaces of the operations of `torch.distributed`."""


def _verdict(call: Call) -> Verdict:
    verdict = Verdict(call)
    try:
        at_hand = _Trial(call, nudged=False)
        if at_hand.doubt:
            is_flat = any(map(at_hand.is_flat, call.wanted))
            return Verdict(call, meant=_FLAT) if is_flat else Verdict(call, doubt=at_hand.doubt)
        nudged = _nudged(call)
        found = [_held(at_hand, nudged, place) for place in call.wanted]
    except _UntellableError as error:
        verdict.doubt = str(error)
        return verdict
    verdict.wrong = [held for held in found if held is not None and held.error > NOTICED]
    if verdict.wrong and (nudged or at_hand).is_identity:
        verdict.meant = "its forward is the identity"
    elif any(held is not None and held.why == _FLAT for held in found):
        verdict.meant = _FLAT
    elif verdict.wrong and at_hand.is_quantised:
        verdict.meant = "its forward rounds to a few values, scaled or not"
    return verdict


_FEW_VALUES = 16
"""As many as four bits tell apart; what is scaled besides has a slope of its scale alone."""
_FLAT = "its forward is flat (rounding, a threshold), and has no slope to be told by"


def _nudged(call: Call) -> _Trial | None:
    """Return the function at a point close by; ``None`` where it cannot be computed there."""
    try:
        return _Trial(call, nudged=True)
    except _UntellableError:
        return None


def _held(at_hand: _Trial, nudged: _Trial | None, place: int) -> Held | None:
    """Return how a gradient holds against slopes; ``None`` where there is nothing to hold.

    A kink at the very point, such as that of a ReLU at the zeros of another one, is gone close by;
    there a slope is also seen that weights of zero hide.
    """
    slopes = at_hand.slopes(place)
    if nudged is not None and (slopes.is_nothing or not slopes.are_right):
        close_by = nudged.slopes(place)
        if close_by.are_finite:
            return _looked_into(nudged, close_by)
    if slopes.is_nothing or slopes.are_right:
        return None
    if not slopes.are_finite:
        raise _UntellableError("its forward has no finite slope in float64")
    return _looked_into(at_hand, slopes)


@dataclass(frozen=True)
class _Slopes:
    """The gradient of one argument and the slopes of the forward, along random directions.

    Args:
        place: the place of the argument.
        given: the gradient along each direction.
        found: for each direction, the slope at each of the steps.
        size: the norm of the gradient.
    """

    place: int
    given: list[float]
    found: list[tuple[float, ...]]
    size: float

    @property
    def are_finite(self) -> bool:
        numbers = [*self.given, *(slope for slopes in self.found for slope in slopes)]
        return all(abs(number) < float("inf") for number in numbers)

    @property
    def is_nothing(self) -> bool:
        return not any(self.given) and not any(any(slopes) for slopes in self.found)

    @property
    def are_smooth(self) -> bool:
        """Whether both steps find the same slopes."""
        return all(
            abs(wide - narrow) <= 4 * NOTICED * self._scale(n)
            for n, (wide, narrow) in enumerate(self.found)
        )

    @property
    def are_right(self) -> bool:
        return self.are_finite and self.are_smooth and self.errors[self.worst] <= NOTICED

    @property
    def errors(self) -> list[float]:
        return [
            abs(given - self.found[n][-1]) / (self._scale(n) or 1.0)
            for n, given in enumerate(self.given)
        ]

    @property
    def worst(self) -> int:
        return self.errors.index(max(self.errors))

    def _scale(self, direction: int) -> float:
        """Return what errors are relative to.

        Along a direction at right angles to the gradient both are small by chance alone.
        """
        slopes = self.found[direction]
        return max(abs(self.given[direction]), abs(slopes[-1]), 0.3 * self.size)


class _Trial:
    """A function at one point, in float64.

    Args:
        call: a call of it.
        nudged: whether to move the arguments to a point close by.

    Raises:
        _UntellableError: it cannot be computed or differentiated there.
    """

    def __init__(self, call: Call, *, nudged: bool) -> None:
        self.call = call
        self._generator = torch.Generator().manual_seed(_SEED)
        self._args = list(converted_batch(call.args, torch.float64))
        for place in call.wanted:
            argument = self._args[place]
            if argument.is_complex() or argument.layout is not torch.strided:
                raise _UntellableError("it takes complex or sparse numbers, which are not moved")
            if nudged:
                argument += _NUDGE * self._unit(place) * self._random(argument)
        self._weights: list[Tensor | None] = []
        self.doubt = ""
        """Why slopes are lost to rounding; ``""`` where they are not."""
        with _WithoutCollectives():  # type: ignore[no-untyped-call]
            self._gradients = self._differentiated()

    @property
    def is_identity(self) -> bool:
        """Whether all that it returns, and that has a gradient, is an argument as it was given."""
        given = [self._args[place].reshape(-1) for place in self.call.wanted]
        outputs = self._values({})
        return all(
            any(torch.equal(output.reshape(-1), argument) for argument in given)
            for output, weight in zip(outputs, self._weights, strict=True)
            if weight is not None
        )

    @property
    def is_quantised(self) -> bool:
        """Whether it returns few values of many, as weights of one bit times their scale."""
        outputs = [o for o, w in zip(self._values({}), self._weights, strict=True) if w is not None]
        given = min(len(self._args[place].unique()) for place in self.call.wanted)
        few = max(len(output.unique()) for output in outputs)
        return few <= _FEW_VALUES and given > 4 * few

    def _differentiated(self) -> dict[int, Tensor]:
        leaves = {place: self._args[place].clone().requires_grad_() for place in self.call.wanted}
        outputs = self._computed(leaves)
        live = [output for output in outputs if output.requires_grad]
        if not live:
            raise _UntellableError("nothing that it returns has a gradient")
        if any(output.dtype is not torch.float64 for output in live):
            self.doubt = f"it computes in {live[0].dtype} whatever it is given"
        if not all(map(torch.equal, outputs, self._values({}))):
            raise _UntellableError("it is not the same twice on one input, or gives NaN")
        self._weights = [self._random(o).to(o.dtype) if o.requires_grad else None for o in outputs]
        weights = [weight for weight in self._weights if weight is not None]
        try:
            gradients = torch.autograd.grad(
                live,
                list(leaves.values()),
                weights,
                allow_unused=True,
                materialize_grads=True,
            )
        except _UntellableError:
            raise
        except Exception as error:
            raise _UntellableError(f"its backward raises in float64: {said(error)}") from error
        return {place: gradient.detach() for place, gradient in zip(leaves, gradients, strict=True)}

    def _computed(self, leaves: dict[int, Tensor]) -> list[Tensor]:
        """Return what it returns; of copies, since it may write to what it is given."""
        args = [
            leaves[n].clone() if n in leaves else _copied(arg) for n, arg in enumerate(self._args)
        ]
        torch.manual_seed(_SEED)
        try:
            return find_tensors(self.call.function.apply(*args))
        except _UntellableError:
            raise
        except Exception as error:
            raise _UntellableError(f"in float64 it raises {said(error)}") from error

    def _values(self, moved: dict[int, Tensor]) -> list[Tensor]:
        leaves = {place: self._args[place] for place in self.call.wanted} | moved
        live = {place: leaf.detach().requires_grad_() for place, leaf in leaves.items()}
        return [output.detach() for output in self._computed(live)]

    def rise(self, place: int, move: Tensor) -> tuple[float, bool]:
        """Return by how much the weighted outputs rise from one side to the other, and if any."""
        point = self._args[place]
        above, below = self._values({place: point + move}), self._values({place: point - move})
        rise, moved = 0.0, False
        for one, other, weight in zip(above, below, self._weights, strict=True):
            if weight is not None:
                rise += float(((one - other) * weight).sum())
                moved = moved or not torch.equal(one, other)
        return rise, moved

    def slopes(self, place: int) -> _Slopes:
        """Return the gradient and the slopes of an argument along random directions."""
        gradient, unit = self._gradients[place], self._unit(place)
        directions = [self._random(gradient) for _ in range(_DIRECTIONS)]
        found = [
            tuple(self.rise(place, d * (unit * step))[0] / (2 * unit * step) for step in STEPS)
            for d in directions
        ]
        given = [float((gradient * direction).sum()) for direction in directions]
        return _Slopes(place, given, found, float(gradient.norm()))

    def gradient(self, place: int) -> Tensor:
        """Return the gradient of an argument."""
        return self._gradients[place]

    def slope_at(self, place: int, index: int) -> tuple[float, bool] | None:
        """Return the slope along one number, and whether the forward is flat there.

        Returns:
            ``None`` where it jumps: the two steps differ.
        """
        unit, found, flat = self._unit(place), [], True
        for step in STEPS:
            move = torch.zeros_like(self._args[place]).reshape(-1)
            move[index] = unit * step
            rise, moved = self.rise(place, move.reshape(self._args[place].shape))
            found.append(rise / (2 * unit * step))
            flat = flat and not moved
        wide, narrow = found
        is_smooth = abs(wide - narrow) <= 0.1 * max(abs(wide), abs(narrow))
        return (wide, flat) if is_smooth else None

    def worst_index(self, place: int) -> int:
        """Return the number of an argument that is wrong, found by halves along a direction."""
        gradient, unit = self._gradients[place], self._unit(place)
        direction = self._random(gradient).reshape(-1)

        def error_of(numbers: Tensor) -> float:
            part = torch.zeros_like(direction)
            part[numbers] = direction[numbers]
            part = part.reshape(gradient.shape)
            slope = self.rise(place, part * (unit * STEPS[0]))[0] / (2 * unit * STEPS[0])
            return float((gradient * part).sum()) - slope

        among = torch.randperm(gradient.numel(), generator=self._generator).to(gradient.device)
        error = error_of(among)
        while len(among) > 1:
            half, other = among[: len(among) // 2], among[len(among) // 2 :]
            of_half = error_of(half)
            is_here = abs(of_half) >= abs(error - of_half)
            among, error = (half, of_half) if is_here else (other, error - of_half)
        return int(among[0])

    def is_flat(self, place: int) -> bool:
        """Whether the forward does not change by a bit as some numbers move that get a gradient."""
        some = self.any_indices(place, _PLACES)
        if not self._gradients[place].reshape(-1)[some].any():
            return False
        move = torch.zeros_like(self._args[place]).reshape(-1)
        move[some] = self._unit(place)
        move = move.reshape(self._args[place].shape)
        return not any(self.rise(place, move * step)[1] for step in STEPS)

    def any_indices(self, place: int, count: int) -> list[int]:
        """Return some numbers of an argument, at random."""
        size = self._gradients[place].numel()
        return torch.randperm(size, generator=self._generator)[:count].tolist()

    def _unit(self, place: int) -> float:
        argument = self._args[place]
        return (float(argument.square().mean().sqrt()) if argument.numel() else 0.0) or 1.0

    def _random(self, like: Tensor) -> Tensor:
        made = torch.randn(like.shape, generator=self._generator, dtype=torch.float64)
        return made.to(like.device)


# What is wrong with it.


@dataclass(frozen=True)
class _Number:
    """One number of an argument: its gradient, the slope along it, and if the forward is flat."""

    index: int
    given: float
    slope: float
    is_flat: bool
    is_right: bool


def _looked_into(trial: _Trial, slopes: _Slopes) -> Held | None:
    """Return how a gradient holds against slopes, looking at single numbers if it does not."""
    if slopes.is_nothing or slopes.are_right:
        return None
    place, worst = slopes.place, slopes.worst
    error, given, slope = slopes.errors[worst], slopes.given[worst], slopes.found[worst][-1]
    name = trial.call.argument(place)
    if trial.is_flat(place):
        return Held(name, error, given, slope, _FLAT)
    numbers = _numbers(trial, place)
    wrong = [number for number in numbers if not number.is_right]
    if not wrong and not slopes.are_smooth:
        return None  # it jumps somewhere, and is right elsewhere
    if wrong and all(number.is_flat for number in wrong):
        return Held(name, error, given, slope, _PARTLY_FLAT, is_surrogate=True)
    if not slopes.size:
        return Held(name, error, given, slope, _STOPS, is_none=True)
    return Held(name, error, given, slope, _cause(trial, slopes, wrong))


_PARTLY_FLAT = (
    "it is given where the forward is flat too, and is right elsewhere: straight through by "
    "design, or the mask is left out of backward"
)

_STOPS = "backward gives it none: forgotten, or a stop like detach() by design"


def _numbers(trial: _Trial, place: int) -> list[_Number]:
    """Return what is known of some numbers of an argument, and of some that are wrong."""
    indices = trial.any_indices(place, _PLACES)
    if trial.gradient(place).numel() > len(indices):
        indices += [trial.worst_index(place) for _ in range(_HUNTED)]
    gradient = trial.gradient(place).reshape(-1)
    least = NOTICED * float(gradient.abs().max())
    numbers = []
    for index in dict.fromkeys(indices):
        found = trial.slope_at(place, index)
        if found is not None:
            given, (slope, is_flat) = float(gradient[index]), found
            is_right = _agree(given, slope, least)
            numbers.append(_Number(index, given, slope, is_flat, is_right))
    return numbers


def _agree(given: float, slope: float, least: float = 0.0) -> bool:
    return abs(given - slope) <= NOTICED * max(abs(given), abs(slope), least, 1e-9)


def _cause(trial: _Trial, slopes: _Slopes, wrong: Sequence[_Number]) -> str:
    """Return what is likely wrong, a phrase."""
    swapped = _of_another(trial, slopes.place, wrong)
    if swapped:
        return swapped
    ratios = [g / found[-1] for g, found in zip(slopes.given, slopes.found, strict=True)
              if found[-1]]  # fmt: skip
    if len(ratios) > 1 and max(ratios) - min(ratios) <= 0.01 * abs(ratios[0]):
        return "a sign" if _agree(ratios[0], -1.0, 10.0) else "a constant factor"
    if wrong and all(not n.given or not n.slope for n in wrong):
        return "a mask: numbers that should get none get one, or the other way round"
    return TERM


TERM = (
    "a term is missing from backward, or a wrong tensor was saved for it; a gradient that is an "
    "approximation on purpose looks the same, and nothing that was seen tells"
)


def _of_another(trial: _Trial, place: int, wrong: Sequence[_Number]) -> str:
    """Return that the slopes are those of other numbers: of the transpose, of another argument."""
    own = trial.gradient(place)
    if own.ndim >= 2 and own.shape[-1] == own.shape[-2] > 1 and _fits(own.mT, wrong):
        return "the transpose of what is given is right"
    call = trial.call
    for other in call.wanted:
        gradient = trial.gradient(other)
        if other != place and gradient.shape == own.shape and _fits(gradient, wrong):
            name = call.argument(other)
            return f"what {name!r} is given is right: backward returns them in another order"
    return ""


def _fits(gradient: Tensor, wrong: Sequence[_Number]) -> bool:
    flat = gradient.reshape(-1)
    return bool(wrong) and all(_agree(float(flat[n.index]), n.slope) for n in wrong)
