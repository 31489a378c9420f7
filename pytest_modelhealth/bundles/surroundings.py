"""What numbers depend on beside model and batch: switches of torch, versions, the machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from pytest_modelhealth import __version__
from pytest_modelhealth.bundles.content import Autocast, Surroundings
from pytest_modelhealth.bundles.nest import dtype_name, dtype_of
from pytest_modelhealth.errors import InspectionError

_DEVICES = ("cpu", "cuda")


def versions() -> dict[str, str]:
    """Return what software and which machine this is."""
    import numpy

    return {
        "pytest_modelhealth": __version__,
        "torch": torch.__version__,
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


def surroundings() -> Surroundings:
    """Return how torch's switches stand."""
    return Surroundings(
        default_dtype=dtype_name(torch.get_default_dtype()),
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        matmul_precision=torch.get_float32_matmul_precision(),
        cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
        cudnn_deterministic=bool(torch.backends.cudnn.deterministic),
        grad_enabled=torch.is_grad_enabled(),
        autocast=tuple(
            Autocast(d, torch.is_autocast_enabled(d), dtype_name(torch.get_autocast_dtype(d)))
            for d in _DEVICES
        ),
    )


@contextmanager
def under(kept: Surroundings) -> Iterator[None]:
    """Have torch's switches stand as they did, and put them back.

    Raises:
        InspectionError: a value is none of its switch.
    """
    before = surroundings()
    with ExitStack() as stack:
        stack.callback(_switch, before)
        try:
            _switch(kept)
            stack.enter_context(torch.set_grad_enabled(kept.grad_enabled))
            for cast in kept.autocast:
                if cast.enabled and _is_here(cast.device):
                    stack.enter_context(torch.autocast(cast.device, dtype_of(cast.dtype)))
        except (RuntimeError, TypeError, ValueError) as error:
            raise InspectionError(f"the bundle is damaged: its surroundings: {error}") from None
        yield


def _is_here(device: str) -> bool:
    return device == "cpu" or (device in _DEVICES and torch.cuda.is_available())


def _switch(kept: Surroundings) -> None:
    for set_it, value in _switches(kept):
        set_it(value)
    if kept.threads != torch.get_num_threads():
        torch.set_num_threads(min(max(kept.threads, 1), _MOST_THREADS))


_MOST_THREADS = 1024


def _switches(kept: Surroundings) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    yield torch.set_default_dtype, dtype_of(kept.default_dtype)
    if kept.matmul_precision not in ("highest", "high", "medium"):
        raise ValueError(f"no precision of matrix products: {kept.matmul_precision!r:.60}")
    yield torch.set_float32_matmul_precision, kept.matmul_precision
    yield _set_deterministic, (kept.deterministic, kept.warn_only)
    cudnn = torch.backends.cudnn
    yield (lambda value: setattr(cudnn, "benchmark", value)), kept.cudnn_benchmark
    yield (lambda value: setattr(cudnn, "deterministic", value)), kept.cudnn_deterministic


def _set_deterministic(modes: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])
