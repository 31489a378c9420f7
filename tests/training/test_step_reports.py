"""What a report on a training step is: limits, waivers, formats, data, and in a pytest test."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_modelhealth import HealthReport, Inspector, SettingsError
from pytest_modelhealth.report import Stepped
from pytest_modelhealth.training.catalogue import STEP
from tests.training.steps import X, Y, net, ran, said, usual


def frozen_out() -> HealthReport:
    """Return the report on a step whose optimizer lacks a layer."""
    model = net()
    return ran(usual, model, torch.optim.SGD(model.out.parameters(), lr=0.1))


def test_a_failure_reads_well_in_every_format() -> None:
    """Text, dictionary, JSON, HTML and the failure name check, layer, message and cause."""
    report = frozen_out()
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


def test_what_was_seen_is_plain_data() -> None:
    """It is pickled, and the same report is judged again under other settings."""
    report = frozen_out()
    stepped = report.observation.stepped
    assert isinstance(stepped, Stepped)
    again = pickle.loads(pickle.dumps(stepped))
    assert again == stepped
    assert pickle.loads(pickle.dumps(report.observation)).stepped == stepped
    held = [value for field in fields(stepped) for value in _leaves(getattr(stepped, field.name))]
    assert not [value for value in held if isinstance(value, Tensor)]
    assert stepped.calls == 9
    assert stepped.seconds > 0
    assert [p.name for p in stepped.trained] == ["out.weight", "out.bias"]


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def test_waivers_severities_and_left_out_checks() -> None:
    """As of any check: accepted with a reason, warned of, or not asked."""
    model = net()
    optimizer = torch.optim.SGD(model.out.parameters(), lr=0.1)
    waived = Inspector(model).waive("into", check="trained_*", reason="a fixed projection")
    report = waived.run_step(usual, optimizer, (X, Y))
    assert report.healthy
    assert [found.check for found, _ in report._judgement.waived] == ["trained_parameters"]
    warned = ran(usual, model, optimizer, settings={"severity": {"trained_parameters": "warn"}})
    assert said(warned, "warn")[0][0] == "trained_parameters"
    assert warned.healthy
    assert ran(usual, model, optimizer, settings={"skip_checks": "trained_parameters"}).healthy
    with pytest.raises(SettingsError, match="did you mean 'trained_parameters'"):
        Inspector(model).waive("*", check="trained_parameter", reason="misspelt")


def test_checks_of_a_step_are_silent_elsewhere() -> None:
    """An inspection is not judged by them, and a step alone not by checks of an inspection."""
    names = {check.name for check in STEP.values()}
    model = net()
    model.into.weight.data.zero_()
    plain = Inspector(model).run_inspection(X, Y, loss=torch.nn.CrossEntropyLoss())
    assert plain.observation.stepped is None
    assert not plain.observation.is_of_own_step
    assert not names & {v.check for v in plain.violations}
    report = ran(usual, model)
    assert report.observation.is_of_own_step
    assert {check for check, _, _ in said(report)} <= names
    assert report.observation.layers["into"].parameters


def test_a_finding_stands_at_the_model_where_its_layer_is_not_watched() -> None:
    """What `watch` leaves out has no record of its own."""
    model = net()
    inspector = Inspector(model).watch("out")
    report = inspector.run_step(usual, torch.optim.SGD(model.out.parameters(), lr=0.1), (X, Y))
    assert "into.weight" in str(report.violations[0].message)


IN_A_TEST = """
    import pytest
    import torch
    import torch.nn.functional as F
    from torch import nn

    X, Y = torch.randn(16, 6), torch.randint(0, 3, (16,))

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        (32 * loss).backward()
        optimizer.step()
        return loss

    @pytest.fixture
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def run(inspector, model, rate=1e-3):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        return inspector(model).run_step(step, optimizer, (X, Y))

    def test_unasked(inspector, model):
        run(inspector, model)

    def test_asked(inspector, model):
        assert not run(inspector, model).healthy

    def test_by_marker(inspector, model):
        run(inspector, model)
    test_by_marker = pytest.mark.modelhealth(max_gradient_factor=1e9, severity={
        "gradient_factor": "warn"})(test_by_marker)

    @pytest.mark.modelhealth_waive("*", check="gradient_factor", reason="a sum on purpose")
    def test_waived(inspector, model):
        run(inspector, model)

    def test_raises(inspector, model):
        with pytest.raises(ZeroDivisionError):
            inspector(model).run_step(lambda m, o, b: 1 / 0,
                                      torch.optim.SGD(model.parameters()), X)
"""


def test_in_a_test_a_step_is_judged_at_its_end(pytester: pytest.Pytester) -> None:
    """Only the test that asks for the verdict decides itself; markers and waivers hold."""
    pytester.makepyfile(IN_A_TEST)
    pytester.makeini("[pytest]\nmodelhealth_max_gradient_factor = 16\n")
    result = pytester.runpytest("-q", "-Wdefault", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=4, failed=1, warnings=1)
    result.stdout.fnmatch_lines(["*test_unasked*"])
    text = result.stdout.str()
    assert "times the slope of the loss" in text
    assert "modelhealth_max_gradient_factor" in text
