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


class Shards:
    """The modules of a model that `fully_shard` was called on.

    FSDP puts whole parameters in place of its shards while they are needed, and remembers that it
    did. The root's stay in place after a forward. The shards are what the user knows as parameters,
    and what gets the gradients.

    Args:
        modules: all of them, outer ones first.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        states = [module._get_fsdp_state() for module in modules]
        self._groups = [group for state in states for group in state._fsdp_param_groups]
        self._parameters = [one for group in self._groups for one in group.fsdp_params]
        self._contexts = list({id(s._comm_ctx): s._comm_ctx for s in states}.values())

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
        kept: list[tuple[Any, str, Any]] = []
        for group in self._groups:
            kept += _attributes(
                group,
                {
                    "reduce_grads": True,
                    "all_reduce_grads": True,
                    "_partial_reduce_output": None,
                    "_post_forward_indices": [],
                },
            )
        for context in self._contexts:
            kept += _attributes(context, {"post_forward_order": []})
        for one in self._parameters:
            kept += _attributes(one, {"unsharded_accumulated_grad": None})
            whole = getattr(one, "_unsharded_param", None)
            if whole is not None:
                kept.append((whole, "grad", whole.grad))
                whole.grad = None
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
        places = [place for one in self._parameters for place in _places(one)]
        held = [(owner, name, owner[name]) for owner, name, _ in places]
        try:
            for owner, name, shard in places:
                owner[name] = shard
            yield
        finally:
            for owner, name, was in held:
                owner[name] = was

    def shard_of(self, leaf: Tensor) -> Tensor:
        """Return the shard that a whole parameter belongs to; any other tensor itself."""
        for one in self._parameters:
            if leaf is getattr(one, "_unsharded_param", None):
                shard: Tensor = one.sharded_param
                return shard
        return leaf


def _attributes(holder: Any, meanwhile: dict[str, Any]) -> list[tuple[Any, str, Any]]:
    """Set attributes that `holder` has; return what they were."""
    kept = [(holder, name, getattr(holder, name)) for name in meanwhile if hasattr(holder, name)]
    for _, name, _ in kept:
        setattr(holder, name, meanwhile[name])
    return kept


def _places(one: Any) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    """Yield where modules hold a parameter, tied ones in several places, and its shard."""
    where = one._module_info
    modules = [where.module, *where.shared_modules]
    names = [where.param_name, *where.shared_param_names]
    for module, name in zip(modules, names, strict=True):
        if name in module._parameters:
            yield module._parameters, name, one.sharded_param


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
    if kind is not nn.Parameter and type(value) is Tensor:  # a class of the user's own
        double = Tensor._make_subclass(kind, value, parameter.requires_grad)
    else:
        double = nn.Parameter(value, parameter.requires_grad)
    vars(double).update(vars(parameter))
    if parameter._backward_hooks:  # the user's, which change the gradient
        double._backward_hooks = parameter._backward_hooks
    return double
