"""A step of `DistributedDataParallel` on this rank alone, of which its reducer learns nothing.

The reducer hooks the nodes that accumulate the gradients of the parameters it was given. Other
leaves on the same memory pass it by: no gradient is averaged, no bucket is written or built anew,
and no rank waits for another. `no_sync` alone does not do: before the first step of a static graph
the hooks count our backward, and from then on gradients are never averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def stay_local(replicated: Iterable[Any]) -> None:
    """Have them send neither buffers nor gradients; what is set are plain attributes."""
    for one in replicated:
        one.require_backward_grad_sync = one.require_forward_param_sync = False
        one.reducer = _Quiet(one.reducer)
        if one.static_graph:
            one._static_graph_delay_allreduce_enqueued = True


class _Quiet:
    """A reducer that does not cut its buckets anew, for which it would wait for the other ranks.

    Args:
        reducer: does all else.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def doubles(replicated: Iterable[Any]) -> dict[int, Tensor]:
    """Return another parameter on the same memory for each, by the id of the one it stands for."""
    found: dict[int, Tensor] = {}
    for one in replicated:
        for parameter in one.module.parameters():
            if id(parameter) not in found:
                found[id(parameter)] = _double(parameter)
    return found


def _double(parameter: nn.Parameter) -> Tensor:
    kind = type(parameter)
    value = parameter.detach()
    if kind is not nn.Parameter and issubclass(kind, nn.Parameter) and type(value) is Tensor:
        double = Tensor._make_subclass(kind, value, parameter.requires_grad)
    else:
        double = nn.Parameter(value, parameter.requires_grad)
    vars(double).update(vars(parameter))
    if parameter._backward_hooks:  # the user's, which change the gradient
        double._backward_hooks = parameter._backward_hooks
    return double
