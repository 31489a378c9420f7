"""One call of a training step, watched through public hooks."""

from __future__ import annotations

import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pytest_modelhealth.capture.eager import is_compiled
from pytest_modelhealth.capture.observing.hooks import OurHook
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.passive.hooks import parameters_of
from pytest_modelhealth.capture.step.batch import copied_batch
from pytest_modelhealth.report import Observation
from pytest_modelhealth.training.rows import Rows
from pytest_modelhealth.training.stepping.session import Session, loss_in

_usual_clip = clip_grad.clip_grad_norm_


@dataclass
class Steps:
    """The steps of one optimizer in one call."""

    optimizer: Any
    count: int = 0
    rates: tuple[float, ...] = ()  # the learning rates of its groups at the first
    passes: set[int] = field(default_factory=set)  # in the gradients of its first step
    evaluations: list[float] = field(default_factory=list)  # what its closure returned each time
    emptied: bool = False  # its state, which it had after its step before, was gone at the first
    early: bool = False  # a schedule of its rate had moved on in the call before it
    moves: float = 0.0  # how often such a schedule moved on in the call, the most of several
    # inner product of the first update of all calls and the gradient, and both squared norms
    along: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass
class Call:
    """What one call did; parameters by their `id`."""

    began: bool = True  # whether the model was in training mode when the call began
    before: dict[int, Tensor] = field(default_factory=dict)  # copies of all parameters
    result: Any = None  # what the step returned
    steps: dict[int, Steps] = field(default_factory=dict)  # by the `id` of the optimizer
    # a copy of each when its optimizer first stepped, else as it was when the call ended
    gradients: dict[int, Tensor] = field(default_factory=dict)
    at_step: set[int] = field(default_factory=set)  # which of these were taken at a step
    added: dict[int, float] = field(default_factory=dict)  # L2 norm of what backward passes left
    # L2 norm of what optimizers changed, in the end by that of the values before, and of all that
    # the call changed
    updated: dict[int, float] = field(default_factory=dict)
    changes: dict[int, float] = field(default_factory=dict)
    # parameters of which something was seen: "used_again", their optimizer stepped on what it had
    # stepped on before; "erased", their gradient was all zero at the step, and not as it was left;
    # "cleared", it was before a step on it; "late", it was written to after the step, and not
    # cleared; "between", it was written to between two passes that add up; "piled", it has a pass
    # that another optimizer had stepped on before a later one was added
    marks: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    # backward passes, of calls before as well, that were cleared so, and never stepped on
    wasted: set[int] = field(default_factory=set)
    # of each clip with a limit the norm of what it was given, and how many steps there had been
    clips: list[tuple[float, int]] = field(default_factory=list)
    at_first: dict[int, Tensor] = field(default_factory=dict)  # parameters before the first step
    passes: dict[int, set[int]] = field(default_factory=dict)  # what each backward pass reached
    goes_on: bool = False  # the model ran again after an optimizer's first step
    sizes: set[int] = field(default_factory=set)  # lengths of the model's inputs, with gradients on
    # of each run of a module, whether it was in training mode and gradients were on
    modes: dict[nn.Module, set[tuple[bool, bool]]] = field(default_factory=dict)
    # modules that a backward pass ran again, and whether with other random numbers
    again: dict[nn.Module, bool] = field(default_factory=dict)


class Watch:
    """Watches calls of a step one after the other; nothing of it stays on the model.

    Args:
        session: the step, and what it works on.

    Attributes:
        schedules: schedules of rates.
        within: the backward passes that the gradient of a parameter is the sum of.
        batch: that of the latest call, as that left it.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.model = session, session.model
        self._parameters = session.parameters  # every tensor that may get a gradient
        # what a call changes is its step, where no optimizer steps in it
        self._by_hand = not session.given.optimizers
        self.schedules = [o for o in session.reached.objects if isinstance(o, LRScheduler)]
        places = [(names, name) for names, name, _ in session.reached.globals]
        places += [(vars(home), "clip_grad_norm_") for home in (nn.utils, clip_grad)]
        self._clips = [(home, name) for home, name in places if home.get(name) is _usual_clip]
        self._before: dict[int, dict[int, Tensor]] = {}  # copies, of optimizers whose step runs
        self.within: dict[int, set[int]] = {}
        self._used: dict[tuple[int, int], set[int]] = {}  # those that an optimizer has stepped on
        self._stepped: dict[int, bool] = {}  # optimizers, and whether they had a state then
        self._spent: set[tuple[int, int]] = set()  # backward passes stepped on, of each parameter
        self._after: dict[int, tuple[Tensor, int]] = {}  # gradients after a step, their versions
        self._taken: dict[int, tuple[Any, int]] = {}  # the same of all calls
        self._first_steps: dict[int, tuple[int, int]] = {}  # on a pass: whose, after which pass
        self._left: dict[int, Tensor] = {}  # gradients of this call as backward passes left them
        self._starts: dict[nn.Module, list[Tensor]] = {}  # random states at runs of a module
        self.seen = Call()

    def observed(self) -> tuple[Call, Observation]:
        """Call the step once, with its layers watched as well."""
        session = self.session
        batch = copied_batch(session.given.batch)
        rows, passive = Rows(self.model, batch, session.samples), session.passive
        passive.begin(rows)
        try:
            seen = self.call(batch)
            # of one pass, whose gradients are those that are stepped on
            is_other = seen.marks["cleared"] or seen.marks["erased"] or len(seen.passes) != 1
            session.reaches_halves = all(rows.reached) and not is_other
            return seen, passive.end(loss_in(seen.result)).observation
        finally:
            passive.discard()

    def call(self, batch: Any = None) -> Call:
        """Call the step once, watched, on a copy of the batch unless another is given."""
        session = self.session
        self.batch = copied_batch(session.given.batch) if batch is None else batch
        self.seen = seen = Call(self.model.training, session.values())
        self._left.clear()
        self._after.clear()
        self._starts.clear()
        self._epochs = [getattr(one, "last_epoch", None) for one in self.schedules]
        with ExitStack() as stack:
            stack.callback(self._before.clear)
            for hook in self._hooks():
                stack.callback(hook.remove)
            for home, name in self._clips:
                home[name] = _watched_clip
                stack.callback(home.__setitem__, name, _usual_clip)
            _watching.append(self)
            stack.callback(_watching.pop)
            seen.result = session.call(self.batch)
        for key, parameter in self._parameters.items():
            gradient = parameter.grad
            if key in self._after and gradient is not None:
                written = gradient is not self._after[key][0]
                written |= gradient._version != self._after[key][1]
                seen.marks["late"] |= {key} if written and is_nonzero(gradient) else set()
            if key in self._left and not is_nonzero(gradient):
                gradient = self._left[key]  # cleared since
            if key not in seen.gradients and gradient is not None:
                seen.gradients[key] = dense(gradient).clone()
        for one, epoch in zip(self.schedules, self._epochs, strict=True):
            steps = seen.steps.get(id(getattr(one, "optimizer", None)))
            if steps is not None and epoch is not None:
                steps.moves = max(steps.moves, one.last_epoch - epoch)
        if self._by_hand and not seen.steps:
            self._take_by_hand()
        seen.wasted -= {task for task, _ in self._spent}
        return seen

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

    def clip(self, parameters: list[Tensor], max_norm: Any, *args: Any, **options: Any) -> Any:
        """Clip as asked for, and take down the norm before, and after which step that was."""
        size = _usual_clip(parameters, max_norm, *args, **options)
        if float(max_norm) < math.inf:
            steps = sum(one.count for one in self.seen.steps.values())
            self.seen.clips.append((float(size), steps))
        return size

    def _reach(self, key: int, _: Tensor) -> None:
        """See a backward pass come to a parameter."""
        self._after.pop(key, None)
        gradient, left = self._parameters[key].grad, self.seen.added.get(key)
        size = 0.0 if gradient is None else norm(dense(gradient))
        if size and left and abs(size - left) > _WRITTEN * left and key not in self.seen.at_step:
            self.seen.marks["between"].add(key)
        if not size:
            unused = {t for t in self.within.get(key, ()) if (t, key) not in self._spent}
            if unused:
                self.seen.marks["cleared"].add(key)
                self.seen.wasted |= unused
            self.within[key] = set()

    def _add(self, key: int, parameter: Tensor) -> None:
        """See what it left."""
        task = torch._C._current_graph_task_id()
        self.seen.passes.setdefault(task, set()).add(key)
        self.within.setdefault(key, set()).add(task)
        if parameter.grad is not None:
            gradient = dense(parameter.grad)
            self.seen.added[key] = norm(gradient)
            if self._by_hand:
                self._left[key] = gradient.clone()

    def compare(self, module: nn.Module) -> None:
        """Compare the random numbers of a module's first run with those of its recomputation."""
        if not module.training:
            return
        if torch._C._current_graph_task_id() < 0:
            self._starts.setdefault(module, []).append(_random_state())
        elif starts := self._starts.get(module):
            is_same = any(torch.equal(_random_state(), start) for start in starts)
            self.seen.again[module] = self.seen.again.get(module, False) or not is_same

    # ---- the optimizer

    def _begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Take down the step, and the gradients that it is made of."""
        seen, key = self.seen, id(optimizer)
        held = [p for p in parameters_of(optimizer) if id(p) in self._parameters]
        before = {id(p): p.detach().clone() for p in held}
        steps = seen.steps.setdefault(key, Steps(optimizer))
        steps.count += 1
        if steps.count == 1:
            steps.rates = tuple(float(g.get("lr") or 0.0) for g in optimizer.param_groups)
            steps.emptied = self._stepped.get(key, False) and not optimizer.state
            steps.early = any(
                getattr(one, "optimizer", None) is optimizer and one.last_epoch != epoch
                for one, epoch in zip(self.schedules, self._epochs, strict=True)
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
                self._use(id(steps.optimizer), key, gradient)
                if steps.count == 1:
                    steps.passes |= self.within.get(key, set())
            elif seen.added.get(key) and key not in seen.at_step:
                seen.marks["erased"].add(key)
            if key not in seen.at_step:
                seen.at_step.add(key)
                seen.gradients[key] = dense(gradient).clone()

    def _use(self, optimizer: int, key: int, gradient: Tensor | None = None) -> None:
        """Note the backward passes that are stepped on, and whether they were before."""
        within, used = self.within.get(key, set()), self._used.setdefault((optimizer, key), set())
        if not within and gradient is not None:  # it may be handed over from another model
            others = (k for k, p in self._parameters.items() if p.grad is gradient)
            within = next((self.within[k] for k in others if k in self.within), within)
            before, version = self._taken.get(key, (None, 0))
            if before is not None and before() is gradient and version == gradient._version:
                self.seen.marks["used_again"].add(key)
        if within & used:
            self.seen.marks["used_again"].add(key)
        used |= within
        self._spent |= {(task, key) for task in within}
        for task in within & self.seen.passes.keys():  # of this call: others may count otherwise
            who, latest = self._first_steps.setdefault(task, (optimizer, max(self.seen.passes)))
            if who != optimizer and latest < max(within):
                self.seen.marks["piled"].add(key)

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
                self._taken[key] = weakref.ref(left), left._version
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

    def _take_by_hand(self) -> None:
        """Take what the call changed for the step of an optimizer."""
        for key, value in self.seen.before.items():
            now = self._parameters[key].detach()
            if now.shape != value.shape or torch.equal(now, value):
                continue
            self.seen.at_first[key] = now.clone()
            self.seen.updated[key] = norm(widened(now) - widened(value))
            self._use(0, key)
            passes = {task for task, keys in self.seen.passes.items() if key in keys}
            if key in self.seen.gradients and passes <= self.within.get(key, set()):
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
        if isinstance(root, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
            self._watch.compare(root)
        seen.goes_on |= bool(seen.steps) and root is self._watch.model
        if enabled and root is self._watch.model:
            seen.sizes |= {len(t) for t in find_tensors(batch) if t.ndim}


_watching: list[Watch] = []
"""The one whose call runs."""


def _watched_clip(parameters: Any, *args: Any, **options: Any) -> Any:
    """Stand in for `clip_grad_norm_` while a call runs.

    It is one function for all calls, as a compiled step would be compiled anew for each other one,
    and such a step is let through: a norm that is read would cut its graph.
    """
    if torch.compiler.is_compiling():
        return _usual_clip(parameters, *args, **options)
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return _watching[-1].clip(given, *args, **options)


def _uncompiled(hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return a hook that a compiled step does not trace."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return hook if dynamo is None else dynamo.disable(hook)


def _random_state() -> Tensor:
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return torch.cat(states)


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
_WRITTEN = 1e-3
"""By such a share of itself a gradient has changed."""


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
