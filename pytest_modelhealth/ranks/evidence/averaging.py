"""Trainable parameters whose gradients no wrapper averages."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pytest_modelhealth.capture import Request
from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.evidence.kind import Cards, Kind, in_order, listed
from pytest_modelhealth.ranks.evidence.wrappers import Leaf, Wrapped, reducer_count
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks

_OUTSIDE = "outside"
_BYPASSED = "bypassed"
_THAWED = "thawed"
_LATER = "later"
_LEFT_OUT = "left out"
_BY_HAND = "by hand"


class Averaging(Kind):
    """Parameters that get gradients on ranks with other samples, and lie below no wrapper.

    What lies in a module that `fully_shard` was given and is no shard may have been left out on
    purpose: that only warns. One whose gradient a hook of the user's takes may be averaged there.
    Where nothing is wrapped at all, it is the training loop that averages, if anyone does. Where
    the wrappers that there are get no gradient, it may be, and that only warns, too.
    """

    name = "averaged_gradients"

    def __init__(self, company: Company, wrapped: Wrapped, request: Request) -> None:
        super().__init__(company, wrapped, request)
        self._entered: set[int] = set()
        self._bypassed: dict[int, str] = {}
        self._alone: list[tuple[Leaf, str]] = []
        shares = len(company.place.data) > 1 and (wrapped.ddps or wrapped.sharded)
        self._hooks = list(self._watched(request.model)) if shares else []
        self.close_later = weakref.finalize(self, _remove, list(self._hooks))
        self._averaged: list[Leaf] = []
        if shares:
            self._alone = list(_alone(wrapped))
            alone = {id(leaf.tensor) for leaf, _ in self._alone}
            self._averaged = [p for p in wrapped.parameters if id(p.tensor) not in alone]

    def _watched(self, model: nn.Module) -> Iterator[Any]:
        """Hang a hook on each DDP inside the model that tells whether its forward was entered."""
        entered = self._entered
        for ddp in self.wrapped.ddps:
            if ddp is not model and any(p.requires_grad for p in ddp._module_parameters):
                number = id(ddp)
                self._bypassed[number] = self.wrapped.names.get(_inside(ddp), "")
                yield ddp.register_forward_pre_hook(lambda *_, number=number: entered.add(number))

    def close(self) -> None:
        """Take the hooks off."""
        self.close_later()

    def card(self, own: Observation) -> tuple[tuple[str, str, str], ...]:
        """Return layer, parameter and reason, of what gets gradients that nobody averages."""
        if not own.backward:
            return ()
        found = []
        is_used = any(_has_gradient(leaf, own) for leaf in self._averaged)
        for leaf, why in self._alone:
            if _has_gradient(leaf, own):
                found.append((leaf.layer, leaf.name, why if is_used else _BY_HAND))
        for number, layer in self._bypassed.items():
            record = own.layers.get(layer)
            if number not in self._entered and record is not None and record.calls:
                found.append((layer, "", _BYPASSED))
        return tuple(found)

    def found(self, cards: Cards, joint: Observation) -> Iterator[Disagreement]:
        """Yield what is not averaged, by its reason."""
        lost = {(layer, name): why for card in cards.values() for layer, name, why in card}
        by_reason: dict[str, list[tuple[str, str]]] = {}
        for one, why in lost.items():
            by_reason.setdefault(why, []).append(one)
        for why, parameters in by_reason.items():
            layers = in_order((layer for layer, _ in parameters), joint)
            layer, name = next(one for one in parameters if one[0] == layers[0])
            yield Disagreement(
                self.name,
                layer,
                "parameter_gradients",
                name,
                self.company.ranks,
                (),
                _text(why, layer, name, len(parameters), self.company.ranks),
                float(len(parameters)),
                layers,
                why not in (_LEFT_OUT, _BY_HAND),
            )


def _has_gradient(leaf: Leaf, own: Observation) -> bool:
    record = own.layers.get(leaf.layer)
    return record is not None and leaf.name in record.parameter_gradients


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _inside(ddp: DistributedDataParallel) -> nn.Module:
    module: nn.Module = ddp.module
    return _inside(module) if isinstance(module, DistributedDataParallel) else module


def _alone(wrapped: Wrapped) -> Iterator[tuple[Leaf, str]]:
    """Yield the trainable parameters that no wrapper averages, and why."""
    thawed = {id(p) for ddp in wrapped.ddps for p in _thawed(ddp)}
    kept = {number for ddp in wrapped.ddps for number in wrapped.keepers(ddp)}
    inside = {id(p) for ddp in wrapped.ddps for p in ddp.module.parameters()}
    below = {id(p) for module in wrapped.sharded for p in module.parameters()}
    for leaf in wrapped.parameters:
        number = id(leaf.tensor)
        is_shared = isinstance(leaf.tensor, DTensor) and wrapped.is_sharded(leaf)
        if not leaf.tensor.requires_grad or is_shared or number in wrapped.ignored:
            continue
        if number in thawed:
            yield leaf, _THAWED
        elif number not in kept and not _is_taken(leaf):
            left_out = _LEFT_OUT if number in below else _OUTSIDE
            yield leaf, _LATER if number in inside else left_out


def _is_taken(leaf: Leaf) -> bool:
    """Whether a hook of the user's sees its gradient, and may average it."""
    tensor = leaf.tensor
    return bool(tensor._post_accumulate_grad_hooks or tensor._backward_hooks)


def _thawed(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters that were frozen when DDP was made, and are not now.

    The reducer lists its parameters only with buckets of zeros, a copy of all gradients. It is
    asked where it has fewer than are trainable.
    """
    trainable = [p for p in ddp._module_parameters if p.requires_grad]
    if reducer_count(ddp) >= len(trainable):
        return []
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    known = {id(p) for bucket in buckets for p in bucket.parameters()}
    return [p for p in trainable if id(p) not in known]


def _text(why: str, layer: str, name: str, count: int, ranks: tuple[int, ...]) -> str:
    among = named_ranks(ranks)
    if why == _BYPASSED:
        return (
            f"{layer!r} is wrapped in DDP and called past its wrapper: {among} train it each on "
            "gradients of its own batch"
        )
    reasons = {
        _OUTSIDE: "no wrapper holds {it}",
        _BY_HAND: "no wrapper that gets a gradient holds {it}, unless the training loop does it by "
        "hand after backward()",
        _LATER: "DDP was made before {it} came in",
        _LEFT_OUT: "fully_shard does not hold {it}, by ignored_params or since a later change",
        _THAWED: "DDP was made while {it} {was} frozen",
    }
    it, was = ("it", "was") if count == 1 else ("they", "were")
    it = "them" if count > 1 and why in (_OUTSIDE, _LEFT_OUT, _BY_HAND) else it
    reason = reasons[why].format(it=it, was=was)
    return (
        f"the gradients of {listed(f'{layer}.{name}', count)} are not averaged over {among}: "
        f"{reason}"
    )
