"""The engine without pytest, as in a script or a notebook: ``python -m examples.script``."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from examples.data import read_digits
from examples.models.mlp import MLP
from pytest_modelhealth import Inspector


def main(picture: str = "histogram.png") -> None:
    """Inspect a fresh `MLP`, print what was seen and save a histogram to `picture`."""
    torch.manual_seed(0)
    digits = read_digits()

    inspector = Inspector(MLP()).watch("fc*", what=("activations", "gradients"))
    report = inspector.run_inspection(
        digits.train_images[:256], target=digits.train_labels[:256], loss=F.cross_entropy
    )

    print(report)
    fc1 = inspector.get_statistics("fc1")
    print(f"fc1: mean {fc1.mean:.3f}, standard deviation {fc1.std:.3f}")
    inspector.plot_histogram("fc1").savefig(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
