"""Peak memory of an inspected step, as a ratio to the bare step.

Usage: ``python -m benchmarks.memory [--threads 1] [--repeats 5] [NAME ...]``

Each run is a process of its own, since a peak cannot be taken back. It warms up on a small batch,
so that code loaded on the first call counts for neither. What is reported:

- ``peak``: the kernel's VmHWM, all of the process with Python and torch in it. It is reset after
  the warm-up where the kernel allows that; ``ru_maxrss`` stands in elsewhere.
- ``step``: the same less what was resident before the step, which is the stricter figure.

A ratio is the median over repeats of inspected / bare, its spread the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Freed blocks go back to the kernel at once, so that the peak is that of live memory and not of
# the order in which an allocator got its pieces.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
MEGABYTE = 1024.0  # of kibibytes, which the kernel counts in
KINDS = ("bare", "inspected")


def _linears(rows: int) -> tuple[object, object, Callable[..., object]]:
    """32 linear layers on rows x 4096 features: one activation of 2048 rows takes 32 MiB."""
    import torch
    from torch import nn

    # narrow in between: the memory is in the activations, not in the parameters
    pairs = (nn.Sequential(nn.Linear(4096, 64), nn.Linear(64, 4096)) for _ in range(32))
    return nn.Sequential(*pairs), torch.randn(rows, 4096), lambda output: output.square().mean()


def _cnn(images: int) -> tuple[object, object, Callable[..., object]]:
    """16 convolutions of 32 channels with batch normalisation and ReLU, images of 96 x 96."""
    import torch
    from torch import nn

    def block(inputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True)]

    layers = [layer for i in range(16) for layer in block(32 if i else 3)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
    return model, torch.randn(images, 3, 96, 96), lambda output: output.square().mean()


def _bert(texts: int) -> tuple[object, object, Callable[..., object]]:
    """A BERT of 6 layers and 384 features, texts of 128 tokens."""
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=8000,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
    )
    ids = torch.randint(0, 8000, (texts, 128))
    return BertModel(config), {"input_ids": ids}, lambda out: out[0].square().mean()


MODELS = {"linears": (_linears, 2048), "CNN": (_cnn, 32), "BERT-like": (_bert, 32)}


def _kernel(field: str) -> float | None:
    """Return a line of /proc/self/status in kibibytes, or ``None`` where there is none."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return float(next(line for line in lines if line.startswith(field)).split()[1])
    return None


def _peak() -> float:
    kernel = _kernel("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if kernel is None else kernel


def run_once(name: str, kind: str, threads: int) -> dict[str, float]:
    """Run one step in this process and return its peak, and what was resident before, in MiB."""
    import torch

    from pytest_modelhealth import Inspector

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    build, size = MODELS[name]

    def step(batch_size: int) -> None:
        _, batch, loss = build(batch_size)
        if kind == "inspected":
            Inspector(model).run_inspection(batch, loss=loss)
        else:
            loss(model(**batch) if isinstance(batch, dict) else model(batch)).backward()
            model.zero_grad()

    model, _, _ = build(2)
    step(2)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    before = _kernel("VmRSS") or 0.0
    step(size)
    return {"peak": _peak() / MEGABYTE, "step": (_peak() - before) / MEGABYTE}


def run_apart(name: str, kind: str, threads: int) -> dict[str, float]:
    """Do `run_once` in a fresh process."""
    arguments = ["--once", name, "--kind", kind, "--threads", str(threads)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", *arguments],
        env=os.environ | ALLOCATOR | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _ratio(inspected: list[float], bare: list[float]) -> str:
    ratios = [a / b for a, b in zip(inspected, bare, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*MODELS, []], help="models; default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--once", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(run_once(options.once, options.kind, options.threads)))
        return

    import torch

    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {options.threads} threads, {options.repeats} repeats; MiB\n"
    )
    print("| model | bare peak | of that the step | inspected: peak | step |")
    print("| --- | --- | --- | --- | --- |")
    for name in options.names or MODELS:
        runs = [
            # alternating, so that a change of the machine hits both kinds
            [run_apart(name, kind, options.threads) for kind in KINDS]
            for _ in range(options.repeats)
        ]
        bare, inspected = (
            {figure: [run[figure] for run in of_kind] for figure in ("peak", "step")}
            for of_kind in zip(*runs, strict=True)
        )
        medians = [f"{statistics.median(bare[figure]):.0f}" for figure in ("peak", "step")]
        ratios = [_ratio(inspected[figure], bare[figure]) for figure in ("peak", "step")]
        print("| " + " | ".join([name, *medians, *ratios]) + " |", flush=True)


if __name__ == "__main__":
    main()
