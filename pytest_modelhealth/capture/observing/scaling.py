"""Gradients of a loss that a gradient scaler multiplied, seen as those of the loss itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.errors import InspectionError


@dataclass(frozen=True)
class LossScale:
    """What the loss is multiplied by before the backward pass, so that fp16 holds its gradients."""

    factor: float = 1.0

    @classmethod
    def of(cls, scaler: Any) -> LossScale:
        """Return the scale that a `torch.amp.GradScaler` has now; asking does not change it.

        Raises:
            InspectionError: `scaler` is no scaler.
        """
        if scaler is None:
            return NO_SCALE
        if not hasattr(scaler, "get_scale"):
            raise InspectionError(
                f"scaler={scaler!r} has no get_scale(): pass the torch.amp.GradScaler itself"
            )
        return cls(float(scaler.get_scale()))

    def apply(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, as `GradScaler.scale` does: in float32 where the loss is fp16."""
        if self.factor == 1.0:
            return loss
        return loss * torch.full((), self.factor, dtype=torch.float32, device=loss.device)

    def unscale(self, gradient: Tensor) -> Tensor:
        """Return `gradient` without the scale, in float32 where fp16 would underflow."""
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        return gradient.detach().to(dtype) / self.factor


NO_SCALE = LossScale()
