"""How a model lies over ranks: who shares its batches and tensors out, and what keeps it equal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pytest_modelhealth.capture.parallel.wrappers import find_wrappers
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules, type_name

NO_ENGINE = "a process group"
"""What stands for the engine of ranks that share batches out by hand."""


@dataclass(frozen=True)
class Place:
    """Where this rank stands among the ranks of a model.

    Args:
        data: the ranks that hold the same part of the model and see other samples, in order.
        tensor: the ranks that see the same samples and hold other parts of its tensors, in order.
        engine: what distributes the model, for people.
    """

    data: tuple[int, ...]
    tensor: tuple[int, ...]
    engine: str = ""


def place_of(model: nn.Module, everyone: bool) -> tuple[tuple[int, ...], Place] | None:
    """Return who takes part and where this rank stands; ``None`` where it is alone.

    Args:
        model: the model.
        everyone: whether all ranks are to see their share of the batches of a model that nothing
            distributes.
    """
    engines: dict[str, None] = {}
    data: tuple[int, ...] = ()
    for engine, ranks in _sharing(model):
        engines[engine] = None
        data = max(data, ranks, key=len)
    meshes = list(_meshes(model))
    tensor: tuple[int, ...] = ()
    for mesh in meshes:
        tensor = max(tensor, _beside(mesh, data), key=len)
    if len(tensor) > 1:
        engines["tensor parallel"] = None
    if not (data or len(tensor) > 1):
        if not everyone:
            return None
        data = tuple(range(dist.get_world_size()))
    own = (dist.get_rank(),)
    place = Place(data or own, tensor or own, " and ".join(engines) or NO_ENGINE)
    ranks = _all_of(place, meshes)
    return (ranks, place) if len(ranks) > 1 else None


def _sharing(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield what shares batches out: its name and its ranks."""
    wrappers = find_wrappers(model.modules())
    for ddp in wrappers.replicated:
        yield "DDP", _ranks_of(ddp.process_group)
    for module in wrappers.sharded:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            mesh = group.mesh_info.mesh
            yield ("HSDP" if mesh.ndim > 1 else "FSDP2"), _flat(mesh)
    for module in wrappers.flat:
        yield "FSDP1", _ranks_of(module.process_group)


def _meshes(model: nn.Module) -> Iterator[Any]:
    """Yield each mesh that a parameter or buffer lies on."""
    found = sys.modules.get("torch.distributed.tensor")
    if found is None:
        return
    seen = []
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, found.DTensor) and tensor.device_mesh not in seen:
            seen.append(tensor.device_mesh)
            yield tensor.device_mesh


def _beside(mesh: Any, data: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks along those dimensions of a mesh that share no batches out."""
    here = mesh.get_coordinate()
    if here is None:
        return ()
    shares = set(data)
    place: list[Any] = list(here)
    for dimension in range(mesh.ndim):
        ranks = _ranks_of(mesh.get_group(dimension))
        if len(ranks) > 1 and not set(ranks) <= shares:
            place[dimension] = slice(None)
    return tuple(sorted(mesh.mesh[tuple(place)].reshape(-1).tolist()))


def _all_of(place: Place, meshes: list[Any]) -> tuple[int, ...]:
    """Return the ranks of all groups that hang together."""
    if len(place.data) == 1 or len(place.tensor) == 1:
        return max(place.data, place.tensor, key=len)
    size = len(place.data) * len(place.tensor)
    for mesh in meshes:
        if mesh.size() == size:
            return _flat(mesh)
    return tuple(range(dist.get_world_size()))


def _flat(mesh: Any) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.reshape(-1).tolist()))


def _ranks_of(group: Any) -> tuple[int, ...]:
    """Return the ranks of a group, in order.

    Raises:
        InspectionError: it was destroyed.
    """
    try:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    except (KeyError, ValueError, RuntimeError) as error:
        raise InspectionError(
            "the process group that the model was distributed with was destroyed: wrap the model "
            "anew with the group that there is, or inspect it before destroy_process_group()"
        ) from error


class Leaf(NamedTuple):
    """A parameter or a buffer, once, under the names of the plain model.

    Args:
        layer: the first layer that has it.
        name: its own name there.
        tensor: the tensor; of what FSDP gathered for a while, the shard.
        module: the layer's module.
    """

    layer: str
    name: str
    tensor: Tensor
    module: nn.Module

    def __str__(self) -> str:
        return f"{self.layer}.{self.name}".lstrip(".")


@dataclass
class Wrapped:
    """A model, and what wraps parts of it."""

    model: nn.Module
    _shards: dict[tuple[nn.Module, str], Tensor] = field(default_factory=dict)
    _keepers: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrappers = find_wrappers(self.model.modules())
        self.ddps, self.sharded = wrappers.replicated, wrappers.sharded
        for module in self.sharded:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    for owner, name in _owners(parameter._module_info):
                        self._shards[owner, name] = parameter.sharded_param

    @cached_property
    def names(self) -> dict[nn.Module, str]:
        """The layers' names by module, those of the plain model."""
        return {named.module: named.name for named in named_modules(self.model)}

    @cached_property
    def parameters(self) -> list[Leaf]:
        """Each parameter once."""
        return list(self._leaves("_parameters"))

    @cached_property
    def buffers(self) -> list[Leaf]:
        """Each buffer once."""
        return list(self._leaves("_buffers"))

    def _leaves(self, kind: str) -> Iterator[Leaf]:
        seen = set()
        for module, layer in self.names.items():
            for name, held in getattr(module, kind).items():
                tensor = self._shards.get((module, name), held)
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield Leaf(layer, name, tensor, module)

    @cached_property
    def ignored(self) -> set[int]:
        """Identities of the parameters and buffers that DDP was told to leave to each rank."""
        found = set()
        for ddp in self.ddps:
            held = dict([*ddp.module.named_parameters(), *ddp.module.named_buffers()])
            found |= {id(held[name]) for name in ddp.parameters_to_ignore if name in held}
        return found

    def keepers(self, ddp: DistributedDataParallel) -> set[int]:
        """Return identities of the parameters that this DDP was made with."""
        found = self._keepers.get(id(ddp))
        if found is None:
            found = self._keepers[id(ddp)] = {id(one) for one in ddp._module_parameters}
        return found

    def is_sharded(self, leaf: Leaf) -> bool:
        """Whether FSDP2 has it."""
        return (leaf.module, leaf.name) in self._shards

    def ranks_of(self, leaf: Leaf) -> tuple[int, ...] | None:
        """Return the ranks over which a DDP keeps it equal; ``None`` where none does."""
        for ddp in self.ddps:
            if id(leaf.tensor) in self.keepers(ddp):
                return tuple(dist.get_process_group_ranks(ddp.process_group))
        return None


def _owners(info: Any) -> Iterator[tuple[nn.Module, str]]:
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def reducer_count(ddp: DistributedDataParallel) -> int:
    """Return of how many parameters this DDP averages the gradients."""
    return int(ddp._get_ddp_logging_data().get("num_parameter_tensors", 0))


def described(model: nn.Module) -> str:
    """Return a line for each layer, parameter and buffer, equal where the ranks' models are.

    Of torch's own modules it says how they are set up; of others only the class, since what they
    say of themselves may name the rank. Values are not in it.
    """
    return "\n".join(_lines(model))


def _lines(model: nn.Module) -> Iterator[str]:
    wrapped = Wrapped(model)
    held: dict[nn.Module, list[str]] = {}
    for leaf in wrapped.parameters:
        learns = "trainable" if leaf.tensor.requires_grad else "frozen"
        held.setdefault(leaf.module, []).append(f"parameter {leaf}: {_said(leaf.tensor)}, {learns}")
    for leaf in wrapped.buffers:
        held.setdefault(leaf.module, []).append(f"buffer {leaf}: {_said(leaf.tensor)}")
    for named in named_modules(model):
        module = named.module
        mode = "in training" if module.training else "in evaluation mode"
        told = module.extra_repr() if _is_torchs(module) else ""
        yield f"{named.name or 'the model'}: {type_name(module)}({told}), {mode}"
        yield from held.get(module, ())


def _is_torchs(module: nn.Module) -> bool:
    """Whether it is torch that says how a module is set up."""
    return type(module).extra_repr.__module__.startswith("torch.nn.modules.")


def _said(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
