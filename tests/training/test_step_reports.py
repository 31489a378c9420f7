"""What a report on a training step is: formats, and plain data."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.report import Stepped
from pytest_modelhealth.training.catalogue import STEP
from tests.training.steps import X, Y, net, objections, ran, usual


@pytest.fixture
def report() -> HealthReport:
    """The report on a step whose optimizer lacks a layer."""
    model = net()
    return ran(usual, model, torch.optim.SGD(model.out.parameters(), lr=0.1))


def test_a_failure_reads_well_in_every_format(report: HealthReport) -> None:
    """Text, dictionary, JSON, HTML and the failure name check, layer, message and cause."""
    message = "2 of 4 trainable parameters get a gradient and are in no optimizer"
    for text in (str(report), report.render("failure"), report.render("html")):
        assert message in text
        assert "trained_parameters" in text
    data = report.to_dict()
    (found,) = data["violations"]
    assert (found["check"], found["layer"]) == ("trained_parameters", "into")
    assert message in found["message"]
    assert data["verdict"] == "unhealthy"
    assert json.loads(json.dumps(data)) == data


def test_what_was_seen_is_plain_data(report: HealthReport) -> None:
    """It is pickled, and holds no tensor."""
    stepped = report.observation.stepped
    assert isinstance(stepped, Stepped)
    assert pickle.loads(pickle.dumps(report.observation)).stepped == stepped
    held = [value for field in fields(stepped) for value in _leaves(getattr(stepped, field.name))]
    assert not [value for value in held if isinstance(value, Tensor)]
    assert [p.name for p in stepped.trained] == ["out.weight", "out.bias"]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def test_checks_of_a_step_are_silent_elsewhere() -> None:
    """An inspection is not judged by them, and a step alone not by checks of an inspection."""
    model = net()
    model.into.weight.data.zero_()
    plain = Inspector(model).run_inspection(X, Y, loss=torch.nn.CrossEntropyLoss())
    assert plain.observation.stepped is None
    assert not plain.observation.is_of_own_step
    assert STEP.keys().isdisjoint(objections(plain))
    report = ran(usual, model)
    assert report.observation.is_of_own_step
    assert objections(report).keys() <= STEP.keys()
    assert report.observation.layers["into"].parameters


def test_a_finding_stands_at_the_model_where_its_layer_is_not_watched() -> None:
    """What `watch` leaves out has no record of its own."""
    model = net()
    inspector = Inspector(model).watch("out")
    report = inspector.run_step(usual, torch.optim.SGD(model.out.parameters(), lr=0.1), (X, Y))
    assert "into.weight" in str(report.violations[0].message)
