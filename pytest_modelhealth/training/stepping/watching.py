"""One call of a training step, watched through public hooks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pytest_modelhealth.capture.eager import is_compiled
from pytest_modelhealth.capture.observing.hooks import OurHook
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.passive.updates import OptimizerSteps, parameters_of


@dataclass
class Steps:
    """The steps of one optimizer in one call.

    Args:
        count: how many.
        rate: its largest learning rate at the first.
        evaluations: what its closure returned, each time.
        passes: the backward passes that are in the gradients of its first step.
        early: forwards of modules before its step, where no backward pass of this call had reached
            it by then; -1 where one had.
        along: inner product of the first update and the gradient, and both squared norms.
        traits: as of a `SteppedOptimizer`, with ``leads`` (a backward pass reached it later in the
            call, none before) and ``empty`` (it had no gradient when none had reached it).
    """

    count: int = 0
    rate: float = 0.0
    evaluations: list[float] = field(default_factory=list)
    passes: set[int] = field(default_factory=set)
    early: int = -1
    along: tuple[float, float, float] = (0.0, 0.0, 0.0)
    traits: set[str] = field(default_factory=set)


@dataclass
class Watched:
    """What one call did; parameters by their `id`.

    Args:
        result: what the step returned.
        steps: of each optimizer, by its `id`.
        optimizers: those that stepped.
        gradients: a copy of each gradient when its optimizer first stepped, else as it was when the
            call ended.
        at_step: which of these were taken at a step.
        added: largest absolute value of what backward passes left.
        raw: L2 norm of the same.
        updated: L2 norm of what optimizers changed; by that of the values before, once the call is
            over that `call_step` made.
        changes: the same of the whole call.
        rates: learning rate at the first step.
        at_end: learning rate of each optimizer that was given when the call is over, by its `id`.
        left_over: whether a gradient from before an optimizer's step was still there.
        erased: parameters whose gradient was all zero at the step, and not as it was left.
        at_first: copies of parameters before their optimizer's first step.
        passes: the parameters that each backward pass reached.
        modes: by module, whether it was in training mode and gradients were on, of each run.
        began: whether the model was in training mode when the call began.
        runs: the same as in `modes` of each run of the model, in order.
        rows: share of rows of the model's output without gradient, in each half of the batch.
    """

    result: Any = None
    steps: dict[int, Steps] = field(default_factory=dict)
    optimizers: dict[int, Optimizer] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    at_step: set[int] = field(default_factory=set)
    added: dict[int, float] = field(default_factory=dict)
    raw: dict[int, float] = field(default_factory=dict)
    updated: dict[int, float] = field(default_factory=dict)
    changes: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    at_end: dict[int, float] = field(default_factory=dict)
    left_over: set[int] = field(default_factory=set)
    erased: set[int] = field(default_factory=set)
    at_first: dict[int, Tensor] = field(default_factory=dict)
    passes: dict[int, set[int]] = field(default_factory=dict)
    modes: dict[nn.Module, set[tuple[bool, bool]]] = field(default_factory=dict)
    began: bool = True
    runs: list[tuple[bool, bool]] = field(default_factory=list)
    rows: list[tuple[float, float]] = field(default_factory=list)


class Watch(OptimizerSteps):
    """Watches calls of a step one after the other; nothing of it stays on the model.

    Args:
        model: the model.
        parameters: every tensor that may get a gradient, the model's and the optimizers'.
        samples: size of the batch; 0 where it has none.
        clears: whether to clear a gradient once an optimizer has stepped on it.
        by_hand: whether what a call changes is its step, where no optimizer steps in it.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[int, Tensor],
        samples: int,
        *,
        clears: bool = False,
        by_hand: bool = False,
    ) -> None:
        super().__init__(parameters)
        self._by_hand, self._left = by_hand, dict[int, Tensor]()
        self._model, self._samples = model, samples
        self._clears, self._evaluating = clears, set[int]()
        self._stepped: set[int] = set()  # parameters whose gradient an optimizer has used up
        self._reached: set[int] = set()  # that a backward pass reached since
        self._within: dict[int, set[int]] = {}  # the backward passes that a gradient is the sum of
        self._forwards = 0  # of modules in this call, with gradients on
        self._on_rows: list[Any] = []
        self.seen = Watched()

    @contextmanager
    def call(self) -> Iterator[Watched]:
        """Watch one call."""
        self.seen = seen = Watched(began=self._model.training)
        self._reached.clear()
        self._left.clear()
        self._forwards = 0
        start = {k: p.detach().clone() for k, p in self._parameters.items() if self._by_hand}
        with ExitStack() as stack:
            stack.callback(self._forget_rows)
            stack.callback(self.hear_no_more)
            self.hear_of_steps()
            for hook in self._hooks():
                stack.callback(hook.remove)
            yield seen
        for key, steps in seen.steps.items():
            held = parameters_of(seen.optimizers[key])
            if steps.early >= 0 and any(id(p) in self._reached for p in held):
                is_stale = 0 < steps.early == self._forwards
                steps.traits |= {"leads", "stale"} if is_stale else {"leads"}
                steps.passes.update(*(self._within.get(id(p), ()) for p in held))
        for key, parameter in self._parameters.items():
            gradient = parameter.grad
            if key in self._left and not is_nonzero(gradient):
                gradient = self._left[key]  # cleared since
            if key not in seen.gradients and gradient is not None:
                seen.gradients[key] = dense(gradient).clone()
        if not seen.steps:
            self._take_by_hand(start)

    def _hooks(self) -> Iterator[Any]:
        leaves = [p for p in self._parameters.values() if p.requires_grad and p.is_leaf]
        for parameter in leaves:  # the dictionaries of hooks that this leaves go by the snapshot
            seeing, summing = self._seeing(id(parameter)), self._summing(id(parameter))
            yield parameter.register_hook(_uncompiled(seeing))
            yield parameter.register_post_accumulate_grad_hook(_uncompiled(summing))
        for module, inside in _open_modules(self._model):
            yield module.register_forward_pre_hook(_ModuleHook(self._entering(inside)))
        if self._samples:
            yield self._model.register_forward_hook(_ModuleHook(self._returning))

    # ---- gradients

    def _seeing(self, key: int) -> Callable[[Tensor], None]:
        parameter = self._parameters[key]

        def see(_: Tensor) -> None:
            self._reached.add(key)
            if not is_nonzero(parameter.grad):
                self._within[key] = set()
            self._within.setdefault(key, set()).add(torch._C._current_graph_task_id())
            if key in self._evaluating and is_nonzero(parameter.grad):
                for steps in self.seen.steps.values():
                    steps.traits |= {"piled"} if "closure" in steps.traits else set()
            if key in self._stepped and is_nonzero(parameter.grad):
                self.seen.left_over.add(key)
            self._evaluating.discard(key)
            self._stepped.discard(key)

        return see

    def _summing(self, key: int) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            self.seen.passes.setdefault(task, set()).add(key)
            if parameter.grad is not None:
                gradient = dense(parameter.grad)
                self.seen.added[key] = float(gradient.abs().max()) if gradient.numel() else 0.0
                self.seen.raw[key] = norm(gradient)
                if self._by_hand:
                    self._left[key] = gradient.clone()

        return add

    # ---- the optimizer

    def begin_step(
        self, optimizer: Any, held: list[Tensor], before: dict[int, Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Take down the step, and the gradients that it is made of."""
        seen = self.seen
        steps = seen.steps.setdefault(id(optimizer), Steps())
        seen.optimizers[id(optimizer)] = optimizer
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not steps.count:
            steps.rate = rate_of(optimizer)
            steps.passes.update(*(self._within.get(id(p), ()) for p in held))
        elif self._is_repeated(held):
            steps.traits.add("repeated")
        steps.count += 1
        groups = optimizer.param_groups
        rates = {id(p): float(group.get("lr") or 0.0) for group in groups for p in group["params"]}
        seen.rates = rates | seen.rates
        within = bool(self._steps_that_run)  # another one's, which may have taken back a look ahead
        for key, value in before.items():
            if within and steps.count == 1:
                seen.at_first[key] = value
            seen.at_first.setdefault(key, value)
        if closure is not None:
            return self._with_closure(steps, closure, held, args, kwargs)
        if not any(id(p) in self._reached for p in held):
            steps.early = self._forwards
            is_empty = not any(is_nonzero(p.grad) for p in held)
            steps.traits |= {"empty"} if is_empty else set()
        self._take(held)
        return None

    def _with_closure(
        self, steps: Steps, closure: Any, held: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Take the gradient after the closure first ran."""
        steps.traits.add("closure")

        def evaluated() -> Any:
            if steps.evaluations:
                self._evaluating = {id(p) for p in held}
            value = closure()
            number = value.detach() if isinstance(value, Tensor) else value
            steps.evaluations.append(math.nan if number is None else float(number))
            self._take(held)
            return value

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _take(self, held: list[Tensor]) -> None:
        for parameter in held:
            key = id(parameter)
            if key in self._stepped and is_nonzero(parameter.grad):
                self.seen.left_over.add(key)
            if key not in self.seen.at_step and parameter.grad is not None:
                self.seen.gradients[key] = dense(parameter.grad).clone()
                self.seen.at_step.add(key)
                if self.seen.added.get(key) and not is_nonzero(parameter.grad):
                    self.seen.erased.add(key)

    def _is_repeated(self, held: list[Tensor]) -> bool:
        known = [(p.grad, id(p)) for p in held if id(p) in self.seen.at_step]
        pairs = [(dense(g), self.seen.gradients[key]) for g, key in known if g is not None]
        if not pairs or any(id(p) in self._reached for p in held):
            return False
        return all(torch.equal(now, before) for now, before in pairs)

    def end_step(self, optimizer: Any, held: list[Tensor], before: dict[int, Tensor]) -> None:
        """Take what the step changed."""
        seen, steps = self.seen, self.seen.steps[id(optimizer)]
        along, updates, gradients = 0.0, 0.0, 0.0
        for parameter in parameters_of(optimizer):
            key = id(parameter)
            self._stepped.add(key)
            self._reached.discard(key)
            if key not in before:
                continue
            update = widened(parameter.detach()) - widened(before[key])
            size = norm(update)
            seen.updated[key] = seen.updated.get(key, 0.0) + size
            if steps.count == 1 and key in seen.gradients:
                gradient = widened(seen.gradients[key])
                along += inner(update, gradient)
                updates += size**2
                gradients += norm(gradient) ** 2
            if self._clears:
                parameter.grad = None
        if steps.count == 1:
            steps.along = along, updates, gradients

    def _take_by_hand(self, start: Mapping[int, Tensor]) -> None:
        """Take what the call changed for the step of an optimizer."""
        for key, value in start.items():
            now = self._parameters[key].detach()
            if now.shape != value.shape or torch.equal(now, value):
                continue
            self.seen.at_first[key] = now.clone()
            self.seen.updated[key] = norm(widened(now) - widened(value))
            passes = {task for task, keys in self.seen.passes.items() if key in keys}
            if key in self.seen.gradients and passes <= self._within.get(key, set()):
                self.seen.at_step.add(key)  # of this gradient, and not of several in turn
            self._stepped.add(key)
            if self._clears:
                self._parameters[key].grad = None

    # ---- layers

    def _entering(self, inside: list[nn.Module]) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, _: Any) -> None:
            enabled = torch.is_grad_enabled()
            self._forwards += enabled
            if module is self._model:
                self.seen.runs.append((module.training, enabled))
            for one in inside:
                self.seen.modes.setdefault(one, set()).add((one.training, enabled))

        return enter

    def _returning(self, _: nn.Module, __: Any, output: Any) -> None:
        for tensor in find_tensors(output):
            is_rows = tensor.ndim > 1 and len(tensor) == self._samples
            if tensor.requires_grad and is_rows:
                self._on_rows.append(tensor.register_hook(self._row_gradients))
                return

    def _forget_rows(self) -> None:
        """Take the hooks off the outputs: a graph that torch keeps would keep all that was seen."""
        for handle in self._on_rows:
            handle.remove()
        self._on_rows.clear()

    def _row_gradients(self, gradient: Tensor) -> None:
        idle = (dense(gradient).reshape(self._samples, -1) == 0).all(1).double()
        half = self._samples // 2
        self.seen.rows.append((float(idle[:half].mean()), float(idle[half:].mean())))


class _ModuleHook(OurHook):
    """A hook of ours on a module: where the user copies the model, the copy has one without effect.

    Args:
        call: what it does.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)


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


def rate_of(optimizer: Any) -> float:
    """Return the largest learning rate of an optimizer's groups."""
    return max((float(group.get("lr") or 0.0) for group in optimizer.param_groups), default=0.0)


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a plain tensor."""
    gradient = gradient.detach()
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in single precision at least."""
    is_half = tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if is_half else tensor


def norm(tensor: Tensor) -> float:
    """Return the L2 norm, reckoned in double precision."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=wide))


def distance(a: Tensor, b: Tensor) -> float:
    """Return the L2 norm of the difference of two tensors; 1 where their shapes differ."""
    if a.shape != b.shape:
        return 1.0
    return 0.0 if torch.equal(a, b) else norm(widened(a) - widened(b))


def inner(a: Tensor, b: Tensor) -> float:
    """Return the inner product of two tensors, its real part, added up in double precision."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a * b.conj()).sum(dtype=wide).real)


def is_nonzero(gradient: Tensor | None) -> bool:
    """Whether there is a gradient, and any number of it is not zero."""
    return gradient is not None and bool(dense(gradient).any())
