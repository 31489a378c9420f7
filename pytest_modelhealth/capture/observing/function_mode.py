"""Sees functional activations while a model runs, each as a layer of the module that calls it."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any, cast

import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from pytest_modelhealth.capture.observing.flow import FlowRecorder
from pytest_modelhealth.capture.observing.flow.recorder import FORM_QUERIES, function_name
from pytest_modelhealth.capture.observing.layer import FUNCTIONAL_DROPOUT
from pytest_modelhealth.capture.observing.loss_calls import LOSS_FUNCTIONS
from pytest_modelhealth.layers import FUNCTIONAL_LAYERS

Call = Callable[..., Any]

_UNNAMED = frozenset({*FUNCTIONAL_DROPOUT, *LOSS_FUNCTIONS})

_ASKS_FOR_FORM = FORM_QUERIES | {"__get__", "type"}
"""Names of what is asked of a tensor without reading its values, as a rule."""

_TAKES_OFF = inspect.unwrap(_pop_mode_temporarily).__code__

_GIVES_VALUES = frozenset(
    {cast("Any", getattr(torch.Tensor, n)).__get__ for n in ("data", "T", "mT", "H", "mH", "real")}
    | {cast("Any", torch.Tensor.imag).__get__, torch.Tensor.type}
)
"""What has the name of a question for the form, and gives a tensor with the values."""


_CLAMPS = frozenset(
    {torch.clamp, torch.clamp_min, torch.clip}
    | {
        getattr(torch.Tensor, n)
        for n in ("clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_")
    }
)


def _is_relu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a clamp has a lower bound of zero and no upper one."""
    low, high = (*args[1:3], None, None)[:2]
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    return high is None and type(low) in (int, float) and low == 0


class FunctionalLayers(TorchFunctionMode):
    """Hands each call of a functional layer to ``observe(name, call, args, kwargs)``.

    Functional dropout, which is a setting rather than a layer, and losses have no name. The
    observer makes the call and returns its output. The mode is off meanwhile, so that a function
    built from others shows once.
    """

    def __init__(
        self,
        observe: Callable[[str | None, Call, tuple[Any, ...], dict[str, Any]], Any],
        flow: FlowRecorder,
    ) -> None:
        super().__init__()
        self.flow = flow
        self.observe: Callable[..., Any] | None = observe  # None when the run is over
        # ids of the parameters whose values a function was given while gradients were on
        self.read: set[int] = set()
        self.readers: dict[int, str] = {}  # the first function that was given them, by id

    def __torch_function__(
        self,
        func: Call,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, observed if it is a layer."""
        kwargs = kwargs or {}
        name = FUNCTIONAL_LAYERS.get(func)
        self._note_read(func, args)
        if kwargs:
            self._note_read(func, kwargs.values())
        if name is None and func in _CLAMPS and _is_relu(args, kwargs):
            name = "relu"
        if self.observe is None:
            return func(*args, **kwargs)
        if name is None and func not in _UNNAMED:
            return self.flow.run_function(func, args, kwargs)
        return self.observe(name, func, args, kwargs)

    def _note_read(self, func: Call, values: Iterable[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind is Parameter:
                is_asked = getattr(func, "__name__", "") in _ASKS_FOR_FORM
                if not is_asked or func in _GIVES_VALUES:
                    self.readers.setdefault(id(value), function_name(func))
                    if torch.is_grad_enabled():
                        self.read.add(id(value))
            elif kind is list or kind is tuple:  # torch.cat([...])
                self._note_read(func, value)

    def turn_on(self) -> None:
        """Let calls be seen from here on."""
        torch._C._push_on_torch_function_stack(self)

    def turn_off(self) -> None:
        """Leave no trace, wherever among the user's own modes this one is; it may be off already.

        An exception such as Ctrl-C may have come in at any moment: while torch's own
        ``_pop_mode_temporarily`` had the mode in hand, say, which would put it back when the
        garbage collector gets there.
        """
        if not self.is_on:
            for holder in gc.get_referrers(self):
                if isinstance(holder, GeneratorType) and holder.gi_code is _TAKES_OFF:
                    holder.close()
        self.suspend()

    def step_aside(self) -> Callable[[], None] | None:
        """Turn the mode off if that is a small matter, and return what turns it on again.

        Inside a call that calls no functional layer it would only cost time. It is none where
        another mode is on above it: its code may run inside the call.
        """
        depth = torch._C._len_torch_function_stack()
        if not depth:
            return lambda: None
        if torch._C._get_function_stack_at(depth - 1) is not self:
            return None
        torch._C._pop_torch_function_stack()
        turn_on: Callable[[], None] = self.turn_on
        return turn_on

    @property
    def is_on(self) -> bool:
        """Whether calls are seen now."""
        depth = torch._C._len_torch_function_stack()
        return any(torch._C._get_function_stack_at(level) is self for level in range(depth))

    def suspend(self) -> Callable[[], None] | None:
        """Turn the mode off, and return what turns it on again in its place among the user's own.

        Inside a call that was seen it is off already: then there is nothing to return.
        """
        if not self.is_on:
            return None
        above = []
        while (mode := torch._C._pop_torch_function_stack()) is not self:
            above.append(mode)
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)

        def resume() -> None:
            restored = [torch._C._pop_torch_function_stack() for _ in above]
            for mode in (self, *reversed(restored)):
                torch._C._push_on_torch_function_stack(mode)

        return resume
