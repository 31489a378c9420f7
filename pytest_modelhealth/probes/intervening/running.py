"""Runs the model for probes, each from the state of the first, and how far two runs are apart."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.observing.tensors import find_tensors, version
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.guard import Guard
from pytest_modelhealth.capture.step.loss import compute_loss, no_loss
from pytest_modelhealth.errors import InspectionError, in_one_line
from pytest_modelhealth.probes.conventions import Conventions, UntellableError
from pytest_modelhealth.probes.intervening.batches import Batch, changeable, is_number
from pytest_modelhealth.report import Observation
from pytest_modelhealth.settings import Settings

_STEADY = 1e-5
"""Kernels that add up in any order make less of a difference."""
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Differences, by the root mean square, that another order of the same additions may make."""


@dataclass
class Ran:
    """What one run of the model gave."""

    outputs: list[Tensor] = field(default_factory=list)  # copied
    error: str = ""  # what it raised instead, as text
    wrote: tuple[int, ...] = ()  # which tensors of its batch it wrote to
    drew: bool = False  # whether it drew random numbers, on the CPU
    returned: Any = None  # the outputs as the loss takes them


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
    _read: list[Tensor | None] | None = None
    _guard: Guard | None = None
    _has_graphs: bool = False

    def __post_init__(self) -> None:
        self._has_graphs = self.request.target is None  # the loss may be the model's own

    @cached_property
    def whole(self) -> Batch:
        """The batch that was inspected."""
        return Batch(Inputs.of(self.request.inputs), self.request.target, self.conventions)

    @cached_property
    def batch(self) -> Batch:
        """The batch that is run again: a few samples where the model takes them."""
        sizes = {n for parameter in self.model.parameters() for n in parameter.shape}
        few = self.whole.few(sizes.union(*(shape[1:] for shape in self.shapes)))
        self._base = self._unchanged(few)
        if few is not self.whole and self._base.error:
            self._base = None
            return self.whole
        return few

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Those of what the inspected layers returned."""
        seen = (record.activations for record in self.observation.layers.values())
        return [one.shape for one in seen if one is not None]

    def takes(self, batch: Batch) -> bool:
        """Whether the model and the loss take another batch, which is run from now on then."""
        base = self._unchanged(batch)
        read = None if base.error else self._gradients(base, batch)
        if read is not None:
            self.batch, self._base, self._read = batch, base, read
        return read is not None

    @property
    def base(self) -> Ran:
        """The unchanged batch in evaluation mode, which all probes share."""
        batch = self.batch
        if self._base is None:
            self._base = self._unchanged(batch)
        if self._base.error:
            raise UntellableError(f"in evaluation mode the model raises {self._base.error}")
        return self._base

    @property
    def read(self) -> Sequence[Tensor | None]:
        """The gradient of the loss at each output of the base; ``None`` where it reads none.

        A loss that does not take so few samples has the whole batch run from now on.
        """
        base = self.base
        while self._read is None:
            self._read = self._gradients(base, self.batch)
            if self._read is None and self._has_graphs and self.batch is self.whole:
                self._read = [None] * len(base.outputs)
            elif self._read is None:
                if self._has_graphs:
                    self.batch = self.whole
                self._has_graphs, self._base = True, None
                base = self.base
        return self._read

    def _unchanged(self, batch: Batch) -> Ran:
        start, forwards = time.perf_counter(), self.count["forwards"]
        ran = self.forward(batch.copy())
        if ran.error and not self._has_graphs:  # it may differentiate in its forward
            self._has_graphs = True
            ran = self.forward(batch.copy())
        self.base_forwards += self.count["forwards"] - forwards
        self.count["forwards"] = forwards
        self.base_seconds += time.perf_counter() - start
        return ran

    @cached_property
    def why_not(self) -> str:
        """Why the model cannot be run again by itself; ``""`` if it can."""
        try:
            if self._beside.is_lazy:
                return (
                    "the model is lazy, and has no parameters yet: run one batch through it first"
                )
            self.whole.copy()
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
    def is_steady(self) -> bool:
        """Whether the batch repeats itself, as with a forward that keeps nothing elsewhere."""
        again = self.forward(self.batch.copy())
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

    def forward(self, batch: Inputs, seed: int | None = None) -> Ran:
        """Run the model once, as `take` does, and put everything back, or all that is `held`."""
        if self._guard is not None:
            if self.base_forwards or self.count:
                self._guard.restore_numbers()
            return self.take(batch, seed)
        with self.kept((batch.args, batch.kwargs)):
            return self.take(batch, seed)

    def take(self, batch: Inputs, seed: int | None = None) -> Ran:
        """Run the model in evaluation mode inside of `kept`, without graphs where it can.

        Args:
            batch: what it is given.
            seed: of its random numbers; ``None`` goes on.
        """
        ran, arguments = Ran(), changeable((batch.args, batch.kwargs))
        versions = [version(tensor) for tensor in arguments]
        try:
            if self._beside.may_train:
                self.model.eval()  # which may be the user's own
            if seed is not None:
                torch.manual_seed(seed)
            numbers = torch.get_rng_state()
            with torch.set_grad_enabled(torch.is_grad_enabled() and self._has_graphs):
                ran.returned = self.output(batch)
        except Exception as error:  # noqa: BLE001 - the user's, on a batch that we changed
            ran.error = in_one_line(error)
            return ran
        ran.drew = not torch.equal(numbers, torch.get_rng_state())
        ran.wrote = tuple(n for n, t in enumerate(arguments) if version(t) != versions[n])
        with torch.no_grad():
            ran.outputs = [tensor.detach().clone() for tensor in find_tensors(ran.returned)]
        return ran

    def loss_of(self, output: Any, target: Any) -> Tensor | None:
        """Return the loss that was inspected, of an output; ``None`` where there is no number."""
        return compute_loss(output, target, self.request.loss)

    def _gradients(self, ran: Ran, batch: Batch) -> list[Tensor | None] | None:
        """Return the gradient of the loss at each output; ``None`` where it cannot be had so."""
        outputs = find_tensors(ran.returned)
        read: list[Tensor | None] = [None] * len(outputs)
        if not torch.is_grad_enabled():
            return read
        ends = [t for t in outputs if is_number(t) and not t.requires_grad and t.is_leaf]
        if any(t.numel() == 1 for t in ends):  # a loss that the model computes
            return None
        try:  # the inspection has run this loss; in evaluation it may not
            with nullcontext() if self._guard is not None else self.kept(()):
                for tensor in ends:
                    tensor.requires_grad_()
                loss = self.loss_of(ran.returned, batch.target)
                is_own = self.request.loss is not None or any(loss is t for t in outputs)
                if loss is None or not is_own:
                    return read  # a projection of all that there is
                wanted = [n for n, t in enumerate(outputs) if t.requires_grad and t is not loss]
                asked = [outputs[n] for n in wanted]
                gradients = torch.autograd.grad(loss, asked, allow_unused=True) if asked else ()
                for number, gradient in zip(wanted, gradients, strict=True):
                    read[number] = gradient
                return read
        except Exception:  # noqa: BLE001 - the user's
            return None
        finally:
            for tensor in ends:
                tensor.requires_grad_(False)

    @contextmanager
    def watched(self, batch: Inputs) -> Iterator[Request]:
        """Give a request for a watched run of a batch in evaluation mode, counted as one."""
        self.count["forwards"] += 1
        with self._beside.put_back((batch.args, batch.kwargs), evaluation=True, watched=True):
            yield replace(
                self.request, inputs=batch, target=None, loss=no_loss, backward=False, scaler=None
            )


# ---- how far tensors are apart -------------------------------------------------------------------


class Difference(NamedTuple):
    """How far two tensors are apart where they should be equal, at most.

    The effect is by the root mean square of the finite numbers of the first tensor, and infinite
    where a number is finite in one of them alone.
    """

    effect: float
    place: str
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
        return Difference(0.0, "", 0.0, 0.0)
    if a.is_complex():
        a, b, equal = torch.view_as_real(a), torch.view_as_real(b), equal.unsqueeze(-1)
    if a.dtype not in (torch.float32, torch.float64):
        a, b = a.double(), b.double()
    with torch.no_grad():
        scale = _rms(a) or _rms(b)
        if not math.isfinite(scale):
            return None
        distance = (a - b).abs_().masked_fill_(equal, 0.0)
        if not math.isfinite(float(distance.sum())):
            distance.nan_to_num_(nan=math.inf, posinf=math.inf).masked_fill_(
                a.isnan() & b.isnan(), 0.0
            )
        index = int(distance.argmax())
        most, *values = (float(one.reshape(-1)[index]) for one in (distance, a, b))
        place = [int(n) for n in np.unravel_index(index, a.shape)][: before.ndim]
        return Difference(most / scale if scale else 0.0, str((*place,)), *values)


def _rms(values: Tensor) -> float:
    """Return the root mean square of the finite numbers, NaN where there are none."""
    norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    if math.isfinite(norm):
        return norm / math.sqrt(values.numel())
    return float(values[values.isfinite()].double().square().mean().sqrt())


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
