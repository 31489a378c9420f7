"""CUDA graphs: while one is captured nothing may be read, which would end the capture."""

from __future__ import annotations

import torch

WHY_NOT_SEEN = (
    "a CUDA graph was captured in this step: what ran meanwhile was not looked at, as reading a "
    "tensor ends a capture"
)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream; it does not start CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
