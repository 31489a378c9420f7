"""Runs the model for probes, each from the state of the first, and how far two runs are apart."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.observing.tensors import find_tensors, version
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, deep_copy
from pytest_modelhealth.capture.step.guard import Guard
from pytest_modelhealth.capture.step.loss import TaskLosses, compute_loss, no_loss
from pytest_modelhealth.errors import InspectionError, in_one_line
from pytest_modelhealth.probes.conventions import Conventions, UntellableError
from pytest_modelhealth.report import Observation
from pytest_modelhealth.settings import Settings

SEED = 20_240_229
"""Of what probes draw themselves."""

_STEADY = 1e-5
"""Kernels that add up in any order make less of a difference."""
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Differences, by the root mean square, that another order of the same additions may make."""


Values = Callable[[int, Tensor], Tensor | None]
"""Makes other values, of any size, of the number of a tensor in the batch and the tensor."""


@dataclass
class Ran:
    """What one run of the model gave."""

    outputs: list[Tensor] = field(default_factory=list)  # copied
    error: str = ""  # what it raised instead, as text
    wrote: tuple[int, ...] = ()  # which tensors of its batch it wrote to, as in `changeable`
    read: list[Tensor | None] = field(default_factory=list)  # the gradient of the loss at each


@dataclass(eq=False)
class Runs:
    """Further runs of an inspected model, each from the state and the random numbers of the first.

    Attributes:
        count: how many ``"forwards"`` and ``"backwards"`` a probe ran.
        base_forwards, base_seconds: of the runs that the probes share.
    """

    engine: Engine
    request: Request
    observation: Observation
    settings: Settings
    conventions: Conventions
    base_forwards: int = 0
    base_seconds: float = 0.0
    count: Counter[str] = field(default_factory=Counter)
    _base: Ran | None = None
    _guard: Guard | None = None
    _spare: Inputs | None = None

    @cached_property
    def _arguments(self) -> Inputs:
        return Inputs.of(self.request.inputs)

    @cached_property
    def why_not(self) -> str:
        """Why the model cannot be run again by itself; ``""`` if it can."""
        if self.engine.compiled:
            return 'compiled code is not probed: leave out compiled="observe"'
        try:
            if self._beside.is_lazy:
                return (
                    "the model is lazy, and has no parameters yet: run one batch through it first"
                )
            self._spare = self.batch()
        except InspectionError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - an object of the user's
            return f"the batch cannot be copied, and so not be changed: {in_one_line(error)}"
        return ""

    @cached_property
    def _beside(self) -> Beside:
        return Beside(self.engine.module(self.request.model), self.request.loss)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._beside.model

    def kept(self, batch: Any) -> AbstractContextManager[Guard]:
        """Put back what happens inside to the model, to the batch and to the model's mode."""
        return self._beside.put_back(batch, evaluation=False)

    def output(self, batch: Inputs) -> Any:
        """Run the model, inside of `kept`: the one place where a probe does."""
        self.count["forwards"] += 1
        return batch.call(self.model)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """What `changeable` finds in the batch."""
        return changeable(self._arguments)

    @property
    def has_others(self) -> bool:
        """Whether the batch holds tensors that are not changed: sparse or nested ones, say."""
        everything = find_tensors((self._arguments.args, self._arguments.kwargs))
        return len(everything) > len(self.tensors)

    def batch(self) -> Inputs:
        """Return a copy of the batch, to be changed."""
        args, kwargs = deep_copy((self._arguments.args, self._arguments.kwargs))
        return Inputs(*args, **kwargs)

    def changed(self, *changes: Values) -> Inputs:
        """Return a copy of the batch in which tensors have other values, by one after the other."""
        batch = self.batch()
        with torch.no_grad():
            for number, tensor in enumerate(changeable(batch)):
                for change in changes:
                    values = change(number, tensor.detach())
                    if values is not None:
                        tensor.data = values
        return batch

    def is_changed(self, change: Values) -> bool:
        """Whether a change gives the batch other values."""
        pairs = ((change(n, tensor.detach()), tensor) for n, tensor in enumerate(self.tensors))
        return any(after is not None and not torch.equal(after, t) for after, t in pairs)

    @property
    def base(self) -> Ran:
        """The unchanged batch in evaluation mode, which all probes share."""
        if self._base is None:
            start = time.perf_counter()
            self._base = self.forward(self._spare or self.batch(), with_loss=True)
            self.count["forwards"] -= 1
            self.base_forwards += 1
            self.base_seconds += time.perf_counter() - start
        if self._base.error:
            raise UntellableError(f"in evaluation mode the model raises {self._base.error}")
        return self._base

    @cached_property
    def is_steady(self) -> bool:
        """Whether the batch repeats itself, as with a forward that keeps nothing elsewhere."""
        again = self.forward(self.batch())
        difference = largest_difference(self.base.outputs, again.outputs)
        return not again.error and (difference is None or difference.effect <= _STEADY)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put everything back once for all runs inside, which is a good part of a small one."""
        with self.kept(()) as self._guard:
            try:
                yield
            finally:
                self._guard = None

    def forward(self, batch: Inputs, **options: Any) -> Ran:
        """Run the model once, as `take` does, and put everything back, or all that is `held`."""
        if self._guard is not None:
            self._guard.restore_numbers()
            return self.take(batch, **options)
        with self.kept((batch.args, batch.kwargs)):
            return self.take(batch, **options)

    def take(
        self,
        batch: Inputs,
        *,
        seed: int | None = None,
        with_loss: bool = False,
        evaluation: bool = True,
    ) -> Ran:
        """Run the model inside of `kept`; with its loss, see where in the outputs that looks."""
        ran, arguments = Ran(), changeable(batch)
        versions = [version(tensor) for tensor in arguments]
        try:
            if evaluation:
                self.model.eval()  # which may be the user's own
            if seed is not None:
                torch.manual_seed(seed)
            output = self.output(batch)
            if with_loss:
                self._take_loss(output, ran)
        except Exception as error:  # noqa: BLE001 - the user's, on a batch that we changed
            ran.error = in_one_line(error)
            return ran
        ran.wrote = tuple(n for n, t in enumerate(arguments) if version(t) != versions[n])
        with torch.no_grad():
            ran.outputs = [tensor.detach().clone() for tensor in find_tensors(output)]
        return ran

    def loss_of(self, output: Any, target: Any) -> Tensor | None:
        """Return the loss that was inspected, of an output; ``None`` where there is no number."""
        function: Any = self.request.loss
        if isinstance(function, Mapping):
            function = TaskLosses(function)
        return compute_loss(output, target, function)

    def _take_loss(self, output: Any, ran: Ran) -> None:
        """Take down the gradient of the loss at each output, where there is one."""
        outputs = find_tensors(output)
        ran.read = [None] * len(outputs)
        with suppress(Exception):  # the inspection has run this loss; in evaluation it may not
            loss = self.loss_of(output, self.request.target)
            if loss is None or (self.request.loss is None and not any(loss is t for t in outputs)):
                return  # a projection of all that there is
            wanted = [n for n, t in enumerate(outputs) if t.requires_grad and t is not loss]
            gradients = torch.autograd.grad(loss, [outputs[n] for n in wanted], allow_unused=True)
            for number, gradient in zip(wanted, gradients, strict=True):
                ran.read[number] = gradient

    @contextmanager
    def watched(self, batch: Inputs) -> Iterator[Request]:
        """Give a request for a watched run of a batch in evaluation mode, counted as one."""
        self.count["forwards"] += 1
        with self._beside.put_back((batch.args, batch.kwargs), evaluation=True, watched=True):
            yield replace(
                self.request, inputs=batch, target=None, loss=no_loss, backward=False, scaler=None
            )


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers that may be far apart or near."""
    return tensor.is_floating_point() or tensor.is_complex()


def permutation(count: int) -> Tensor:
    """Return another order of so many, always the same."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
    return order.roll(1) if torch.equal(order, torch.arange(count)) else order


def changeable(batch: Inputs) -> list[Tensor]:
    """Return the tensors in the arguments of a model that can have other values, in order."""
    return [
        tensor
        for tensor in find_tensors((batch.args, batch.kwargs))
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    ]


# ---- how far tensors are apart -------------------------------------------------------------------


class Difference(NamedTuple):
    """How far two tensors are apart where they should be equal, at most.

    The effect is by the root mean square of the finite numbers of the first tensor, and infinite
    where a number is finite in one of them alone.
    """

    effect: float
    place: tuple[int, ...]
    before: float
    after: float


def difference_of(before: Tensor, after: Tensor, same: Tensor | None = None) -> Difference | None:
    """Return how far two tensors are apart; ``None`` where they hold no numbers to hold together.

    The mask of where they should be equal broadcasts to their shape; ``None`` is everywhere.
    """
    is_plain = before.layout is after.layout is torch.strided and not before.is_quantized
    if before.is_nested or not is_plain or before.shape != after.shape or not before.numel():
        return None
    a, b = before.detach(), after.detach()
    equal = a == b if same is None else (a == b) | ~same
    if bool(equal.all()):  # as a rule, and far cheaper to see
        return Difference(0.0, (), 0.0, 0.0)
    same = torch.ones((), dtype=torch.bool, device=a.device) if same is None else same
    if a.is_complex():
        a, b, same = torch.view_as_real(a), torch.view_as_real(b), same.unsqueeze(-1)
    with torch.no_grad():
        a, b = a.double(), b.double()
        scale = _rms(a) or _rms(b)
        if not math.isfinite(scale):
            return None
        distance = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        distance = distance.masked_fill((a == b) | (a.isnan() & b.isnan()) | ~same, 0.0)
        index = int(distance.argmax())
        most, *values = (float(one.reshape(-1)[index]) for one in (distance, a, b))
        place = tuple(int(n) for n in np.unravel_index(index, a.shape))
        return Difference(most / scale if scale else 0.0, place[: before.ndim], *values)


def _rms(values: Tensor) -> float:
    """Return the root mean square of the finite numbers, NaN where there are none."""
    return float(values[values.isfinite()].square().mean().sqrt())


def least_difference(ways: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Difference | None:
    """Return how far two tensors are apart, in that way to read their dimensions which is least.

    Each way is both tensors and the mask of where they should be equal. What another order of the
    same additions explains is an effect of 0.
    """
    least: Difference | None = None
    for before, after, mask in ways:
        way = difference_of(before, after, mask)
        if way is not None and way.effect <= _ROUNDING.get(before.dtype, 1e-5):
            return way._replace(effect=0.0)
        least = min(filter(None, (least, way)), default=None)
    return least


def largest_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> Difference | None:
    """Return how far the two are apart that differ most, of tensors in the same places."""
    differences = (difference_of(a, b) for a, b in zip(before, after, strict=False))
    return max((one for one in differences if one is not None), default=None)


def are_apart(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether two runs return other tensors, or other numbers in them; a NaN is as another."""
    difference = largest_difference(before, after)
    has_moved = difference is not None and difference.effect > 0.0
    return has_moved or [t.shape for t in before] != [t.shape for t in after]
