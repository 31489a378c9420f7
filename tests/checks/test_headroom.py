"""The `headroom` check: how near values come to the ends of a dtype."""

import pytest
import torch
from torch import nn

from corpus.checks.parts import Scales
from pytest_modelhealth.errors import SettingsError


def found(report, check="headroom"):
    """The layer, role and value of each violation, folded ones included."""
    everything = [v for root in report.violations for v in (root, *root.folded)]
    return [(v.layer, v.role, v.value) for v in everything if v.check == check]


@pytest.mark.parametrize(("factor", "names"), [(1.0, []), (20000.0, ["0"])])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_near_the_largest_are_named(factor, names, dtype, batch, inspect):
    """The part used is the largest value over 65504; float32 has room for more."""
    values = (batch / batch.abs().max() * 2).to(dtype)
    report = inspect(nn.Sequential(Scales(factor)), values, backward=False)
    seen = [(layer, role) for layer, role, _ in found(report)]
    expected = names if dtype is torch.float16 else []
    assert seen == [(name, "activations") for name in expected]
    for _, _, value in found(report):
        assert value == pytest.approx(40000.0 / 65504.0, rel=1e-3)


def test_masks_at_the_lowest_number_are_no_overflow(batch, inspect):
    """They are made to be as low as the dtype goes."""

    class Masks(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 0, torch.finfo(x.dtype).min)

    assert found(inspect(nn.Sequential(Masks()), batch.half(), backward=False)) == []


@pytest.mark.parametrize(
    ("planned", "names"),
    [
        (None, []),
        ("bfloat16", []),
        ("float16", ["0"]),
        (torch.float16, ["0"]),
        ("torch.float16", ["0"]),
    ],
)
def test_planned_dtype(planned, names, batch, inspect):
    """Values that float32 holds, and float16 would not."""
    settings = {} if planned is None else {"planned_dtype": planned}
    report = inspect(nn.Sequential(Scales(1e6)), batch, backward=False, settings=settings)
    assert [layer for layer, _, _ in found(report)] == names


def test_planned_dtype_that_is_unknown_is_refused(mlp, batch, inspect):
    """The message lists those that are known, before anything runs."""
    with pytest.raises(SettingsError, match="planned_dtype must be one of float16, bfloat16"):
        inspect(mlp, batch, settings={"planned_dtype": "half"})


@pytest.mark.parametrize(("factor", "lost"), [(10.0, False), (1e-9, True)])
def test_gradients_that_float16_would_lose(factor, lost, mlp, batch, inspect):
    """The value is the part of the non-zero gradients under 2**-14."""

    def loss(output):
        return output.square().mean() * factor * 1e3

    report = inspect(mlp, batch, loss=loss, settings={"planned_dtype": "float16"})
    roles = {role for _, role, _ in found(report)}
    assert roles == ({"gradients", "parameter_gradients"} if lost else set())
    mlp.zero_grad()
    loss(mlp(batch)).backward()
    gradients = mlp.head.weight.grad[mlp.head.weight.grad != 0].double().abs()
    part = (gradients < 2.0**-14).double().mean().item()
    assert (part > 0.5) is lost


def test_gradients_that_a_few_values_carry_are_not_lost(batch, inspect):
    """Behind a smooth maximum most gradients are next to nothing, and are meant to be."""

    class Sharp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 64)

        def forward(self, x):
            return torch.logsumexp(50.0 * self.fc(x), dim=1) / 50.0

    report = inspect(Sharp(), batch, settings={"planned_dtype": "float16"})
    gradients = report["fc"].gradients
    exponents = gradients.exponents
    below = exponents.counts[: -14 - exponents.lowest].sum()
    assert below > 0.5 * (gradients.count - gradients.zero_count)
    assert found(report) == []


def test_gradients_of_which_none_is_finite_are_left_to_another_check(mlp, batch, inspect):
    """There is nothing to count: `finite` names them, and this check runs to its end."""
    settings = {"planned_dtype": "float16"}
    report = inspect(mlp, batch, loss=lambda out: out.sum() * float("nan"), settings=settings)
    assert report._judgement.broken == ()
    assert {violation.check for violation in report.violations} == {"finite"}
