"""What numbers depend on beside model and batch: switches of torch, versions, the machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from pytest_modelhealth import __version__


def versions() -> dict[str, str]:
    """Return what software and which machine this is."""
    import numpy

    return {
        "pytest_modelhealth": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        **({"gpu": torch.cuda.get_device_name()} if _gpu_is_used() else {}),
    }


def _gpu_is_used() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def surroundings() -> dict[str, Any]:
    """Return how torch's switches stand."""
    return {
        "default_dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
        "grad_enabled": torch.is_grad_enabled(),
        "autocast": {
            device: torch.get_autocast_dtype(device)
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        },
    }


@contextmanager
def under(kept: Mapping[str, Any]) -> Iterator[None]:
    """Have torch's switches stand as they did, and put them back."""
    with ExitStack() as stack:
        stack.callback(_switch, surroundings())
        _switch(kept)
        stack.enter_context(torch.set_grad_enabled(kept["grad_enabled"]))
        for device, dtype in kept["autocast"].items():
            if device == "cpu" or torch.cuda.is_available():
                stack.enter_context(torch.autocast(device, dtype))
        yield


def _switch(kept: Mapping[str, Any]) -> None:
    torch.set_default_dtype(kept["default_dtype"])
    torch.set_float32_matmul_precision(kept["matmul_precision"])
    torch.use_deterministic_algorithms(kept["deterministic"], warn_only=kept["warn_only"])
    torch.backends.cudnn.benchmark = kept["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = kept["cudnn_deterministic"]
    if kept["threads"] != torch.get_num_threads():
        torch.set_num_threads(kept["threads"])
