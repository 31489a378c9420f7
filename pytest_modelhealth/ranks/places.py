"""Who inspects a model together: read off what distributes it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.ranks.company import Place

NO_ENGINE = "a process group"
"""What stands for the engine of ranks that share batches out by hand."""


def place_of(model: nn.Module, everyone: bool) -> tuple[tuple[int, ...], Place] | None:
    """Return who takes part and where this rank stands; ``None`` where it is alone.

    Args:
        model: the model.
        everyone: whether all ranks are to see their share of the batches of a model that nothing
            distributes.
    """
    engines: dict[str, None] = {}
    data: tuple[int, ...] = ()
    for engine, ranks in _wrappers(model):
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


def _wrappers(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield what shares batches out: its name and its ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            yield "DDP", _ranks_of(module.process_group)
        elif fsdp is not None and isinstance(module, fsdp.FSDPModule):
            for mesh in _fsdp_meshes(module):
                yield ("HSDP" if mesh.ndim > 1 else "FSDP2"), _flat(mesh)
        elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            yield "FSDP1", _ranks_of(module.process_group)


def _fsdp_meshes(module: Any) -> Iterator[Any]:
    for group in module._get_fsdp_state()._fsdp_param_groups:
        yield group.mesh_info.mesh


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
