"""What a rank notes of its model and batch, for the comparisons between ranks."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.ranks.layout import Place, Wrapped
from pytest_modelhealth.report import Observation
from pytest_modelhealth.statistics import TensorStatistics, UnsupportedTensorError, reduce

Name = tuple[str, str]  # a parameter: its layer and its own name

Key = tuple[str, str, str]  # layer, role and own name of a tensor

_ENOUGH_BITS = 64.0  # what no two batches have in common by chance

_LOOKED_AT = 4096


@dataclass(frozen=True)
class Seen:
    """What a rank tells the others of one step."""

    rank: int  # the rank
    place: Place  # where it stands among the others
    observation: Observation  # what it saw
    batch: int  # a fingerprint of all that it was given; 0 where that tells no batches apart
    random: int  # one of the generator that its model draws from; 0 where it shares no batch out
    # of what it holds, by layer, role and own name: which part it is and of which ranks, that of
    # the part, and whether it is wrong in any case that others are
    tensors: dict[Key, tuple[str, int, bool]]
    # parameters with gradients that no wrapper averages, and whether that is wrong whatever the
    # training loop does
    unaveraged: dict[Name, bool]
    unused: frozenset[Name]  # parameters without a gradient for which DDP waits

    @property
    def is_first(self) -> bool:
        """Whether it is the first of those that see the same samples."""
        return self.place.tensor[0] == self.rank


class Evidence:
    """What a rank notes before a run: no collective runs here, and the model is untouched.

    `close` must be called when the run has ended, or failed.
    """

    def __init__(self, place: Place, request: Request) -> None:
        self.place, self.wrapped = place, Wrapped(request.model)
        ddps, leaves = self.wrapped.ddps, self.wrapped.parameters
        self._batch = self._random = 0
        self._shares = len(place.data) > 1
        if self._shares:
            given = find_tensors((request.inputs, request.target))
            if sum(map(_bits, given)) >= _ENOUGH_BITS:
                self._batch = combined(fingerprint(_part(tensor)[1]) for tensor in given)
            device = next((leaf.tensor.device for leaf in leaves), torch.device("cpu"))
            is_cuda = device.type == "cuda"  # whose generator the model draws from
            state = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
            self._random = fingerprint(state)
        self._averaged = [_averaged_by(ddp) for ddp in ddps]
        self._ignored = {
            id(tensor)
            for ddp in ddps
            for name, tensor in (*ddp.module.named_parameters(), *ddp.module.named_buffers())
            if name in ddp.parameters_to_ignore
        }
        self._tensors: dict[Key, tuple[str, int, bool]] = {}
        self._before: dict[Key, int] = {}
        self._hold_tensors()
        self.waiting: list[tuple[set[Name], set[Name]]] = []
        """What each DDP holds, and what of it gets a gradient if anything does."""
        for ddp, averaged in zip(ddps, self._averaged, strict=True):
            if not (ddp.find_unused_parameters or ddp.static_graph):
                inside = {id(parameter) for parameter in ddp._module_parameters}
                held = {leaf.key for leaf in leaves if id(leaf.tensor) in inside}
                awaited = {leaf.key for leaf in leaves if id(leaf.tensor) in averaged}
                self.waiting.append((held, awaited))
        called = self._called = {n for n, ddp in enumerate(ddps) if ddp is request.model}
        hooks: list[Any] = []
        self.close = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        for number, ddp in enumerate(ddps):
            hooks.append(ddp.register_forward_pre_hook(lambda *_, n=number: called.add(n)))

    def seen(self, own: Observation) -> Seen:
        """Return what this rank tells the others."""
        buffers = {name: record.buffers for name, record in own.layers.items()}
        written = {
            (layer, role, name)
            for (layer, role, name), before in self._before.items()
            if of_statistics(buffers.get(layer, {}).get(name)) != before
        }
        frozen = {leaf.key for leaf in self.wrapped.parameters if not leaf.tensor.requires_grad}
        unused = {
            (layer, name)
            for layer, name in {key for _, keys in self.waiting for key in keys}
            if (layer, name) in frozen
            or (
                (record := own.layers.get(layer)) is not None
                and "parameter_gradients" in record.watched
                and name not in {*record.parameter_gradients, *record.tied}
            )
        }
        return Seen(
            dist.get_rank(),
            self.place,
            own,
            self._batch,
            self._random,
            {key: held for key, held in self._tensors.items() if key not in written},
            self._unaveraged(own) if own.backward and self._shares else {},
            frozenset(unused if own.backward else ()),
        )

    def _hold_tensors(self) -> None:
        """Note what ought to be equal on several ranks.

        What DDP was told to ignore is each rank's own. So are running statistics, buffers that the
        forward writes, and buffers of one number: counters, and the number of the rank.
        """
        groups = {
            id(parameter): tuple(dist.get_process_group_ranks(ddp.process_group))
            for ddp in reversed(self.wrapped.ddps)
            for parameter in ddp._module_parameters
        }
        norms = nn.modules.batchnorm._NormBase
        buffers = [
            leaf
            for leaf in self.wrapped.buffers
            if leaf.tensor.numel() > 1
            and not (isinstance(leaf.module, norms) and leaf.name.startswith("running_"))
        ]
        roles = (("parameters", self.wrapped.parameters), ("buffers", buffers))
        for role, leaf in ((role, leaf) for role, leaves in roles for leaf in leaves):
            key, tensor = (leaf.layer, role, leaf.name), leaf.tensor
            if id(tensor) in self._ignored or nn.parameter.is_lazy(tensor):
                continue
            part, local = _part(tensor)
            part = part or str(groups.get(id(tensor), self.place.ranks))
            is_sure = role == "parameters" or leaf.module.training
            self._tensors[key] = part, fingerprint(local), is_sure
            if role == "buffers":
                self._before[key] = -1  # which counts as written
                with suppress(UnsupportedTensorError):
                    self._before[key] = of_statistics(reduce(tensor))

    def _unaveraged(self, own: Observation) -> dict[Name, bool]:
        """Return the parameters with gradients that no wrapper averages.

        One whose gradient a hook of the user's takes may be averaged there. What lies in a module
        that `fully_shard` was given and is no shard may have been left out on purpose, and where no
        wrapper holds anything with a gradient, the loop may average by hand.
        """
        ddps, sharded = self.wrapped.ddps, self.wrapped.sharded
        if not ddps and not sharded:
            return {}
        shards = {id(tensor) for tensor in self.wrapped.shards.values()}
        called = shards.union(*(self._averaged[number] for number in self._called))
        held = shards.union(*self._averaged)
        left_out = {id(p) for module in sharded for p in module.parameters()}
        used = [
            leaf
            for leaf in self.wrapped.parameters
            if leaf.layer in own.layers and leaf.name in own.layers[leaf.layer].parameter_gradients
        ]
        is_held = any(id(leaf.tensor) in held for leaf in used)
        return {
            leaf.key: is_held and id(leaf.tensor) not in left_out
            for leaf in used
            if id(leaf.tensor) not in called | self._ignored
            and not (leaf.tensor._post_accumulate_grad_hooks or leaf.tensor._backward_hooks)
        }


def _averaged_by(ddp: DistributedDataParallel) -> set[int]:
    """Return identities of the parameters of which a DDP averages the gradients.

    Its reducer lists them only with buckets of zeros, a copy of all gradients: it is asked where it
    averages others than are trainable.
    """
    trainable = {id(p) for p in ddp._module_parameters if p.requires_grad}
    if ddp._get_ddp_logging_data().get("num_parameter_tensors", 0) == len(trainable):
        return trainable
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return {id(p) for bucket in buckets for p in bucket.parameters()}


def _bits(tensor: Tensor) -> float:
    """Return how much a tensor tells, at most: values times the logarithm of how many differ."""
    if tensor.is_meta or not tensor.numel():
        return 0.0
    flat = _part(tensor)[1].detach().reshape(-1)
    kinds = len(flat[:: max(1, len(flat) // _LOOKED_AT)].unique())
    return len(flat) * math.log2(kinds)


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


def fingerprint(tensor: Tensor) -> int:
    """Return a number that equal tensors share: of shape, dtype and every bit, in their order."""
    tensor = tensor.detach()
    begun = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if not tensor.numel() or tensor.device.type == "meta":
        return begun
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.cpu().numpy().data, begun)


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
