"""Keeps inspections apart, and puts back what a run touched, whatever ends it."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.flow import counter
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.state import MOMENTS, Memory, State
from pytest_modelhealth.errors import InspectionError

_lock = threading.Lock()
_running: list[Inspection] = []
_last_end = 0


class Inspection:
    """An inspection that has begun, in the thread that makes it."""

    def __init__(self, state: State, model: nn.Module) -> None:
        self.state = state  # what its model holds
        self.doing = "forward"  # what of the user's runs now
        self.hooks: Hooks | None = None  # once there is something to see
        # when the first of those that run now, in whatever threads, began: they all put it back
        self.random_state: dict[str, Any] | None = None
        self._model = model
        self._thread = threading.current_thread()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Run apart from all others, those that this one runs inside among them.

        Raises:
            InspectionError: one that runs has modules or tensors in common with this.
        """
        global _last_end
        with _lock:
            here = [other for other in _running if other._thread is self._thread]
            for other in _running:
                self._refuse_beside(other)
            if self.state.moment < _last_end and not self.state.is_as_it_was():
                raise InspectionError(
                    f"cannot inspect {self._label}: it was inspected in another thread until now, "
                    f"and was looked at meanwhile; {_NEXT_MOVE}"
                )
            if _running and not here:
                self.random_state = _running[0].random_state
            _running.append(self)
        try:
            with ExitStack() as stack:
                if here and here[-1].hooks is not None:
                    stack.enter_context(here[-1].hooks.blind())
                yield
        finally:
            with _lock:
                _running.remove(self)
                _last_end = next(MOMENTS)

    @property
    def _label(self) -> str:
        return type(self._model).__name__

    def _refuse_beside(self, other: Inspection) -> None:
        common = _common(self.state, other.state)
        if common is None:
            return
        if self._model is other._model:
            whole = f"{self._label} is being inspected already"
        else:
            whole = f"{other._label}, with which it shares {common}, is being inspected already"
        place = f"in the thread {other._thread.name!r}"
        if other._thread is self._thread:
            layer = other.hooks.running_layer if other.hooks is not None else None
            inside = f", in the layer {layer!r}" if layer and other.doing == "forward" else ""
            place = f"and this call comes from its {other.doing}{inside}"
        raise InspectionError(f"cannot inspect {self._label}: {whole}, {place}; {_NEXT_MOVE}")


def is_inspecting() -> bool:
    """Whether an inspection is running in this thread."""
    if not _running:
        return False
    here = threading.current_thread()
    return any(inspection._thread is here for inspection in _running)


_NEXT_MOVE = (
    "one inspection of a model at a time: make the other one before or after it, or on a copy, "
    "copy.deepcopy(model)"
)


def _common(a: State, b: State) -> str | None:
    """Return what two models have in common, if anything; a module before tensors."""
    held = {*map(id, b.modules), *map(id, b.leaves), *map(id, b.tensors)}
    things: list[Any] = [*a.modules, *a.leaves, *a.tensors]
    shared = next((thing for thing in things if id(thing) in held), None)
    if shared is None:
        return None
    if isinstance(shared, nn.Module):
        return f"a module ({type(shared).__name__})"
    kind = "parameter" if isinstance(shared, nn.Parameter) else "tensor"
    return f"a {kind} of shape {tuple(shared.shape)}"


@contextmanager
def untouched(inspection: Inspection, batch: Any) -> Iterator[None]:
    """Leave no trace on the model of what happens inside, however it ends.

    Attributes get their objects and values back, buffers among them, parameters and the batch's
    leaf tensors their ``.grad``, modules their training mode and hooks, and random generators their
    state: those of Python, NumPy and torch, and those that the model holds. Hooks that run an
    optimizer inside backward are set aside meanwhile, since they would train the model. Values of
    parameters are not copied, which would double the model's memory; `Versions` tells of a forward
    that writes to one.
    """
    state = inspection.state
    if inspection.random_state is None:
        inspection.random_state = random_state()
    leaves = [*state.leaves, *(t for t in find_tensors(batch) if t.is_leaf and t.requires_grad)]
    with ExitStack() as stack:
        stack.callback(restore_random_state, inspection.random_state)
        for generator in state.generators:
            stack.callback(generator_restorer(generator))
        stack.callback(state.restore_containers)
        stack.callback(Memory(state.tensors).restore)
        stack.enter_context(gradients_set_aside(leaves))
        yield


def _attributes_restorer(owners: Iterable[Any], *names: str) -> Callable[[], None]:
    """Return a function that gives objects back the attributes they have now."""
    held = [(one, name, getattr(one, name)) for one in owners for name in names]

    def restore() -> None:
        for owner, name, value in held:
            if getattr(owner, name) is not value:
                setattr(owner, name, value)

    return restore


@contextmanager
def gradients_set_aside(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Start from no gradient on `leaves`, and put theirs back: the same objects, untouched."""
    leaves = list({id(leaf): leaf for leaf in leaves}.values())
    restore = _attributes_restorer(leaves, "requires_grad", "grad")
    hooks = [(h, h.copy()) for leaf in leaves if (h := leaf._post_accumulate_grad_hooks)]
    try:
        for leaf in leaves:
            if leaf.grad is not None:
                leaf.grad = None
        for registered, _ in hooks:
            # in place: autograd holds this dictionary, and runs what is in it even after the
            # attribute was set to None
            registered.clear()
        yield
    finally:
        for registered, copies in hooks:
            registered.update(copies)
        restore()


@contextmanager
def values_kept(state: State, values: Memory) -> Iterator[None]:
    """Put values back, what requires a gradient, and the modes of modules, in scripts too."""
    modes = _attributes_restorer([m for m in state.modules if hasattr(m, "training")], "training")
    flags = _attributes_restorer(state.leaves, "requires_grad")
    try:
        yield
    finally:
        values.restore()
        modes()
        flags()


def _generators() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
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
    return {name: read() for name, read, _ in _generators()}


def restore_random_state(state: dict[str, Any]) -> None:
    """Put all random generators back to a state of `random_state`."""
    for name, _, write in _generators():
        if name in state:
            write(state[name])


_CUDNN = torch.backends.cudnn
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "anomaly": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda modes: torch.autograd.set_detect_anomaly(*modes),
    ),
    "matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    **{
        f"cudnn_{name}": (partial(getattr, _CUDNN, name), partial(setattr, _CUDNN, name))
        for name in ("benchmark", "deterministic")
    },
}
"""What of torch may be switched: how each is read and set."""


def switches() -> dict[str, Any]:
    """Return how torch's switches stand."""
    return {name: read() for name, (read, _) in _SWITCHES.items()}


def set_switches(state: dict[str, Any]) -> None:
    """Have torch's switches stand as `switches` said."""
    for name, (read, write) in _SWITCHES.items():
        if read() != state[name]:
            write(state[name])


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Put all random generators that are not the model's own back in the end."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def generator_access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return what reads the state of a random generator, and what sets it."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if hasattr(generator, "set_state"):  # of torch, numpy.random.RandomState
        return generator.get_state, generator.set_state
    bits = getattr(generator, "bit_generator", generator)  # of a numpy.random.Generator
    return partial(getattr, bits, "state"), partial(setattr, bits, "state")


def generator_restorer(generator: Any) -> Callable[[], Any]:
    """Return a function that puts a generator back where it stands now."""
    read, write = generator_access(generator)
    return partial(write, read())


_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGALRM") if hasattr(signal, name)]


@contextmanager
def exited_whole(*managers: AbstractContextManager[Any]) -> Iterator[Any]:
    """Enter all of `managers` and give the last one's value; no signal interrupts their exits.

    One that arrives meanwhile is handled, by KeyboardInterrupt as a rule, once all have exited.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(_Signals())
        entered = [stack.enter_context(manager) for manager in managers]
        stack.callback(signals.hold)
        yield entered[-1]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Have a signal that arrives inside handled when this is left."""
    with _Signals() as signals:
        signals.hold()
        yield


class _Signals:
    """Those that arrive between `hold` and the end are delivered in the end.

    Only in the main thread does Python call handlers, and allow them to be set.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def hold(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, lambda *call: self._arrived.append(call))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number, frame in self._arrived:
            self._handlers[number](number, frame)


class Switch:
    """A setting of the whole process: the first thread to come sets it, the last resets it."""

    def __init__(self, switched: Callable[[], AbstractContextManager[None]]) -> None:
        self._switched = switched
        self._lock, self._holders, self._is_set = threading.Lock(), 0, False
        self._stack = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Have it set inside."""
        with self._lock:
            self._holders += 1
        try:
            with self._lock:  # in here, so that Ctrl-C finds a way out
                if not self._is_set:
                    self._is_set = True
                    self._stack.enter_context(self._switched())
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    self._is_set = False
                    self._stack.close()


_FACTOR = 100


@Switch
@contextmanager
def collected_rarely() -> Iterator[None]:
    """Let the collector wait for a hundred times as many new objects.

    What a run keeps of a layer is a dozen objects, and none of it is garbage before its report is;
    at the usual thresholds the collector looks through them again and again, and now and then
    through everything in the process. Garbage of the user's own is still collected, later. The
    thresholds are put back unless somebody has set others meanwhile.
    """
    usual = gc.get_threshold()
    rare = (usual[0] * _FACTOR, *usual[1:])
    try:
        gc.set_threshold(*rare)
        yield
    finally:
        if gc.get_threshold() == rare:
            gc.set_threshold(*usual)


_SHALLOW = 10_000
"""Graphs of fewer nodes are freed where they are."""

_STACK = 1 << 29
"""Bytes of stack to free others on; what is not touched takes no memory."""


@contextmanager
def deep_graphs_freed() -> Iterator[list[Any]]:
    """Free the graph of a run, whose last nodes are put into the list that is given.

    In torch 2.13 nodes that Python has looked at are freed one inside the other. Some 50,000 in a
    row overflow a stack of 8 MiB, whether or not they are watched. Whoever else holds a part of the
    graph must have let go of it when the context ends.
    """
    first = counter()
    nodes: list[Any] = []
    yield nodes
    if counter() - first < _SHALLOW:
        return
    size = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=nodes.clear)
        thread.start()
        thread.join()
    except RuntimeError:  # no room for such a stack: it is freed here, as without us
        nodes.clear()
    finally:
        threading.stack_size(size)
