"""What a rank notes of its model and batch, for the comparisons between ranks."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.layout import Leaf, Wrapped, reducer_count
from pytest_modelhealth.report import Observation
from pytest_modelhealth.statistics import TensorStatistics, UnsupportedTensorError, reduce

Name = tuple[str, str]
"""A parameter: its layer and its own name."""

Key = tuple[Any, ...]
"""How tensors lie, then which part of them: ranks with the same key hold the same."""

OUTSIDE, BYPASSED, THAWED = "outside", "bypassed", "thawed"
LATER, LEFT_OUT, BY_HAND = "later", "left out", "by hand"

_ENOUGH_BITS = 64.0
"""What no two batches have in common by chance."""

_LOOKED_AT = 4096
_PIECE = 1 << 22


@dataclass(frozen=True)
class Record:
    """What a rank tells the others beside what it saw.

    Args:
        batch: a fingerprint of all that it was given; 0 where that tells no batches apart.
        random: one of the generator that its model draws from; 0 where it shares no batch out.
        tensors: the fingerprints of what it holds, by key.
        unaveraged: layer, parameter and reason of what gets gradients that nothing averages.
        unused: parameters without a gradient for which DDP waits.
        cut: layers of whose parameters it holds a part within its tensor-parallel group.
    """

    batch: int = 0
    random: int = 0
    tensors: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    unaveraged: tuple[tuple[str, str, str], ...] = ()
    unused: tuple[Name, ...] = ()
    cut: frozenset[str] = frozenset()


class Held(NamedTuple):
    """A tensor that another rank may hold, too.

    Args:
        leaf: its names.
        role: ``"parameters"`` or ``"buffers"``.
        bits: its fingerprint.
        before: of a buffer, a number of its statistics before the run; 0 for a parameter.
        in_training: whether its module is in training mode.
    """

    leaf: Leaf
    role: str
    bits: int
    before: int
    in_training: bool


class Evidence:
    """What a rank notes before a run: no collective runs here, and the model is untouched.

    `close` must be called when the run has ended, or failed.

    Args:
        company: the ranks that inspect together.
        request: what is run.
    """

    def __init__(self, company: Company, request: Request) -> None:
        self.company, self.wrapped = company, Wrapped(request.model)
        shares = len(company.place.data) > 1
        given = find_tensors((request.inputs, request.target))
        self._batch = self._random = 0
        if shares and sum(map(_bits, given)) >= _ENOUGH_BITS:
            self._batch = combined(fingerprint(_local(tensor)) for tensor in given)
        if shares:
            self._random = _generator(self.wrapped)
        self.held: dict[Key, list[Held]] = {}
        self._hold_tensors()
        self._entered: set[int] = set()
        self._bypassed: dict[int, str] = {}
        is_wrapped = shares and (self.wrapped.ddps or self.wrapped.sharded)
        hooks = list(self._watched(request.model)) if is_wrapped else []
        self.close = weakref.finalize(self, _remove, hooks)
        self._alone = list(_alone(self.wrapped)) if is_wrapped else []
        self._due: list[Leaf] = []
        self._frozen: list[Name] = []
        self.waiting: list[tuple[set[Name], set[Name]]] = []
        """What each DDP holds, and what of it gets a gradient if anything does."""
        for ddp in self.wrapped.ddps:
            if not (ddp.find_unused_parameters or ddp.static_graph):
                self._await(ddp)

    def record(self, own: Observation) -> Record:
        """Return what this rank tells the others.

        Args:
            own: what it saw.
        """
        for key, held in self.held.items():
            self.held[key] = [one for one in held if not _was_written(one, own)]
        unused = [(p.layer, p.name) for p in self._due if _is_unused(p, own)] + self._frozen
        return Record(
            self._batch,
            self._random,
            {key: tuple(one.bits for one in held) for key, held in self.held.items()},
            tuple(self._unaveraged(own)) if own.backward else (),
            tuple(unused) if own.backward else (),
            frozenset(p.layer for p in self.wrapped.parameters if self._is_cut(p.tensor)),
        )

    def _hold_tensors(self) -> None:
        """Note what ought to be equal on several ranks.

        What DDP was told to ignore is each rank's own. So are running statistics, and buffers of
        one number: counters, and the number of the rank.
        """
        norms = nn.modules.batchnorm._NormBase
        for leaf in self.wrapped.parameters:
            self._hold(leaf, "parameters")
        for leaf in self.wrapped.buffers:
            is_running = isinstance(leaf.module, norms) and leaf.name.startswith("running_")
            if leaf.tensor.numel() > 1 and not is_running:
                self._hold(leaf, "buffers")

    def _hold(self, leaf: Leaf, role: str) -> None:
        if id(leaf.tensor) in self.wrapped.ignored or nn.parameter.is_lazy(leaf.tensor):
            return
        key, local = _key(leaf.tensor)
        if not key:
            ranks = self.wrapped.ranks_of(leaf) or self.company.ranks
            key = (zlib.crc32(repr(ranks).encode()),)
        before = 0
        if role == "parameters":
            bits = self._once_a_run(local)
        else:
            bits = fingerprint(local)
            try:
                before = of_statistics(reduce(leaf.tensor))
            except UnsupportedTensorError:
                before = 0
        self.held.setdefault(key, []).append(Held(leaf, role, bits, before, leaf.module.training))

    def _once_a_run(self, tensor: Tensor) -> int:
        """Return that of a parameter; in a run over batches anew only where it was written to."""
        kept = self.company.kept
        if kept is None or tensor.is_inference():
            return fingerprint(tensor)
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor._version)
        if place not in kept:
            kept[place] = fingerprint(tensor)
        return kept[place]

    def _watched(self, model: nn.Module) -> Iterator[Any]:
        """Hang a hook on each DDP inside the model that tells whether its forward was entered."""
        entered = self._entered
        for ddp in self.wrapped.ddps:
            if ddp is not model and any(p.requires_grad for p in ddp._module_parameters):
                number = id(ddp)
                self._bypassed[number] = self.wrapped.names.get(_inside(ddp), "")
                yield ddp.register_forward_pre_hook(lambda *_, number=number: entered.add(number))

    def _unaveraged(self, own: Observation) -> Iterator[tuple[str, str, str]]:
        alone = {id(leaf.tensor) for leaf, _ in self._alone}
        averaged = [leaf for leaf in self.wrapped.parameters if id(leaf.tensor) not in alone]
        is_used = any(_has_gradient(leaf, own) for leaf in averaged) if alone else False
        for leaf, why in self._alone:
            if _has_gradient(leaf, own):
                yield leaf.layer, leaf.name, why if is_used else BY_HAND
        for number, layer in self._bypassed.items():
            record = own.layers.get(layer)
            if number not in self._entered and record is not None and record.calls:
                yield layer, "", BYPASSED

    def _await(self, ddp: DistributedDataParallel) -> None:
        """Note for which parameters a DDP waits, once it has got one gradient."""
        kept = self.wrapped.keepers(ddp)
        leaves = [leaf for leaf in self.wrapped.parameters if id(leaf.tensor) in kept]
        due = [leaf for leaf in leaves if leaf.tensor.requires_grad]
        known = _reduced(ddp) if len(due) < reducer_count(ddp) else set()
        asleep = [leaf for leaf in leaves if not leaf.tensor.requires_grad]
        frozen = [(leaf.layer, leaf.name) for leaf in asleep if id(leaf.tensor) in known]
        self._due += due
        self._frozen += frozen
        waited_for = {(leaf.layer, leaf.name) for leaf in due} | set(frozen)
        self.waiting.append(({(leaf.layer, leaf.name) for leaf in leaves}, waited_for))

    def _is_cut(self, tensor: Tensor) -> bool:
        if not isinstance(tensor, DTensor):
            return False
        mesh, group = tensor.device_mesh, set(self.company.place.tensor)
        return any(
            not placement.is_replicate()
            and len(group & set(dist.get_process_group_ranks(mesh.get_group(dimension)))) > 1
            for dimension, placement in enumerate(tensor.placements)
        )


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


def _key(tensor: Tensor) -> tuple[Key, Tensor]:
    """Return what tells whether two ranks hold the same part, nothing where all is whole, and that
    part.
    """
    if not isinstance(tensor, DTensor):
        return (), tensor
    mesh = tensor.device_mesh
    here = mesh.get_coordinate() or ()
    placed = zip(here, tensor.placements, strict=False)
    parts = tuple(at for at, placement in placed if not placement.is_replicate())
    lies = f"{mesh.mesh.flatten().tolist()} {mesh.mesh.shape} {tensor.placements}"
    local = tensor.to_local()
    return (zlib.crc32(lies.encode()), parts), getattr(local, "elem", local)


def _was_written(held: Held, own: Observation) -> bool:
    """Whether the forward wrote to a buffer, or may have done so unseen."""
    if held.role == "parameters":
        return False
    record = own.layers.get(held.leaf.layer)
    after = None if record is None else record.buffers.get(held.leaf.name)
    return after is None or of_statistics(after) != held.before


def _has_gradient(leaf: Leaf, own: Observation) -> bool:
    record = own.layers.get(leaf.layer)
    return record is not None and leaf.name in record.parameter_gradients


def _is_unused(leaf: Leaf, own: Observation) -> bool:
    record = own.layers.get(leaf.layer)
    if record is None or "parameter_gradients" not in record.watched:
        return False
    return leaf.name not in record.parameter_gradients and leaf.name not in record.tied


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _inside(ddp: DistributedDataParallel) -> nn.Module:
    module: nn.Module = ddp.module
    return _inside(module) if isinstance(module, DistributedDataParallel) else module


def _alone(wrapped: Wrapped) -> Iterator[tuple[Leaf, str]]:
    """Yield the trainable parameters that no wrapper averages, and why.

    What lies in a module that `fully_shard` was given and is no shard may have been left out on
    purpose. One whose gradient a hook of the user's takes may be averaged there.
    """
    thawed = {id(p) for ddp in wrapped.ddps for p in _thawed(ddp)}
    kept = {number for ddp in wrapped.ddps for number in wrapped.keepers(ddp)}
    inside = {id(p) for ddp in wrapped.ddps for p in ddp.module.parameters()}
    below = {id(p) for module in wrapped.sharded for p in module.parameters()}
    for leaf in wrapped.parameters:
        tensor, number = leaf.tensor, id(leaf.tensor)
        is_shared = isinstance(tensor, DTensor) and wrapped.is_sharded(leaf)
        if not tensor.requires_grad or is_shared or number in wrapped.ignored:
            continue
        if number in thawed:
            yield leaf, THAWED
        elif number not in kept and not (
            tensor._post_accumulate_grad_hooks or tensor._backward_hooks
        ):
            left_out = LEFT_OUT if number in below else OUTSIDE
            yield leaf, LATER if number in inside else left_out


def _thawed(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters that were frozen when DDP was made, and are not now."""
    trainable = [p for p in ddp._module_parameters if p.requires_grad]
    if reducer_count(ddp) >= len(trainable):
        return []
    known = _reduced(ddp)
    return [p for p in trainable if id(p) not in known]


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
