"""The process group that a test on several ranks finds."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from pytest_modelhealth.errors import InspectionError


def join(request: dict[str, Any]) -> None:
    """Make the default process group of a rank's process.

    Raises:
        InspectionError: this build of torch has no gloo, or another rank does not come.
    """
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    require_gloo()
    rank, size, seconds = request["rank"], request["size"], request["seconds"]
    store = FileStore(str(Path(request["folder"]) / "store"), size)
    limit = timedelta(seconds=seconds + 60)  # the parent's comes before it
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    except dist.DistError as error:
        raise InspectionError(f"rank {rank} of {size} found no process group: {error}") from error


def require_gloo() -> None:
    """Do nothing where torch can connect processes on the CPU.

    Raises:
        InspectionError: it cannot.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise InspectionError(
            "tests on several ranks need torch.distributed with gloo, which this build of torch "
            "does not have: install a build that has it, or skip the test with "
            "pytest.mark.skipif(not torch.distributed.is_available(), reason=...)"
        )
