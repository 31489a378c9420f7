"""Keeps inspections apart, and signals and the garbage collector away from them."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any, Self

from torch import nn

from pytest_modelhealth.capture.observing.flow import counter
from pytest_modelhealth.capture.observing.hooks import Hooks
from pytest_modelhealth.capture.step.guard import Guard
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
        self.numbers: dict[str, Any] | None = None
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
                self.numbers = _running[0].numbers
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

    @contextmanager
    def untouched(self, batch: Any, values: Memory | bool = False) -> Iterator[Guard]:
        """Start from no gradient, and leave no trace on the model, however it ends.

        Values of parameters are not copied unless that is asked for: that some forward wrote to one
        shows in its version.
        """
        with Guard(self.state, batch, values=values, numbers=self.numbers or True) as guard:
            self.numbers = guard.numbers
            guard.leaves.set_aside()
            yield guard

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
