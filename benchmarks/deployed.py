"""What an inspection of a deployed model takes, as a ratio to a bare run of it.

Usage: ``python -m benchmarks.deployed [--rounds 15] [--blocks 10 100 400]``

The model is a row of blocks of a linear layer, a layer norm and a ReLU, of width 256, run on a
batch of 64: exported to ONNX, and frozen by TorchScript. The ratios
are of processor time, medians of turns in one process; ``loaded`` is an inspector that has read
the model already.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import digits, header, load, machine, row, time_in_turns
from pytest_modelhealth import HealthReport, Inspector

WIDTH, SAMPLES = 256, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.fc(x))) + x


def inspect(deployed: object, x: Tensor) -> HealthReport:
    """Return the report of a deployed model that was not read yet."""
    return Inspector(deployed).run_inspection(x)


def kinds(model: nn.Module, x: Tensor) -> Iterator[tuple[str, object, Callable[[], object]]]:
    """Yield each kind: its name, the deployed model, and a bare run of it."""
    import onnxruntime

    proto = torch.onnx.export(model, (x,), dynamo=True, verbose=False).model_proto
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    name = session.get_inputs()[0].name
    yield "ONNX", session, partial(session.run, None, {name: x.numpy()})
    frozen = torch.jit.freeze(torch.jit.script(copy.deepcopy(model)))
    yield "frozen", frozen, partial(frozen, x)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    parser.add_argument("--blocks", type=int, nargs="+", default=[10, 100, 400])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{machine()}; 1 thread, {options.rounds} rounds, {load()}\n")
    print(header(["kind", "blocks", "bare run, ms", "inspection", "loaded", "ms a block, loaded"]))
    for blocks in options.blocks:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(blocks))).eval()
        x = torch.randn(SAMPLES, WIDTH)
        for kind, deployed, bare in kinds(model, x):
            loaded = Inspector(deployed)
            runs = {
                "inspection": partial(inspect, deployed, x),
                "loaded": partial(loaded.run_inspection, x),
            }
            with torch.no_grad():
                found = time_in_turns(bare, runs, options.rounds)
            base = min(base.cpu for _, base in found["loaded"].runs)
            whole = min(own.cpu for own, _ in found["loaded"].runs)
            ratios = [found[name].ratio("cpu") for name in runs]
            each = digits(1e3 * (whole - base) / blocks)
            print(row([kind, str(blocks), digits(1e3 * base), *ratios, each]), flush=True)


if __name__ == "__main__":
    main()
