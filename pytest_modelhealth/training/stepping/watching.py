"""One call of a training step, watched through public hooks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pytest_modelhealth.capture.eager import is_compiled
from pytest_modelhealth.capture.observing.hooks import OurHook
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.passive.hooks import parameters_of


@dataclass
class Steps:
    """The steps of one optimizer in one call.

    Args:
        optimizer: the optimizer.
        count: how many.
        rate: its largest learning rate at the first.
        passes: the backward passes that are in the gradients of its first step.
        evaluations: what its closure returned, each time.
        emptied: whether its state, which it had after its step before, was gone at the first.
        early: whether a schedule of its rate had moved on in the call before it.
        along: inner product of the first update of all calls and the gradient, and both squared
            norms.
    """

    optimizer: Any
    count: int = 0
    rate: float = 0.0
    passes: set[int] = field(default_factory=set)
    evaluations: list[float] = field(default_factory=list)
    emptied: bool = False
    early: bool = False
    along: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass
class Call:
    """What one call did; parameters by their `id`.

    Args:
        began: whether the model was in training mode when the call began.
        result: what the step returned.
        steps: of each optimizer that stepped, by its `id`.
        gradients: a copy of each gradient when its optimizer first stepped, else as it was when the
            call ended.
        at_step: which of these were taken at a step.
        added: L2 norm of what backward passes left.
        updated: L2 norm of what optimizers changed; by that of the values before, once the call is
            over that `call_step` made.
        changes: the same of the whole call.
        used_again: parameters whose optimizer stepped on what it had stepped on before.
        erased: parameters whose gradient was all zero at the step, and not as it was left.
        cleared: parameters whose gradient was cleared before an optimizer stepped on it.
        wasted: backward passes that were cleared so, and that no optimizer stepped on anywhere.
        late: parameters whose gradient was written to after the step on it, and not cleared.
        at_first: copies of parameters before their optimizer's first step.
        passes: the parameters that each backward pass reached.
        sizes: lengths of the tensors that the model was called with, where gradients were on.
        modes: by module, whether it was in training mode and gradients were on, of each run.
    """

    began: bool = True
    result: Any = None
    steps: dict[int, Steps] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    at_step: set[int] = field(default_factory=set)
    added: dict[int, float] = field(default_factory=dict)
    updated: dict[int, float] = field(default_factory=dict)
    changes: dict[int, float] = field(default_factory=dict)
    used_again: set[int] = field(default_factory=set)
    erased: set[int] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    wasted: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    at_first: dict[int, Tensor] = field(default_factory=dict)
    passes: dict[int, set[int]] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)
    modes: dict[nn.Module, set[tuple[bool, bool]]] = field(default_factory=dict)


class Watch:
    """Watches calls of a step one after the other; nothing of it stays on the model.

    Args:
        model: the model.
        parameters: every tensor that may get a gradient, the model's and the optimizers'.
        by_hand: whether what a call changes is its step, where no optimizer steps in it.
        schedules: schedules of rates.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[int, Tensor],
        *,
        by_hand: bool = False,
        schedules: Sequence[Any] = (),
    ) -> None:
        self.model, self._parameters, self._by_hand = model, parameters, by_hand
        self._schedules = schedules
        self._before: dict[int, dict[int, Tensor]] = {}  # copies, of optimizers whose step runs
        self._within: dict[int, set[int]] = {}  # the backward passes that a gradient is the sum of
        self._used: dict[tuple[int, int], set[int]] = {}  # those that an optimizer has stepped on
        self._stepped: dict[int, bool] = {}  # optimizers, and whether they had a state then
        self._spent: set[tuple[int, int]] = set()  # backward passes stepped on, of each parameter
        self._after: dict[int, tuple[Tensor, int]] = {}  # gradients after a step, their versions
        self._left: dict[int, Tensor] = {}  # gradients of this call as backward passes left them
        self.seen = Call()

    @contextmanager
    def call(self) -> Iterator[Call]:
        """Watch one call."""
        self.seen = seen = Call(self.model.training)
        self._left.clear()
        self._after.clear()
        self._epochs = [getattr(one, "last_epoch", None) for one in self._schedules]
        start = {k: p.detach().clone() for k, p in self._parameters.items() if self._by_hand}
        with ExitStack() as stack:
            stack.callback(self._before.clear)
            for hook in self._hooks():
                stack.callback(hook.remove)
            yield seen
        for key, parameter in self._parameters.items():
            gradient = parameter.grad
            if key in self._after and gradient is not None:
                written = gradient is not self._after[key][0]
                written |= gradient._version != self._after[key][1]
                seen.late |= {key} if written and is_nonzero(gradient) else set()
            if key in self._left and not is_nonzero(gradient):
                gradient = self._left[key]  # cleared since
            if key not in seen.gradients and gradient is not None:
                seen.gradients[key] = dense(gradient).clone()
        if not seen.steps:
            self._take_by_hand(start)
        seen.wasted -= {task for task, _ in self._spent}

    def _hooks(self) -> Iterator[Any]:
        yield register_optimizer_step_pre_hook(self._begin_step)
        yield register_optimizer_step_post_hook(self._end_step)
        leaves = [p for p in self._parameters.values() if p.requires_grad and p.is_leaf]
        for parameter in leaves:  # the dictionaries of hooks that this leaves go by the guard
            reach, add = partial(self._reach, id(parameter)), partial(self._add, id(parameter))
            yield parameter.register_hook(_uncompiled(reach))
            yield parameter.register_post_accumulate_grad_hook(_uncompiled(add))
        for module, inside in _open_modules(self.model):
            yield module.register_forward_pre_hook(_ModeHook(self, inside), with_kwargs=True)

    # ---- gradients

    def _reach(self, key: int, _: Tensor) -> None:
        """See a backward pass come to a parameter."""
        self._after.pop(key, None)
        if not is_nonzero(self._parameters[key].grad):
            unused = {t for t in self._within.get(key, ()) if (t, key) not in self._spent}
            if unused:
                self.seen.cleared.add(key)
                self.seen.wasted |= unused & self.seen.passes.keys()
            self._within[key] = set()

    def _add(self, key: int, parameter: Tensor) -> None:
        """See what it left."""
        task = torch._C._current_graph_task_id()
        self.seen.passes.setdefault(task, set()).add(key)
        self._within.setdefault(key, set()).add(task)
        if parameter.grad is not None:
            gradient = dense(parameter.grad)
            self.seen.added[key] = norm(gradient)
            if self._by_hand:
                self._left[key] = gradient.clone()

    # ---- the optimizer

    def _begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Take down the step, and the gradients that it is made of."""
        seen, key = self.seen, id(optimizer)
        held = [p for p in parameters_of(optimizer) if id(p) in self._parameters]
        before = {id(p): p.detach().clone() for p in held}
        steps = seen.steps.setdefault(key, Steps(optimizer))
        steps.count += 1
        if steps.count == 1:
            rates = [float(group.get("lr") or 0.0) for group in optimizer.param_groups]
            steps.rate = max(rates, default=0.0)
            steps.emptied = self._stepped.get(key, False) and not optimizer.state
            steps.early = any(
                getattr(one, "optimizer", None) is optimizer and one.last_epoch != epoch
                for one, epoch in zip(self._schedules, self._epochs, strict=True)
            )
        # one inside of another's may follow a look ahead that was taken back
        is_inner = bool(self._before) and steps.count == 1
        seen.at_first = {**seen.at_first, **before} if is_inner else {**before, **seen.at_first}
        self._before[key] = before
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._take(steps, held)
            return None

        def evaluated() -> Any:
            loss = closure()
            number = loss.detach() if isinstance(loss, Tensor) else loss
            steps.evaluations.append(math.nan if number is None else float(number))
            self._take(steps, held)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _take(self, steps: Steps, held: list[Tensor]) -> None:
        """Take the gradients that an optimizer steps on."""
        seen = self.seen
        for parameter in held:
            key, gradient = id(parameter), parameter.grad
            if gradient is None:
                continue
            if is_nonzero(gradient):
                self._use(id(steps.optimizer), key)
                if steps.count == 1:
                    steps.passes |= self._within.get(key, set())
            elif seen.added.get(key) and key not in seen.at_step:
                seen.erased.add(key)
            if key not in seen.at_step:
                seen.at_step.add(key)
                seen.gradients[key] = dense(gradient).clone()

    def _use(self, optimizer: int, key: int) -> None:
        """Note the backward passes that are stepped on, and whether they were before."""
        within, used = self._within.get(key, set()), self._used.setdefault((optimizer, key), set())
        if within & used:
            self.seen.used_again.add(key)
        used |= within
        self._spent |= {(task, key) for task in within}

    def _end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take what the step changed."""
        before = self._before.pop(id(optimizer), None)
        if before is None:
            return
        seen, steps = self.seen, self.seen.steps[id(optimizer)]
        along, updates, gradients = 0.0, 0.0, 0.0
        is_first = id(optimizer) not in self._stepped
        for key, value in before.items():
            if (left := self._parameters[key].grad) is not None:
                self._after[key] = left, left._version
            update = widened(self._parameters[key].detach()) - widened(value)
            size = norm(update)
            seen.updated[key] = seen.updated.get(key, 0.0) + size
            if is_first and key in seen.gradients:
                gradient = widened(seen.gradients[key])
                along += inner(update, gradient)
                updates += size**2
                gradients += norm(gradient) ** 2
        if is_first:
            steps.along = along, updates, gradients
        self._stepped[id(optimizer)] = bool(optimizer.state)

    def _take_by_hand(self, start: Mapping[int, Tensor]) -> None:
        """Take what the call changed for the step of an optimizer."""
        for key, value in start.items():
            now = self._parameters[key].detach()
            if now.shape != value.shape or torch.equal(now, value):
                continue
            self.seen.at_first[key] = now.clone()
            self.seen.updated[key] = norm(widened(now) - widened(value))
            self._use(0, key)
            passes = {task for task, keys in self.seen.passes.items() if key in keys}
            if key in self.seen.gradients and passes <= self._within.get(key, set()):
                self.seen.at_step.add(key)  # of this gradient, and not of several in turn


class _ModeHook(OurHook):
    """Takes down the modes that modules run in; where the user copies the model, it does nothing.

    Args:
        watch: where it takes them down.
        inside: the modules.
    """

    __slots__ = ("_inside", "_watch")

    def __init__(self, watch: Watch, inside: list[nn.Module]) -> None:
        self._watch, self._inside = watch, inside

    def __call__(self, root: nn.Module, *batch: Any) -> None:
        seen, enabled = self._watch.seen, torch.is_grad_enabled()
        for module in self._inside:
            seen.modes.setdefault(module, set()).add((module.training, enabled))
        if enabled and root is self._watch.model:
            seen.sizes |= {len(t) for t in find_tensors(batch) if t.ndim}


def _uncompiled(hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook that a compiled step does not trace."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return hook if dynamo is None else dynamo.disable(hook)


def _open_modules(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield each module whose hooks are called, with those that it runs unseen, itself first.

    A hook inside compiled code would have it compiled anew.
    """
    hidden: set[nn.Module] = set()
    for module in model.modules():
        if module in hidden or isinstance(module, torch.jit.ScriptModule):
            continue
        inside = list(module.modules()) if is_compiled(module) else [module]
        hidden.update(inside[1:])
        yield module, inside


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a plain tensor."""
    gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in single precision at least."""
    is_half = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if is_half else tensor


def norm(tensor: Tensor) -> float:
    """Return the L2 norm, in double precision where single precision holds no square of it."""
    if tensor.dtype == torch.float32:  # in a third of the time
        size = float(torch.linalg.vector_norm(tensor))
        if _SMALL < size < _GREAT:
            return size
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=wide))


_SMALL, _GREAT = 1e-12, 1e15


def distance(a: Tensor, b: Tensor) -> float:
    """Return the L2 norm of the difference of two tensors; 1 where their shapes differ."""
    if a.shape != b.shape:
        return 1.0
    return 0.0 if torch.equal(a, b) else norm(widened(a) - widened(b))


def inner(a: Tensor, b: Tensor) -> float:
    """Return the inner product of two tensors, its real part, added up in double precision."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a * b.conj()).sum(dtype=wide).real)


def cosine(product: float, a: float, b: float) -> float | None:
    """Return the cosine of two vectors, by their inner product and squared norms."""
    return product / math.sqrt(a * b) if a and b else None


def is_nonzero(gradient: Tensor | None) -> bool:
    """Whether there is a gradient, and any number of it is not zero."""
    return gradient is not None and norm(dense(gradient)) != 0.0
