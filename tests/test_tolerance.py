"""The natural noise of a model is measured on copies, and is what rounding explains."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.capture import Request
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.snapshot.snapshot import of_report
from pytest_modelhealth.tolerance import (
    BFLOAT16,
    TF32,
    Calibration,
    coarsest_epsilon,
    epsilon_of,
    perturbed,
    product_epsilon,
)

EPSILON = 2.0**-23


def model() -> nn.Module:
    """Return a small classifier."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 3))


def test_a_perturbed_copy_is_off_by_at_most_an_epsilon():
    """Each parameter moves by one rounding at most, most of them do, and the model stays."""
    original = model()
    before = copy.deepcopy(original.state_dict())
    found = perturbed(Request(original, torch.ones(4, 8)), EPSILON, seed=0).model
    moved = 0
    for ours, theirs in zip(original.parameters(), found.parameters(), strict=True):
        relative = ((theirs - ours).double() / ours.double()).abs().nan_to_num()
        assert relative.max() <= 1.5 * EPSILON  # u and the rounding of the product
        moved += int((relative > 0).sum())
    assert moved > 200
    for name, value in original.state_dict().items():
        assert torch.equal(value, before[name])


def test_perturbations_differ_by_seed_and_repeat_for_one():
    """A seed gives one perturbation, of parameters and of the batch; whole numbers stay."""
    batch = {"x": torch.randn(4, 8), "ids": torch.arange(3)}
    asked = Request(model(), batch)
    first, again, other = (perturbed(asked, EPSILON, seed).inputs for seed in (0, 0, 1))
    assert torch.equal(first["x"], again["x"])
    assert not torch.equal(first["x"], other["x"])
    assert torch.equal(first["ids"], batch["ids"])


def test_the_noise_of_a_statistic_is_its_largest_deviation():
    """The maximum over the perturbed runs of the distance, by hand."""
    scales = (1.0, 1.1, 1.3, 1.2)
    reports = [Inspector(model()).run_inspection(torch.ones(4, 8) * s) for s in scales]
    base, *others = [report.observation for report in reports]
    runs, calibration = iter(others), Calibration()
    calibration.add(Request(model(), torch.ones(4, 8)), base, lambda request: next(runs))
    found = calibration.noise(base)["0", "activations", ""]
    values = [seen.layers["0"].activations.mean for seen in (base, *others)]
    assert found["mean"] == max(abs(value - values[0]) for value in values[1:])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, 2**-23),
        ("bfloat16", 2**-7),
        ("complex64", 2**-23),
        (torch.int64, 0.0),
        ("qint8", 2**-7),
        ("no dtype", 0.0),
    ],
)
def test_the_epsilon_of_a_dtype(dtype, expected):
    """The machine epsilon of torch; none for whole numbers."""
    assert epsilon_of(dtype) == expected


def test_the_coarsest_dtype_decides():
    """A model under autocast has float32 weights and bfloat16 roundings."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = Inspector(model()).run_inspection(torch.randn(4, 8))
    assert coarsest_epsilon(report.observation) == 2**-7


def test_a_model_that_cannot_be_copied_is_refused_with_a_reason():
    """The message says that the copy failed, and why."""

    class Uncopyable(nn.Linear):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise TypeError("no copies, please")

    with pytest.raises(InspectionError, match=r"cannot be copied.*no copies, please"):
        perturbed(Request(Uncopyable(2, 2), torch.ones(2)), EPSILON, 0)


def test_products_are_as_coarse_as_torch_was_told():
    """For all backends at once, or for one: torch tells no precision of all then."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has one precision for all backends")
    parts = [torch.backends.mkldnn.matmul, torch.backends.cuda.matmul]
    before = [part.fp32_precision for part in parts]
    try:
        torch.set_float32_matmul_precision("medium")
        assert (product_epsilon("cpu"), product_epsilon("cuda")) == (BFLOAT16, TF32)
        torch.set_float32_matmul_precision("highest")
        assert (product_epsilon("cpu"), product_epsilon("cuda")) == (0.0, 0.0)
        for part, precision in zip(parts, ("bf16", "tf32"), strict=True):
            part.fp32_precision = precision
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert (product_epsilon("cpu"), product_epsilon("cuda")) == (BFLOAT16, TF32)
        report = Inspector(model()).run_inspection(torch.randn(4, 8))
        assert of_report(report).epsilon == BFLOAT16
    finally:
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision
