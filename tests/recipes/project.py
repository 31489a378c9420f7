"""A small repository with a model, a test of it and a change of it that loses a residual."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FILES = {
    "pyproject.toml": """
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"

        [project]
        name = "digits"
        version = "1.0"

        [tool.pytest.ini_options]
        pythonpath = ["."]
    """,
    "digits.py": """
        import torch
        from torch import nn


        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(32)
                self.linear = nn.Linear(32, 32)

            def forward(self, x):
                return x + torch.relu(self.linear(self.norm(x)))


        class Digits(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem = nn.Linear(20, 32)
                self.blocks = nn.Sequential(*(Block() for _ in range(3)))
                self.head = nn.Linear(32, 10)

            def forward(self, x):
                return self.head(self.blocks(self.stem(x)))
    """,
    "tests/test_model_health.py": """
        import pytest
        import torch
        from digits import Digits


        @pytest.fixture
        def batch():
            torch.manual_seed(0)
            return torch.randn(64, 20), torch.randint(10, (64,))


        def test_digits(inspector, batch):
            inspector(Digits()).run_inspection(*batch, loss=torch.nn.functional.cross_entropy)
    """,
}
RESIDUAL = "return x + torch.relu("
"""What the change of the branch takes the ``x +`` from."""

NAN = ("return self.head(", "return self.head(float('nan') * ")
"""What a second change does: the model is unhealthy."""


def git(root: Path, *arguments: str) -> str:
    """Run git in `root`, apart from the settings of whoever runs the tests."""
    settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *who, *arguments],
        cwd=root,
        env=os.environ | settings,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
