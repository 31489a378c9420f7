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
        ddps, leaves = self.wrapped.ddps, self.wrapped.parameters
        self._batch = self._random = 0
        shares = len(group.place.data) > 1
        if shares:
            given = find_tensors((request.inputs, request.target))
            if sum(map(_bits, given)) >= _ENOUGH_BITS:
                self._batch = combined(fingerprint(_local(tensor)) for tensor in given)
            self._random = _generator(self.wrapped)
        held = [_Held(ddp, leaves) for ddp in ddps]
        self._ignored = set[int]().union(*(one.ignored for one in held))
        self._tensors: dict[Key, Print] = {}
        self._before: dict[Key, int] = {}
        self._hold_tensors(held)
        self._unused: dict[Name, bool] = {}
        """Parameters that a DDP waits for, and whether none can have a gradient."""
        self.waiting: list[tuple[set[Name], set[Name]]] = []
        """What each DDP holds, and what of it gets a gradient if anything does."""
        for ddp, one in zip(ddps, held, strict=True):
            if not (ddp.find_unused_parameters or ddp.static_graph):
                frozen = [leaf.key for leaf in one.leaves if one.is_due(leaf, trainable=False)]
                due = [leaf.key for leaf in one.leaves if leaf.tensor.requires_grad]
                self._unused |= dict.fromkeys(due, False) | dict.fromkeys(frozen, True)
                self.waiting.append(({leaf.key for leaf in one.leaves}, {*due, *frozen}))
        is_wrapped = bool(shares and (ddps or self.wrapped.sharded))
        self._alone = list(self._not_averaged(held)) if is_wrapped else []
        self._entered: set[int] = set()
        self._bypassed: dict[int, str] = {}
        hooks: list[Any] = []
        self.close = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        hooks.extend(self._watched(request.model) if is_wrapped else ())

    def seen(self, own: Observation) -> Seen:
        """Return what this rank tells the others.

        Args:
            own: what it saw.
        """
        written = {key for key, before in self._before.items() if _buffer(own, key) != before}
        unused = {name for name, never in self._unused.items() if never or _is_unused(name, own)}
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

    def _hold_tensors(self, held: list[_Held]) -> None:
        """Note what ought to be equal on several ranks.

        What DDP was told to ignore is each rank's own. So are running statistics, buffers that the
        forward writes, and buffers of one number: counters, and the number of the rank.
        """
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
            if not part:
                of_ddp = (one.ranks for one in held if id(tensor) in one.known)
                part = str(next(of_ddp, self.group.ranks))
            is_sure = role == "parameters" or leaf.module.training
            self._tensors[key] = Print(part, fingerprint(local), is_sure)
            if role == "buffers":
                self._before[key] = 0  # which counts as written
                with suppress(UnsupportedTensorError):
                    self._before[key] = of_statistics(reduce(tensor))

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
        names = [leaf.key for leaf in self.wrapped.parameters if leaf.key not in alone]
        is_used = bool(alone) and any(_has_gradient(name, own) for name in names)
        found = {
            leaf.key: why if is_used else BY_HAND
            for leaf, why in self._alone
            if _has_gradient(leaf.key, own)
        }
        for number, layer in self._bypassed.items():
            if number not in self._entered and layer in own.layers and own.layers[layer].calls:
                found[layer, ""] = BYPASSED
        return found

    def _not_averaged(self, held: list[_Held]) -> Iterator[tuple[Leaf, str]]:
        """Yield the trainable parameters that no wrapper averages, and why.

        What lies in a module that `fully_shard` was given and is no shard may have been left out on
        purpose. One whose gradient a hook of the user's takes may be averaged there.
        """
        below = {id(p) for module in self.wrapped.sharded for p in module.parameters()}
        for leaf in self.wrapped.parameters:
            tensor, number = leaf.tensor, id(leaf.tensor)
            is_shard = (leaf.module, leaf.name) in self.wrapped.shards
            if not tensor.requires_grad or is_shard or number in self._ignored:
                continue
            holding = [one for one in held if number in one.known]
            if holding and not any(one.is_due(leaf, trainable=True) for one in holding):
                yield leaf, THAWED
            elif not holding and not (tensor._post_accumulate_grad_hooks or tensor._backward_hooks):
                yield leaf, LEFT_OUT if number in below else OUTSIDE


class _Held:
    """What a DDP holds of a model.

    Args:
        ddp: the wrapper.
        leaves: all parameters of the model.
    """

    def __init__(self, ddp: DistributedDataParallel, leaves: list[Leaf]) -> None:
        self.known = {id(parameter) for parameter in ddp._module_parameters}
        self.ranks = tuple(dist.get_process_group_ranks(ddp.process_group))
        self.leaves = [leaf for leaf in leaves if id(leaf.tensor) in self.known]
        own = dict([*ddp.module.named_parameters(), *ddp.module.named_buffers()])
        self.ignored = {id(own[name]) for name in ddp.parameters_to_ignore if name in own}
        trainable = {id(p) for p in ddp._module_parameters if p.requires_grad}
        self._averaged = trainable
        # The reducer lists what it averages only with buckets of zeros, a copy of all gradients: it
        # is asked where it averages others than are trainable.
        if ddp._get_ddp_logging_data().get("num_parameter_tensors", 0) != len(trainable):
            buckets = ddp.reducer._get_zeros_like_grad_buckets()
            self._averaged = {id(p) for bucket in buckets for p in bucket.parameters()}

    def is_due(self, leaf: Leaf, *, trainable: bool) -> bool:
        """Whether it averages the gradient of a parameter that is trainable, or is not."""
        return id(leaf.tensor) in self._averaged and leaf.tensor.requires_grad is trainable


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


def _has_gradient(name: Name, own: Observation) -> bool:
    record = own.layers.get(name[0])
    return record is not None and name[1] in record.parameter_gradients


def _is_unused(name: Name, own: Observation) -> bool:
    record = own.layers.get(name[0])
    if record is None or "parameter_gradients" not in record.watched:
        return False
    return name[1] not in record.parameter_gradients and name[1] not in record.tied


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
