"""What is recorded of a layer may be another thing while all numbers agree: a note, no drift."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from corpus.models.recorded import (
    Branch,
    Recurrent,
    finite_mask,
    time_first,
    two_activations,
    without_statistics,
    without_weight_norm,
    zero_bias,
)
from pytest_modelhealth import Inspector
from pytest_modelhealth.snapshot.drift import DriftReport
from tests.builders import check, record


def read(reference: nn.Module, candidate: nn.Module, batch: Tensor) -> DriftReport:
    """Record a snapshot of one model and read it with another."""
    text = record(Inspector(reference, calibrate=True).run_inspection(batch))
    return check(text, Inspector(candidate).run_inspection(batch))


def recurrent() -> Recurrent:
    """Return one with its weights seeded."""
    torch.manual_seed(0)
    return Recurrent()


def batch() -> Tensor:
    """Return sequences of five steps."""
    return torch.randn(32, 5, 6, generator=torch.Generator().manual_seed(1))


FORMS = [
    (time_first, "lstm"),
    (two_activations, "relu"),
    (without_weight_norm, "fc"),
    (finite_mask, "softmax"),
]


@pytest.mark.parametrize(("change", "layer"), FORMS)
def test_another_form_passes_with_a_note(change: Callable[[Recurrent], None], layer: str) -> None:
    """Order of axes, number of calls, parametrisation, mask: all other numbers agree."""
    reference, candidate = recurrent(), recurrent()
    change(candidate)
    found = read(reference, candidate, batch())
    assert not found.drifted, str(found)
    assert found.drifts == ()
    assert layer in found.note


@pytest.mark.parametrize("change", [change for change, _ in FORMS])
@pytest.mark.parametrize("weight", ["head.weight", "lstm.weight_hh_l0"])
def test_another_form_hides_no_other_weight(
    change: Callable[[Recurrent], None], weight: str
) -> None:
    """A weight off by a thousandth, before it or behind, fails."""
    candidate = recurrent()
    change(candidate)
    candidate.get_parameter(weight).data[0] *= 1.001
    assert read(recurrent(), candidate, batch()).drifted


def test_a_parametrisation_that_is_removed_wrongly_drifts() -> None:
    """The weight that takes its place is compared by what the layer gives."""
    candidate = recurrent()
    without_weight_norm(candidate)
    candidate.fc.weight.data[0] *= 1.001
    found = read(recurrent(), candidate, batch())
    assert found.drifts[0].layer == "fc"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "branch", None), "removed branch (Linear)"),
        (lambda m: setattr(m.branch, "bias", None), "no parameters any more of branch.bias"),
        (lambda m: m.branch.requires_grad_(False), "no parameter_gradients any more of branch"),
        (
            lambda m: setattr(m, "norm", without_statistics(m.norm)),
            "no buffers any more of norm.running_mean",
        ),
    ],
    ids=["a branch of zeros removed", "a bias of zeros removed", "frozen", "no running statistics"],
)
def test_what_only_training_or_another_batch_would_show_still_fails(
    change: Callable[[Branch], None], message: str
) -> None:
    """Parameters and running statistics that nothing takes the place of are no matter of form."""
    reference = Branch(zero_bias())
    candidate = copy.deepcopy(reference)
    change(candidate)
    found = read(reference, candidate, batch()[:, 0])
    assert found.drifted
    assert message in str(found)


def test_another_shape_of_the_model_s_own_output_is_no_matter_of_form() -> None:
    """What the model returns has to be what it was."""

    class Unsqueezed(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, None]

    torch.manual_seed(0)
    found = read(recurrent(), Unsqueezed(), batch())
    assert found.drifted
