"""What must hold of the package as users get it: scripts/release and cibuildwheel run this.

Outside of the checkout, which would hide what is installed; hence no test of the suite.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import pytest_modelhealth
from pytest_modelhealth import Inspector, ModelHealthError
from pytest_modelhealth.statistics import native


def make_model(bias: float) -> torch.nn.Module:
    """Return a small model whose ReLU is dead where `bias` is far below zero."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    torch.nn.init.constant_(model[0].bias, bias)
    return model


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 32 samples and the class of each."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(32, 8, generator=generator)
    return samples, torch.randint(3, (32,), generator=generator)


def test_the_package_is_the_installed_one() -> None:
    """What is tested does not come from a checkout."""
    assert "site-packages" in Path(pytest_modelhealth.__file__).parts


def test_the_kernel_is_compiled_for_this_system() -> None:
    """The wheel brings the compiled kernel, and it loads."""
    assert native.library() is not None


def test_a_healthy_model_passes(inspector: Callable[..., Inspector]) -> None:
    """The plugin is found by pytest, and of a healthy model nothing is said."""
    samples, classes = make_batch()
    report = inspector(make_model(bias=0.0)).run_inspection(samples, classes, loss=cross_entropy)
    report.assert_healthy()


def test_a_dead_layer_is_named() -> None:
    """The error names the layer of a broken model."""
    samples, classes = make_batch()
    report = Inspector(make_model(bias=-20.0)).run_inspection(samples, classes, loss=cross_entropy)
    with pytest.raises(ModelHealthError, match="dead"):
        report.assert_healthy()
