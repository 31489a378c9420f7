"""Where a forward failed, and on which tensor: read off the frames of its traceback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pytest_modelhealth.guessing.kinds.plain.layers import Expected, expected

_NAMES = ("input", "query", "src", "x", "hidden_states")


@dataclass(frozen=True)
class Failure:
    """One forward that failed.

    Args:
        text: what was raised.
        layer: the innermost layer that is known, and was running.
        takes: what that layer takes.
        arrived: the tensor that reached it.
    """

    text: str
    layer: nn.Module | None
    takes: Expected | None
    arrived: Tensor | None


def failure_of(error: Exception) -> Failure:
    """Return where a forward failed; the layer is one whose own code ran last, not any around."""
    text = f"{type(error).__name__}: {error}"
    layer, found = None, None
    trace = error.__traceback__
    while trace is not None:
        one = trace.tb_frame.f_locals.get("self")
        if isinstance(one, nn.Module):
            is_own = trace.tb_frame.f_code.co_name not in ("_call_impl", "_wrapped_call_impl")
            if is_own:
                layer, found = one, _arrived(trace.tb_frame.f_locals)
        trace = trace.tb_next
    takes = None if layer is None else expected(layer)
    return Failure(text, layer, takes, found)


def _arrived(names: dict[str, Any]) -> Tensor | None:
    for name in _NAMES:
        if isinstance(names.get(name), Tensor):
            return names[name]  # type: ignore[no-any-return]
    return next((value for value in names.values() if isinstance(value, Tensor)), None)


def is_view(tensor: Tensor, value: Any) -> bool:
    """Whether a tensor lies in the memory of an input."""
    if not isinstance(value, Tensor):
        return False
    return tensor.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
