"""Keeps runs apart, and puts back what they changed, bit for bit and whatever ends them."""

from __future__ import annotations

import copy
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.state import Memory, State, alone
from pytest_modelhealth.errors import InspectionError


class Guard:
    """What was when it was made; as a context it puts that back in the end.

    Containers get the same objects back, modes and hooks of modules among them, tensors their
    memory and its bytes, leaves their ``.grad``, flags and hooks, and random generators their
    state: those of Python, NumPy and torch, and those that were found. Grad mode is put back too:
    Ctrl-C may come between ``torch.no_grad()`` and what leaves it.

    Args:
        state: what is put back; nothing but random numbers where it is left out.
        batch: whose leaves get their gradients back.
        values: whether values of leaves are put back, which are copied for it, or copies of them
            that were made before. Without, a model's memory is not doubled.
        numbers: whether random generators of the process are put back, or go on.
        switches: whether torch's switches are put back.
        stateful: objects that are put back by `load_state_dict`.
    """

    def __init__(
        self,
        state: State | None = None,
        batch: Any = None,
        *,
        values: Memory | bool = False,
        numbers: bool = True,
        switches: bool = False,
        stateful: Iterable[Any] = (),
    ) -> None:
        self.state = state = state or State()
        given = [t for t in find_tensors(batch) if t.is_leaf and t.requires_grad]
        self.leaves = Leaves([*state.leaves, *given])
        self._modes = [(m, m.training) for m in state.scripts if hasattr(m, "training")]
        copied = [*state.leaves, *state.tensors] if values is True else state.tensors
        self._memory = [Memory(copied), *([values] if isinstance(values, Memory) else [])]
        self._generators = [(write, read()) for read, write in map(access, state.generators)]
        self._is_grad_enabled = torch.is_grad_enabled()
        self._switches = [(pair, pair[0]()) for pair in _SWITCHES if switches]
        self._stateful = [(one, copy.deepcopy(one.state_dict())) for one in stateful]
        self.numbers = random_state() if numbers else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put everything back, whatever one of it raises."""
        with ExitStack() as stack:  # the last first
            stack.callback(self.restore_numbers)
            stack.callback(self.leaves.restore)
            stack.callback(self._restore_settings)
            for memory in self._memory:
                stack.callback(memory.restore)
            stack.callback(self.state.restore)
            for one, saved in self._stateful:
                stack.callback(one.load_state_dict, copy.deepcopy(saved))

    def rewind(self) -> None:
        """Put everything back, but with no gradient anywhere."""
        self.restore()
        self.leaves.clear()

    def restore_numbers(self) -> None:
        """Put all random generators back."""
        for write, state in self._generators:
            write(state)
        restore_random_state(self.numbers)

    def _restore_settings(self) -> None:
        for module, mode in self._modes:
            module.training = mode
        torch.set_grad_enabled(self._is_grad_enabled)
        for (read, write), value in self._switches:
            if value is not None and read() != value:
                write(value)


class Leaves:
    """What leaf tensors carry beside their values: gradients, flags and hooks."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._held = [
            (
                leaf,
                leaf.requires_grad,
                leaf.grad,
                hooks if hooks == _NONE else tuple(h if h is None else h.copy() for h in hooks),
            )
            for leaf in {id(leaf): leaf for leaf in leaves}.values()
            for hooks in [_hooks(leaf)]
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def clear(self) -> None:
        """Leave no gradient."""
        for leaf, *_ in self._held:
            if leaf.grad is not None:
                leaf.grad = None

    def set_aside(self) -> None:
        """Leave no gradient, and no hook that runs an optimizer inside backward: it would train."""
        self.clear()
        for leaf, _, _, (_, hooks) in self._held:
            if hooks:
                leaf._post_accumulate_grad_hooks.clear()

    def restore(self) -> None:
        """Put the same objects back."""
        for leaf, required, gradient, hooks in self._held:
            if leaf.requires_grad != required:
                leaf.requires_grad = required
            if _hooks(leaf) != hooks:
                for name, before in zip(_HOOKS, hooks, strict=True):
                    # in place: autograd holds this dictionary, and runs what is in it even after
                    # the attribute was set to None
                    if (now := getattr(leaf, name)) is not None:
                        now.clear()
                        now.update(before or {})
                        if before is None:
                            setattr(leaf, name, None)
            if leaf.grad is not gradient:
                leaf.grad = gradient


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_NONE = None, None
_hooks = attrgetter(*_HOOKS)


def _process_generators() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Yield what reads and what sets the state of each random generator that is not a model's."""
    yield "python", random.getstate, random.setstate
    yield "torch", torch.get_rng_state, torch.set_rng_state
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        yield "numpy", numpy.get_state, numpy.set_state
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield "cuda", torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    if torch.backends.mps.is_available():
        yield "mps", torch.mps.get_rng_state, torch.mps.set_rng_state


def random_state() -> dict[str, Any]:
    """Return the state of all random generators that are not the model's own."""
    return {name: read() for name, read, _ in _process_generators()}


def restore_random_state(state: dict[str, Any]) -> None:
    """Put all random generators back to a state of `random_state`."""
    for name, _, write in _process_generators():
        if name in state:
            write(state[name])


def access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return what reads the state of a random generator, and what sets it."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if hasattr(generator, "set_state"):  # of torch, numpy.random.RandomState
        return generator.get_state, generator.set_state
    bits = getattr(generator, "bit_generator", generator)  # of a numpy.random.Generator
    return partial(getattr, bits, "state"), partial(setattr, bits, "state")


def _matmul_precision() -> str | None:
    """Return the precision of matrix products, ``None`` where it was set for single backends."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


_CUDNN, _MKLDNN = torch.backends.cudnn, torch.backends.mkldnn
_FLAGS: list[tuple[Any, str]] = [(_CUDNN, "benchmark"), (_CUDNN, "deterministic")]
for _backend in (torch.backends, torch.backends.cuda, _CUDNN, _MKLDNN):  # since torch 2.9
    _parts = (_backend, *(getattr(_backend, name, None) for name in ("matmul", "conv", "rnn")))
    _FLAGS += [(part, "fp32_precision") for part in _parts if hasattr(part, "fp32_precision")]
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.autograd.set_detect_anomaly(*modes),
    ),
    (_matmul_precision, torch.set_float32_matmul_precision),
    *((partial(getattr, *flag), partial(setattr, *flag)) for flag in _FLAGS),
)
"""What of torch may be switched: how each is read and set."""


_RARE = 100_000


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Let the collector wait for a hundred thousand new objects, while no other thread inspects.

    What a run keeps of a layer is a dozen objects, and none of it is garbage before its report is;
    at the usual thresholds the collector looks through them again and again, and now and then
    through everything in the process. Garbage of the user's own is still collected, later. The
    thresholds are put back unless somebody has set others meanwhile.
    """
    with alone():
        usual = gc.get_threshold()
        rare = (usual[0] and max(usual[0], _RARE), *usual[1:])  # of 0 it never collects
        try:
            gc.set_threshold(*rare)
            yield
        finally:
            if gc.get_threshold() == rare:
                gc.set_threshold(*usual)


_running: list[Inspection] = []
"""The one that has begun, if one has."""


class Inspection:
    """An inspection that has begun."""

    def __init__(self, state: State, model: nn.Module) -> None:
        self.state = state  # what its model holds
        self.doing = "forward"  # what of the user's runs now
        self.hooks: Hooks | None = None  # once there is something to see
        self._label = type(model).__name__
        self._thread = threading.current_thread()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run by itself: inspections of other threads wait.

        Raises:
            InspectionError: this one is inside another.
        """
        with alone(), ExitStack() as stack:
            for other in _running:
                layer = other.hooks.running_layer if other.hooks is not None else None
                inside = f", in the layer {layer!r}" if layer and other.doing == "forward" else ""
                raise InspectionError(
                    f"cannot inspect {self._label}: {other._label} is being inspected already, and "
                    f"this call comes from its {other.doing}{inside}; one inspection at a time: "
                    "make the other one before or after it"
                )
            stack.callback(_running.remove, self)
            _running.append(self)
            yield

    @contextmanager
    def untouched(self, batch: Any, values: Memory | bool = False) -> Iterator[Guard]:
        """Start from no gradient, and leave no trace on the model, however it ends.

        Values of parameters are not copied unless that is asked for: that some forward wrote to one
        shows in its version.
        """
        with Guard(self.state, batch, values=values) as guard:
            guard.leaves.set_aside()
            yield guard


def is_inspecting() -> bool:
    """Whether an inspection is running in this thread."""
    return any(one._thread is threading.current_thread() for one in [*_running])


_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGALRM") if hasattr(signal, name)]


@contextmanager
def exited_whole(*managers: AbstractContextManager[Any]) -> Iterator[Any]:
    """Enter all of `managers` and give the last one's value; no signal interrupts their exits.

    One that arrives meanwhile is handled, by KeyboardInterrupt as a rule, once all have exited.
    """
    with ExitStack() as stack:
        hold = stack.enter_context(_signals_held())
        entered = [stack.enter_context(manager) for manager in managers]
        stack.callback(hold)
        yield entered[-1]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Have a signal that arrives inside handled when this is left."""
    with _signals_held() as hold:
        hold()
        yield


@contextmanager
def _signals_held() -> Iterator[Callable[[], None]]:
    """Give what begins to hold signals; those that arrive since are delivered in the end.

    Only in the main thread does Python call handlers, and allow them to be set.
    """
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    arrived: list[tuple[int, FrameType | None]] = []

    def hold() -> None:
        is_main = threading.current_thread() is threading.main_thread()
        for number in _SIGNALS if is_main else ():
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                signal.signal(number, lambda *call: arrived.append(call))

    try:
        yield hold
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in arrived:
            handlers[number](number, frame)
