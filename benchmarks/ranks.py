"""Cost of an inspection on several ranks, as a ratio to a local one, and the bytes of a rank.

``python -m benchmarks.ranks``. Ranks are processes of this machine, with gloo: the ratio of what
a joint report takes beside a local one is an upper bound, since ranks share the cores. A model of
10,000 layers on 1,024 ranks is worked out from the bytes that were measured.
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
from pytest_modelhealth.ranks import joint
from tests.ranks.launching import on_ranks

ROUNDS = 9
LAYERS, RANKS = 10_000, 1_024


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
    """Return seconds and bytes of this rank."""
    x = torch.randn(8, 16, width)
    wrapped = DistributedDataParallel(model(blocks, width))
    step = median(lambda: square(wrapped(x)).backward())
    wrapped.zero_grad(set_to_none=True)
    local = median(lambda: Inspector(wrapped, ranks=False).run_inspection(x, loss=square))
    together = median(lambda: Inspector(wrapped).run_inspection(x, loss=square))
    company = joint.company_of(wrapped, False, 60.0)
    assert company is not None
    parameters = sum(p.nbytes for p in wrapped.parameters())
    before = company.sent
    report = Inspector(wrapped).run_inspection(x, loss=square)
    sent = company.sent - before - parameters
    records = report.observation.layers.values()
    roles = ("inputs", "activations", "gradients", "parameters", "parameter_gradients", "buffers")
    units = sum(
        0 if seen.units is None else len(seen.units.alive)
        for record in records
        for role in roles
        for seen in record.tensors(role).values()
    )
    tensors = sum(len(record.tensors(role)) for record in records for role in roles)
    return {
        "layers": len(records),
        "tensors": tensors,
        "units": units,
        "step": step,
        "local": local,
        "joint": together,
        "bytes": sent,
        "gradients": parameters,
    }


def main() -> None:
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, one thread a rank\n")
    print(
        "| ranks | layers | width | bare step | local inspection | joint | ratio | bytes a tensor |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    found = []
    for size in (2, 4):
        for blocks, width in ((4, 64), (40, 64), (20, 256)):
            seen = on_ranks(size, measured, blocks, width, seconds=300)[0]
            found.append(seen)
            print(
                f"| {size} | {seen['layers']} | {width} | {1e3 * seen['step']:.1f} ms "
                f"| {1e3 * seen['local']:.1f} ms | {1e3 * seen['joint']:.1f} ms "
                f"| {seen['joint'] / seen['local']:.2f} "
                f"| {seen['bytes'] / seen['tensors']:.0f} |"
            )
    print(worked_out(found[-2], found[-1]))


def worked_out(narrow: dict[str, float], wide: dict[str, float]) -> str:
    """Return what a large model would send, of what two sizes show of a tensor and a unit."""
    rows = [(seen["tensors"], seen["units"], seen["bytes"]) for seen in (narrow, wide)]
    (t0, u0, b0), (t1, u1, b1) = rows
    a_unit = (b1 - b0 * t1 / t0) / (u1 - u0 * t1 / t0)
    a_tensor = (b0 - a_unit * u0) / t0
    per_layer = wide["tensors"] / wide["layers"]
    whole = LAYERS * per_layer * a_tensor
    units = a_unit * 4096 * LAYERS * wide["units"] / wide["layers"] / 256
    return (
        f"\n{a_tensor:.0f} bytes a tensor and {a_unit:.1f} a unit; {LAYERS:,} layers of "
        f"{per_layer:.1f} tensors: {whole / 1e6:.0f} MB a rank, with units of a width of 4,096 "
        f"{(whole + units) / 1e6:.0f} MB, whatever the number of ranks; {RANKS:,} slips of some "
        f"hundred bytes are {RANKS * 500 / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
