"""Which functions of autograd the user wrote."""

from __future__ import annotations

_TORCH = frozenset({"torch", "functorch"})


def is_own(function: type | None) -> bool:
    """Whether a class of `torch.autograd.Function` is none of torch's own; ``None`` is no class."""
    return function is not None and function.__module__.partition(".")[0] not in _TORCH
