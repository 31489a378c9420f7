"""What is asked of a run, as far as it must be the same on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from pytest_modelhealth.capture import Request


def asked_of(request: Request, **more: Any) -> str:
    """Return it as a line; what the user gave for himself may be another thing on each rank."""
    asked = {
        "loss": _kind(request.loss),
        "backward": _kind(request.backward),
        "scaler": _kind(request.scaler),
        "gradients": str(torch.is_grad_enabled()),
        **more,
    }
    return ", ".join(f"{name}={value}" for name, value in asked.items())


def _kind(value: Any) -> str:
    return str(value) if isinstance(value, bool | None) else "given"
