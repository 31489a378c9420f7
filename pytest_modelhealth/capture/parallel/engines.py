"""A step of `fully_shard` or of `DistributedDataParallel` that leaves no trace on either.

The reducer of DDP hooks the nodes that accumulate the gradients of the parameters it was given.
Other leaves on the same memory pass it by: no gradient is averaged, no bucket is written or built
anew, and no rank waits for another. `no_sync` alone does not do: before the first step of a static
graph the hooks count our backward, and from then on gradients are never averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_MEANWHILE: dict[str, Any] = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "_partial_reduce_output": None,
    "_post_forward_indices": list,
    "post_forward_order": list,
    "unsharded_accumulated_grad": None,
    "grad": None,
}
"""What attributes of FSDP's are during a step, a list an empty one."""


class Shards:
    """The modules of a model that `fully_shard` was called on.

    FSDP puts whole parameters in place of its shards while they are needed, and remembers that it
    did. The root's stay in place after a forward. The shards are what the user knows as parameters,
    and what gets the gradients.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        states = [module._get_fsdp_state() for module in modules]
        self._groups = [group for state in states for group in state._fsdp_param_groups]
        self._parameters = [one for group in self._groups for one in group.fsdp_params]
        self._contexts = list({id(s._comm_ctx): s._comm_ctx for s in states}.values())
        self.by_owner: dict[tuple[nn.Module, str], nn.Parameter] = {}
        """The shard of each module's parameter, by its own name; tied ones at each module."""
        for one in self._parameters:
            info = one._module_info
            owners = zip(info.shared_modules, info.shared_param_names, strict=True)
            for owner in ((info.module, info.param_name), *owners):
                self.by_owner[owner] = one.sharded_param

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Show the shards when this is entered, and leave FSDP as it was, however this ends.

        Gradients are reduced inside even where FSDP was told to wait; what it has accumulated
        meanwhile is set aside.
        """
        unsharded = [
            any(group.is_unsharded for group in module._get_fsdp_state()._fsdp_param_groups)
            for module in self._modules
        ]
        for module in self._modules:
            module.reshard()
        kept = self._set_aside()
        try:
            yield
        except BaseException:
            for module in self._modules:
                if module._get_fsdp_state()._is_root:
                    module.reset_iter_state()
            self._restore(kept)
            # gathering would wait for ranks that may never come; the next forward does it
            raise
        self._restore(kept)
        for module, was in zip(self._modules, unsharded, strict=True):
            if was:
                module.unshard()

    @property
    def waits(self) -> bool:
        """Whether FSDP was told to reduce no gradients for now."""
        return not all(group.reduce_grads for group in self._groups)

    def _set_aside(self) -> list[tuple[Any, str, Any]]:
        wholes = (getattr(one, "_unsharded_param", None) for one in self._parameters)
        holders = (*self._groups, *self._contexts, *self._parameters, *wholes)
        pairs = ((one, name) for one in holders for name in _MEANWHILE if hasattr(one, name))
        kept = [(one, name, getattr(one, name)) for one, name in pairs]
        for holder, name, _ in kept:
            value = _MEANWHILE[name]
            setattr(holder, name, [] if value is list else value)
        return kept

    def _restore(self, kept: list[tuple[Any, str, Any]]) -> None:
        for module in self._modules:
            module.reshard()
        for one in self._parameters:
            whole = getattr(one, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None
        for holder, name, value in kept:
            setattr(holder, name, value)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have the modules hold the shards; nothing of the model may run inside."""
        each = [
            (module._parameters, name, shard)
            for (module, name), shard in self.by_owner.items()
            if name in module._parameters
        ]
        before = [owner[name] for owner, name, _ in each]
        try:
            for owner, name, shard in each:
                owner[name] = shard
            yield
        finally:
            for (owner, name, _), was in zip(each, before, strict=True):
                owner[name] = was

    def shard_of(self, leaf: Tensor) -> Tensor:
        """Return the shard that a whole parameter belongs to; any other tensor itself."""
        for one in self._parameters:
            if leaf is getattr(one, "_unsharded_param", None):
                shard: Tensor = one.sharded_param
                return shard
        return leaf


def stay_local(replicated: Iterable[Any]) -> None:
    """Have them send neither buffers nor gradients; what is set are plain attributes."""
    for one in replicated:
        one.require_backward_grad_sync = one.require_forward_param_sync = False
        one.reducer = _Quiet(one.reducer)
        if one.static_graph:
            one._static_graph_delay_allreduce_enqueued = True


class _Quiet:
    """A reducer that does not cut its buckets anew, for which it would wait for the other ranks."""

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
    if kind is not nn.Parameter and type(value) is Tensor:  # a class of the user's own
        double = Tensor._make_subclass(kind, value, parameter.requires_grad)
    else:
        double = nn.Parameter(value, parameter.requires_grad)
    vars(double).update(vars(parameter))
    if parameter._backward_hooks:  # the user's, which change the gradient
        double._backward_hooks = parameter._backward_hooks
    return double
