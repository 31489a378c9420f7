"""What is differentiated: the user's loss, the model's own, or a fixed random projection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import find_tensors, is_a
from pytest_modelhealth.errors import InspectionError

_PROJECTION_SEED = 20_240_229


def compute_loss(output: Any, target: Any, loss: Callable[..., Any] | None) -> Tensor | None:
    """Return the scalar to differentiate, or ``None`` where the output has no number to project.

    Raises:
        InspectionError: the loss cannot be called, is not a scalar tensor, has no graph although
            the output has one, or a target stands without a loss.
    """
    if loss is None:
        if target is not None:
            raise InspectionError(
                "a target was given without a loss: pass loss=..., for example "
                "loss=torch.nn.functional.cross_entropy"
            )
        return _own_loss(output)
    _refuse_class(loss)
    if not callable(loss):
        raise InspectionError(
            f"loss is {loss!r} and cannot be called: give a function loss(output, target), for "
            "example torch.nn.functional.cross_entropy"
        )
    value = loss(output) if target is None else loss(output, target)
    validate_loss(value, output)
    return value.reshape(()) if value.ndim else value  # type: ignore[no-any-return]


def no_loss(output: Any) -> Tensor:
    """A loss that asks nothing of the output."""
    return torch.zeros((), requires_grad=torch.is_grad_enabled())


def _refuse_class(loss: object) -> None:
    """Do nothing unless `loss` is a class, which makes a module where a number is asked for."""
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        name = loss.__name__
        raise InspectionError(f"loss is the class {name}: give an instance, {name}()")


def validate_loss(value: object, output: Any, what: str = "the loss") -> None:
    """Do nothing if `value` is a real scalar tensor, with a graph where the output has one.

    Raises:
        InspectionError: it is not; the message calls it `what`.
    """
    if not is_a(value, Tensor):
        raise InspectionError(
            f"{what} returned {type(value).__name__}, not a tensor: return the tensor itself, "
            "without .item() or float()"
        )
    if value.numel() != 1:
        raise InspectionError(
            f"{what} has shape {tuple(value.shape)}, not a scalar: reduce it, for example with "
            ".mean()"
        )
    if value.is_complex():
        raise InspectionError(
            f"{what} is complex: return a real one, for example its .abs() or .real"
        )
    if (
        not value.requires_grad
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in find_tensors(output))
    ):
        raise InspectionError(
            f"{what} has no graph although the model's output has one: it was computed from a "
            "detached copy (.detach(), .data, .numpy(), .argmax() or torch.no_grad())"
        )


def _own_loss(output: Any) -> Tensor | None:
    for candidate in (_attribute_loss(output), output):
        if is_a(candidate, Tensor) and candidate.numel() == 1 and _is_real(candidate):
            return candidate.reshape(()) if candidate.ndim else candidate
    return _random_projection(output)


def _attribute_loss(output: Any) -> Any:
    is_mapping = issubclass(type(output), Mapping)
    try:
        return output.get("loss") if is_mapping else getattr(output, "loss", None)
    except Exception:  # noqa: BLE001 - the user's own, and it was we who asked for a loss
        return None


def _random_projection(output: Any) -> Tensor | None:
    """Return the floating outputs times fixed random weights, summed.

    A plain sum has no gradient through softmax and LayerNorm, whose outputs sum to a constant. The
    weights make the gradient with respect to each output tensor about 1 in L2 norm, whatever its
    size, so that gradient norms mean the same on every model.
    """
    generator = torch.Generator().manual_seed(_PROJECTION_SEED)
    terms = []
    for tensor in find_tensors(output):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if not (_is_real(tensor) and tensor.numel()):
            continue
        if tensor.is_nested:
            tensor = tensor.values()
        weights = torch.randn(tensor.shape, generator=generator, device="cpu", dtype=torch.float32)
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        weights = (weights / math.sqrt(tensor.numel())).to(tensor.device, dtype)
        terms.append((tensor.to(dtype) * weights).sum())
    if not terms:
        return None
    device = terms[0].device
    return torch.stack([term.to(device, torch.float32) for term in terms]).sum()


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_meta
