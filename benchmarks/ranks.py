"""Cost of an inspection on several ranks, as a ratio to a local one.

``python -m benchmarks.ranks``. Ranks are processes of this machine, with gloo: the ratio of what
a joint report takes beside a local one is an upper bound, since ranks share the cores.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pytest_modelhealth import Inspector
from tests.ranks.launching import on_ranks

ROUNDS = 9


class Block(nn.Module):
    """A block of a transformer without attention: seven layers, four of them with units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


def model(blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def median(run: Callable[[], Any]) -> float:
    times = []
    for number in range(ROUNDS + 2):
        dist.barrier()
        begun = time.perf_counter()
        run()
        if number > 1:
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def measured(blocks: int, width: int) -> dict[str, float]:
    """Return seconds of this rank, and how many layers there are."""
    x = torch.randn(8, 16, width)
    wrapped = DistributedDataParallel(model(blocks, width))
    step = median(lambda: square(wrapped(x)).backward())
    wrapped.zero_grad(set_to_none=True)
    local = median(lambda: Inspector(wrapped, ranks=False).run_inspection(x, loss=square))
    together = median(lambda: Inspector(wrapped).run_inspection(x, loss=square))
    report = Inspector(wrapped).run_inspection(x, loss=square)
    layers = len(report.observation.layers)
    return {"layers": layers, "step": step, "local": local, "joint": together}


def main() -> None:
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, one thread a rank\n")
    print("| ranks | layers | width | bare step | local inspection | joint | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in (2, 4):
        for blocks, width in ((4, 64), (40, 64), (20, 256)):
            seen = on_ranks(size, measured, blocks, width, seconds=300)[0]
            print(
                f"| {size} | {seen['layers']} | {width} | {1e3 * seen['step']:.1f} ms "
                f"| {1e3 * seen['local']:.1f} ms | {1e3 * seen['joint']:.1f} ms "
                f"| {seen['joint'] / seen['local']:.2f} |"
            )


if __name__ == "__main__":
    main()
