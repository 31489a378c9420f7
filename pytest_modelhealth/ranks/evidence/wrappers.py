"""What of a model is kept equal over ranks, and by whom: DDP, FSDP2, a device mesh, or nobody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pytest_modelhealth.layers import named_modules


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
        for module in self.sharded:
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    for owner, name in _owners(parameter._module_info):
                        self._shards[owner, name] = parameter.sharded_param

    @cached_property
    def ddps(self) -> list[DistributedDataParallel]:
        """Each DDP in it."""
        return [m for m in self.model.modules() if isinstance(m, DistributedDataParallel)]

    @cached_property
    def sharded(self) -> list[Any]:
        """Each module that `fully_shard` was given."""
        return [m for m in self.model.modules() if hasattr(m, "_get_fsdp_state")]

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
