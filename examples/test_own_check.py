"""A project's own check: no activation may leave the range that an 8-bit export can hold."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from examples.models.mlp import MLP
from pytest_modelhealth import Check, ModelHealthError, Setting


class Int8Range(Check):
    """Activations stay within the range that the calibration of the export assumes."""

    name = "int8_range"
    summary = "No activation is larger than the calibrated range."
    definition = "The largest magnitude of each layer's activations is at most max_activation."
    source = "the calibration of our export"
    settings = (
        Setting(
            "max_activation",
            float,
            default=100.0,
            minimum=0.0,
            help="largest magnitude of an activation",
        ),
    )

    def run(self, observation, settings):
        """Yield each layer that is out of range."""
        for record in observation.layers.values():
            limit, seen = settings.limit("max_activation", record.name), record.activations
            if seen is not None and seen.abs_max > limit.value:
                yield self.violation(
                    record,
                    f"reaches {seen.abs_max:.3g}: the export would clip it",
                    value=seen.abs_max,
                    limit=limit,
                    cause="weights that grew, or inputs that are not normalised",
                )


@pytest.fixture
def report(digits, inspector):
    """What a fresh model does with 256 digits."""
    torch.manual_seed(0)
    return inspector(MLP(), own_checks=[Int8Range]).run_inspection(
        digits.train_images[:256], target=digits.train_labels[:256], loss=F.cross_entropy
    )


def test_activations_stay_in_range(report):
    """The check judges beside ours."""
    report.assert_healthy()


def test_a_smaller_range_is_broken(report):
    """Its limit is set as any other, and its failure reads as any other."""
    with pytest.raises(ModelHealthError, match=r"\(int8_range\): reaches .* would clip it"):
        report.assert_healthy(max_activation=0.1)


def test_a_layer_may_have_a_range_of_its_own(report):
    """A limit by layer wins over the one for all."""
    report.assert_healthy(max_activation=0.1, thresholds={"*": {"max_activation": 100.0}})
