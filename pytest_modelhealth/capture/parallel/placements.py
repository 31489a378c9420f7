"""How a tensor lies on the ranks of a device mesh: of a `DTensor`, or what was taken from one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.report.parts import Placement


def placement_of(tensor: Tensor) -> Placement | None:
    """Return the placement of `tensor`, ``None`` where nothing tells.

    A plain tensor that `DTensor.to_local` returned has it in the node of autograd that made it.
    """
    spec = getattr(tensor, "_spec", None)
    if spec is None:
        node: Any = tensor.grad_fn
        if node is None or node.name() != "_ToTorchTensorBackward":
            return None
        spec = node.dtensor_spec
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return Placement(
        shape=tuple(map(int, spec.shape)),
        offset=tuple(map(int, offset)),
        is_cut=not all(one.is_partial() or one.is_replicate() for one in spec.placements),
    )


def summed(gradient: Tensor) -> Tensor:
    """Return a gradient as the optimizer makes it: parts of a sum on several ranks added up.

    That takes a collective, which all ranks begin after a backward pass that succeeded.
    """
    distributed: Any = gradient
    spec = getattr(gradient, "_spec", None)
    if spec is None or not any(one.is_partial() for one in spec.placements):
        return gradient
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if one.is_partial() else one for one in spec.placements]
    result: Tensor = distributed.redistribute(placements=whole)
    return result


def gathered(gradients: list[Held]) -> list[Held]:
    """Return gradients with those whole of which each rank has a part: a collective for each."""
    spread: list[tuple[Any, str, Any]] = [*gradients]
    return [
        (layer, name, g.full_tensor() if hasattr(g, "_spec") else g) for layer, name, g in spread
    ]
