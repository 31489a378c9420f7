"""How a model lies over ranks: who shares its batches and tensors out, and what keeps it equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from pytest_modelhealth.capture.parallel.engines import Shards
from pytest_modelhealth.capture.parallel.wrappers import find_wrappers
from pytest_modelhealth.layers import named_modules, type_name

NO_ENGINE = "a process group"  # what stands for the engine of ranks that share batches out by hand


@dataclass(frozen=True)
class Place:
    """Who inspects a model together, and where this rank stands among them."""

    ranks: tuple[int, ...]  # all that take part, in order
    # the ranks that hold the same part of the model and see other samples, in order
    data: tuple[int, ...]
    # the ranks that see the same samples and hold other parts of its tensors, in order
    tensor: tuple[int, ...]
    engine: str  # what distributes the model, for people


def place_of(model: nn.Module, everyone: bool) -> Place | None:
    """Return who inspects a model together; ``None`` where this rank is alone."""
    wrappers = find_wrappers(model.modules())
    replicated = [_ranks_of(ddp.process_group) for ddp in wrappers.replicated]
    groups = [group for m in wrappers.sharded for group in m._get_fsdp_state()._fsdp_param_groups]
    sharded = [_flat(group.mesh_info.mesh) for group in groups]
    data = max((*replicated, *sharded), key=len, default=())
    tensors = (*model.parameters(), *model.buffers())
    meshes = dict.fromkeys(t.device_mesh for t in tensors if hasattr(t, "device_mesh"))
    tensor = max((_beside(mesh, data) for mesh in meshes), key=len, default=())
    known = (("DDP", replicated), ("FSDP2", sharded), ("tensor parallel", tensor[1:]))
    engines = [name for name, some in known if some]
    everybody, own = tuple(range(dist.get_world_size())), (dist.get_rank(),)
    if not engines:
        data = everybody if everyone else ()
    data, tensor = data or own, tensor or own
    is_both = len(data) > 1 and len(tensor) > 1
    ranks = everybody if is_both else max(data, tensor, key=len)
    return Place(ranks, data, tensor, " and ".join(engines) or NO_ENGINE) if ranks[1:] else None


def _beside(mesh: Any, data: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks along those dimensions of a mesh that share no batches out."""
    here = mesh.get_coordinate()
    if here is None:
        return ()
    place: list[Any] = list(here)
    for dimension in range(mesh.ndim):
        ranks = _ranks_of(mesh.get_group(dimension))
        if len(ranks) > 1 and not set(ranks) <= set(data):
            place[dimension] = slice(None)
    return tuple(sorted(mesh.mesh[tuple(place)].reshape(-1).tolist()))


def _flat(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.reshape(-1).tolist()))


def _ranks_of(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


class Leaf(NamedTuple):
    """A parameter or a buffer, once, under the names of the plain model."""

    layer: str  # the first layer that has it
    name: str  # its own name there
    tensor: Tensor  # the tensor; of what FSDP gathered for a while, the shard
    module: nn.Module  # the layer's module

    @property
    def key(self) -> tuple[str, str]:
        """What it is called on every rank."""
        return self.layer, self.name


class Wrapped:
    """A model, and what wraps parts of it."""

    def __init__(self, model: nn.Module) -> None:
        wrappers = find_wrappers(model.modules())
        self.ddps, self.sharded = wrappers.replicated, wrappers.sharded
        self.modules = named_modules(model)
        self.shards = Shards(self.sharded).by_owner
        self.parameters = list(self._leaves("_parameters"))
        self.buffers = list(self._leaves("_buffers"))

    def _leaves(self, kind: str) -> Iterator[Leaf]:
        """Yield each parameter, or each buffer, once."""
        seen = set()
        for layer in self.modules:
            for name, held in getattr(layer.module, kind).items():
                tensor = self.shards.get((layer.module, name), held)
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield Leaf(layer.name, name, tensor, layer.module)


def described(model: nn.Module) -> str:
    """Return a line for each layer, parameter and buffer, equal where the ranks' models are.

    Of torch's own modules it says how they are set up; of others only the class, since what they
    say of themselves may name the rank. Values are not in it.
    """
    wrapped, lines = Wrapped(model), []
    held: dict[nn.Module, list[str]] = {}
    for kind, leaves in (("parameter", wrapped.parameters), ("buffer", wrapped.buffers)):
        for leaf in leaves:
            name, dtype = ".".join(leaf.key).lstrip("."), str(leaf.tensor.dtype)[len("torch.") :]
            line = f"{kind} {name}: {tuple(leaf.tensor.shape)} {dtype}"
            if kind == "parameter":
                line += ", trainable" if leaf.tensor.requires_grad else ", frozen"
            held.setdefault(leaf.module, []).append(line)
    for layer in wrapped.modules:
        module = layer.module
        mode = "in training" if module.training else "in evaluation mode"
        is_torchs = type(module).extra_repr.__module__.startswith("torch.nn.modules.")
        setup = module.extra_repr() if is_torchs else ""
        lines.append(f"{layer.name or 'the model'}: {type_name(module)}({setup}), {mode}")
        lines += held.get(module, ())
    return "\n".join(lines)
