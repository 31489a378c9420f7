"""What a rank notes of its model and batch, for the comparisons between ranks."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.ranks.group import RankGroup
from pytest_modelhealth.ranks.layout import Leaf, Place, Wrapped
from pytest_modelhealth.report import Observation
from pytest_modelhealth.statistics import TensorStatistics, UnsupportedTensorError, reduce

Name = tuple[str, str]
"""A parameter: its layer and its own name."""

Key = tuple[str, str, str]
"""Layer, role and own name of a tensor."""

OUTSIDE = "no wrapper holds {them}"
BY_HAND = (
    "no wrapper that gets a gradient holds {them}, unless the training loop does it by hand after "
    "backward()"
)
LEFT_OUT = "fully_shard does not hold {them}, by ignored_params or since a later change"
THAWED = "DDP was made while {they} {were} frozen"
BYPASSED = "DDP is called past its wrapper"
"""Why nothing averages the gradient of a parameter."""

_ENOUGH_BITS = 64.0
"""What no two batches have in common by chance."""

_LOOKED_AT = 4096
_PIECE = 1 << 22


class Print(NamedTuple):
    """What tells whether ranks hold the same tensor.

    Args:
        part: which part of it this is, and of which ranks: with equal parts the bits are equal.
        bits: its fingerprint.
        is_sure: whether it is wrong in any case that others are.
    """

    part: str
    bits: int
    is_sure: bool


@dataclass(frozen=True)
class Seen:
    """What a rank tells the others of one step.

    Args:
        rank: the rank.
        place: where it stands among the others.
        observation: what it saw.
        batch: a fingerprint of all that it was given; 0 where that tells no batches apart.
        random: one of the generator that its model draws from; 0 where it shares no batch out.
        tensors: those of what it holds, by layer, role and own name.
        unaveraged: reason by layer and parameter of what gets gradients that nothing averages.
        unused: parameters without a gradient for which DDP waits.
    """

    rank: int
    place: Place
    observation: Observation
    batch: int
    random: int
    tensors: dict[Key, Print]
    unaveraged: dict[Name, str]
    unused: frozenset[Name]

    @property
    def is_first(self) -> bool:
        """Whether it is the first of those that see the same samples."""
        return self.place.tensor[0] == self.rank


class Evidence:
    """What a rank notes before a run: no collective runs here, and the model is untouched.

    `close` must be called when the run has ended, or failed.

    Args:
        group: the ranks that inspect together.
        request: what is run.
    """

    def __init__(self, group: RankGroup, request: Request) -> None:
        self.group, self.wrapped = group, Wrapped(request.model)
        shares = len(group.place.data) > 1
        given = find_tensors((request.inputs, request.target))
        self._batch = self._random = 0
        if shares and sum(map(_bits, given)) >= _ENOUGH_BITS:
            self._batch = combined(fingerprint(_local(tensor)) for tensor in given)
        if shares:
            self._random = _generator(self.wrapped)
        self._kept = {id(ddp): {id(p) for p in ddp._module_parameters} for ddp in self.wrapped.ddps}
        self._ignored: set[int] = set()
        for ddp in self.wrapped.ddps:
            own = dict([*ddp.module.named_parameters(), *ddp.module.named_buffers()])
            self._ignored |= {id(own[name]) for name in ddp.parameters_to_ignore if name in own}
        self._tensors: dict[Key, Print] = {}
        self._before: dict[Key, int] = {}
        self._hold_tensors()
        self._entered: set[int] = set()
        self._bypassed: dict[int, str] = {}
        is_wrapped = shares and (self.wrapped.ddps or self.wrapped.sharded)
        hooks = list(self._watched(request.model)) if is_wrapped else []
        self.close = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        self._alone = list(self._not_averaged()) if is_wrapped else []
        self._due: list[Leaf] = []
        self._frozen: set[Name] = set()
        self.waiting: list[tuple[set[Name], set[Name]]] = []
        """What each DDP holds, and what of it gets a gradient if anything does."""
        for ddp in self.wrapped.ddps:
            if not (ddp.find_unused_parameters or ddp.static_graph):
                self._await(ddp)

    def seen(self, own: Observation) -> Seen:
        """Return what this rank tells the others.

        Args:
            own: what it saw.
        """
        written = {key for key, before in self._before.items() if _buffer(own, key) != before}
        unused = self._frozen | {leaf.key for leaf in self._due if _is_unused(leaf, own)}
        return Seen(
            self.group.rank,
            self.group.place,
            own,
            self._batch,
            self._random,
            {key: held for key, held in self._tensors.items() if key not in written},
            self._unaveraged(own) if own.backward else {},
            frozenset(unused if own.backward else ()),
        )

    def _hold_tensors(self) -> None:
        """Note what ought to be equal on several ranks.

        What DDP was told to ignore is each rank's own. So are running statistics, buffers that the
        forward writes, and buffers of one number: counters, and the number of the rank.
        """
        norms = nn.modules.batchnorm._NormBase
        for leaf in self.wrapped.parameters:
            self._hold(leaf, "parameters", self._once_a_run)
        for leaf in self.wrapped.buffers:
            is_running = isinstance(leaf.module, norms) and leaf.name.startswith("running_")
            if leaf.tensor.numel() > 1 and not is_running:
                self._hold(leaf, "buffers", fingerprint)
                key = (leaf.layer, "buffers", leaf.name)
                self._before[key] = 0  # which counts as written
                with suppress(UnsupportedTensorError):
                    self._before[key] = of_statistics(reduce(leaf.tensor))

    def _hold(self, leaf: Leaf, role: str, fingerprint: Any) -> None:
        if id(leaf.tensor) in self._ignored or nn.parameter.is_lazy(leaf.tensor):
            return
        part, local = _part(leaf.tensor)
        if not part:
            keepers = (ddp for ddp in self.wrapped.ddps if id(leaf.tensor) in self._kept[id(ddp)])
            of_ddp = (dist.get_process_group_ranks(ddp.process_group) for ddp in keepers)
            part = str(tuple(next(of_ddp, self.group.ranks)))
        is_sure = role == "parameters" or leaf.module.training
        self._tensors[leaf.layer, role, leaf.name] = Print(part, fingerprint(local), is_sure)

    def _once_a_run(self, tensor: Tensor) -> int:
        """Return that of a parameter; in a run over batches anew only where it was written to."""
        kept = self.group.kept
        if kept is None or tensor.is_inference():
            return fingerprint(tensor)
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor._version)
        if place not in kept:
            kept[place] = fingerprint(tensor)
        return kept[place]

    def _watched(self, model: nn.Module) -> Iterator[Any]:
        """Hang a hook on each DDP inside the model that tells whether its forward was entered."""
        names = {layer.module: layer.name for layer in self.wrapped.modules}
        for ddp in self.wrapped.ddps:
            if ddp is not model and any(p.requires_grad for p in ddp._module_parameters):
                inner = ddp.module
                while isinstance(inner, DistributedDataParallel):
                    inner = inner.module
                self._bypassed[id(ddp)] = names.get(inner, "")
                yield ddp.register_forward_pre_hook(partial(_note, self._entered, id(ddp)))

    def _unaveraged(self, own: Observation) -> dict[Name, str]:
        alone = {leaf.key for leaf, _ in self._alone}
        averaged = (leaf for leaf in self.wrapped.parameters if leaf.key not in alone)
        is_used = bool(alone) and any(_has_gradient(leaf, own) for leaf in averaged)
        found = {
            leaf.key: why if is_used else BY_HAND
            for leaf, why in self._alone
            if _has_gradient(leaf, own)
        }
        for number, layer in self._bypassed.items():
            if number not in self._entered and layer in own.layers and own.layers[layer].calls:
                found[layer, ""] = BYPASSED
        return found

    def _await(self, ddp: DistributedDataParallel) -> None:
        """Note for which parameters a DDP waits, once it has got one gradient."""
        leaves = [
            leaf for leaf in self.wrapped.parameters if id(leaf.tensor) in self._kept[id(ddp)]
        ]
        due = [leaf for leaf in leaves if leaf.tensor.requires_grad]
        known = _reduced(ddp) if len(due) < _reduced_count(ddp) else set()
        asleep = (leaf for leaf in leaves if not leaf.tensor.requires_grad)
        frozen = {leaf.key for leaf in asleep if id(leaf.tensor) in known}
        self._due += due
        self._frozen |= frozen
        self.waiting.append(({leaf.key for leaf in leaves}, {leaf.key for leaf in due} | frozen))

    def _not_averaged(self) -> Iterator[tuple[Leaf, str]]:
        """Yield the trainable parameters that no wrapper averages, and why.

        What lies in a module that `fully_shard` was given and is no shard may have been left out on
        purpose. One whose gradient a hook of the user's takes may be averaged there.
        """
        ddps = self.wrapped.ddps
        thawed = {id(p) for ddp in ddps for p in _thawed(ddp)}
        kept = set[int]().union(*self._kept.values())
        below = {id(p) for module in self.wrapped.sharded for p in module.parameters()}
        for leaf in self.wrapped.parameters:
            tensor, number = leaf.tensor, id(leaf.tensor)
            is_shard = (
                isinstance(tensor, DTensor) and (leaf.module, leaf.name) in self.wrapped.shards
            )
            if not tensor.requires_grad or is_shard or number in self._ignored:
                continue
            if number in thawed:
                yield leaf, THAWED
            elif number not in kept and not (
                tensor._post_accumulate_grad_hooks or tensor._backward_hooks
            ):
                yield leaf, LEFT_OUT if number in below else OUTSIDE


def _note(entered: set[int], number: int, *_: object) -> None:
    entered.add(number)


def _bits(tensor: Tensor) -> float:
    """Return how much a tensor tells, at most: values times the logarithm of how many differ."""
    if tensor.is_meta or not tensor.numel():
        return 0.0
    flat = _local(tensor).detach().reshape(-1)
    kinds = len(flat[:: max(1, len(flat) // _LOOKED_AT)].unique())
    return len(flat) * math.log2(kinds)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _generator(wrapped: Wrapped) -> int:
    """Return a fingerprint of the generator of the device that the model is on."""
    device = next((leaf.tensor.device for leaf in wrapped.parameters), torch.device("cpu"))
    if device.type == "cuda":
        return fingerprint(torch.cuda.get_rng_state(device))
    return fingerprint(torch.get_rng_state())


def _part(tensor: Tensor) -> tuple[str, Tensor]:
    """Return which part of a tensor a rank holds, ``""`` where all is whole, and that part."""
    if not isinstance(tensor, DTensor):
        return "", tensor
    mesh = tensor.device_mesh
    placed = zip(mesh.get_coordinate() or (), tensor.placements, strict=False)
    parts = [at for at, placement in placed if not placement.is_replicate()]
    local = tensor.to_local()
    lies = f"{mesh.mesh.flatten().tolist()} {mesh.mesh.shape} {tensor.placements} {parts}"
    return lies, getattr(local, "elem", local)


def _buffer(own: Observation, key: Key) -> int | None:
    """Return a number of what a buffer was after the run, ``None`` where nothing tells."""
    record = own.layers.get(key[0])
    held = None if record is None else record.buffers.get(key[2])
    return None if held is None else of_statistics(held)


def _has_gradient(leaf: Leaf, own: Observation) -> bool:
    record = own.layers.get(leaf.layer)
    return record is not None and leaf.name in record.parameter_gradients


def _is_unused(leaf: Leaf, own: Observation) -> bool:
    record = own.layers.get(leaf.layer)
    if record is None or "parameter_gradients" not in record.watched:
        return False
    return leaf.name not in record.parameter_gradients and leaf.name not in record.tied


def _thawed(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters that were frozen when DDP was made, and are not now."""
    trainable = [p for p in ddp._module_parameters if p.requires_grad]
    if _reduced_count(ddp) >= len(trainable):
        return []
    known = _reduced(ddp)
    return [p for p in trainable if id(p) not in known]


def _reduced_count(ddp: DistributedDataParallel) -> int:
    """Return of how many parameters this DDP averages the gradients."""
    return int(ddp._get_ddp_logging_data().get("num_parameter_tensors", 0))


def _reduced(ddp: DistributedDataParallel) -> set[int]:
    """Return identities of the parameters whose gradients this DDP averages.

    The reducer lists them only with buckets of zeros, a copy of all gradients: it is asked where
    it averages others than are trainable.
    """
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return {id(p) for bucket in buckets for p in bucket.parameters()}


def fingerprint(tensor: Tensor) -> int:
    """Return a number that equal tensors share: of shape, dtype and every bit, in their order.

    On the CPU it is `zlib.crc32`, which reads 1 GB/s. On another device the bits are multiplied by
    odd numbers that depend on their place and summed there, modulo 2**64.
    """
    tensor = tensor.detach()
    begun = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if not tensor.numel() or tensor.device.type == "meta":
        return begun
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        return zlib.crc32(flat.numpy().data, begun)
    return _summed(flat, begun)


def _summed(flat: Tensor, begun: int) -> int:
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE].long()
        place = torch.arange(start, start + len(piece), device=flat.device)
        odd = (place * 0x9E3779B97F4A7C1 + begun) | 1
        odd = (odd ^ (odd >> 29)) * 0x3F58476D1CE4E5B9 | 1
        total += ((piece + 1) * odd).sum()
    return int(total) & 0x7FFFFFFFFFFFFFFF


def combined(numbers: Iterable[object]) -> int:
    """Return one number of several things that are equal where their texts are."""
    return zlib.crc32("|".join(map(repr, numbers)).encode(errors="backslashreplace"))


def of_statistics(statistics: TensorStatistics | None) -> int:
    """Return a number that equal statistics share, those of a tensor equal to the last bit."""
    if statistics is None:
        return 0
    s = statistics
    return combined(
        (s.shape, s.dtype, s.count, s.mean, s.std, s.min, s.max, s.zero_count, s.nan_count)
    )
