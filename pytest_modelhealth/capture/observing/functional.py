"""Sees functional activations while a model runs, each as a layer of the module that calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pytest_modelhealth.capture.observing.options import FUNCTIONAL_DROPOUT
from pytest_modelhealth.layers import FUNCTIONAL_LAYERS

Call = Callable[..., Any]


class FunctionalLayers(TorchFunctionMode):
    """Hands each call of a functional layer to ``observe(name, call, args, kwargs)``.

    A functional dropout, which is a setting rather than a layer, has no name.

    The observer makes the call and returns its output. The mode is off meanwhile, so that a
    function built from others shows once.
    """

    def __init__(self, observe: Callable[[str | None, Call, tuple[Any, ...], dict[str, Any]], Any]):
        super().__init__()
        self._observe = observe

    def __torch_function__(
        self,
        func: Call,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, observed if it is a layer."""
        name = FUNCTIONAL_LAYERS.get(func)
        if name is None and func not in FUNCTIONAL_DROPOUT:
            return func(*args, **(kwargs or {}))
        return self._observe(name, func, args, kwargs or {})

    @property
    def is_on(self) -> bool:
        """Whether calls are seen now; not so inside a call that was seen."""
        depth = torch._C._len_torch_function_stack()
        return any(torch._C._get_function_stack_at(level) is self for level in range(depth))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Take the mode, which is on, off, and put it back in its place among the user's own."""
        above = []
        while (mode := torch._C._pop_torch_function_stack()) is not self:
            above.append(mode)
        _push_all(above)
        try:
            yield
        finally:
            restored = [torch._C._pop_torch_function_stack() for _ in above]
            torch._C._push_on_torch_function_stack(self)
            _push_all(restored)


def _push_all(modes: list[Any]) -> None:
    for mode in reversed(modes):
        torch._C._push_on_torch_function_stack(mode)
