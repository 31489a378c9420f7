"""Objects of the user's whose every method raises, wherever a model may have them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from corpus.models.hostile import HOSTILE, LAYERS, PACKS, Net
from pytest_modelhealth import Inputs, InspectionError, Inspector
from pytest_modelhealth.comparing import compare
from tests.capture.oracle import report_of


@pytest.mark.parametrize("name", HOSTILE)
def test_no_method_of_the_users_objects_is_called(name: str) -> None:
    """As attribute, argument, output, target and beside parameters: all of it is only looked at."""
    make, x = HOSTILE[name], torch.ones(4, 6)
    batches = [(x, make(), {"key": make()}), {"x": x, "own": make(), "more": [make()]}]
    for pack, batch in zip(PACKS, [*batches, x, Inputs(x, make(), own=make())], strict=True):
        model = Net(make, pack)
        total = model.lin.weight.sum
        for loss in (None, lambda output, target, total=total: total()):
            target = None if loss is None else {"own": make()}
            report = Inspector(model).run_inspection(batch, target=target, loss=loss)
            assert report.observation.errors == (), (name, pack)
            assert report["lin"].activations.count == 24
            assert "Net" in str(report)
            report.to_dict()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_comparison_calls_none_either(name: str) -> None:
    """Two equal models with such objects are equivalent."""
    make = HOSTILE[name]
    for pack in PACKS:
        models = [Net(make, pack) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        assert compare(*models, (torch.ones(4, 6), make())).equivalent


@pytest.mark.parametrize("name", HOSTILE)
def test_an_output_of_the_users_own_kind_is_no_tensor(name: str) -> None:
    """It is not taken for one, nor opened by its own methods."""
    report = Inspector(Net(HOSTILE[name], lambda y, own: own)).run_inspection(torch.ones(4, 6))
    assert report[""].reason == "it returned a value of type Own, no tensor"


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_methods_that_raise_are_observed(name: str) -> None:
    """Inside a model and as the model; twice in it, too."""
    kind = type("Own", (nn.Linear,), LAYERS[name])
    for model in (kind(6, 6), nn.Sequential(layer := kind(6, 6), nn.Sequential(layer))):
        report = report_of(model, torch.ones(4, 6))
        assert {record.status for record in report.layers.values()} == {"observed"}


def test_a_module_without_a_hash_is_refused() -> None:
    """The message says what torch needs it for, and what to do: a data class makes such modules."""
    model = nn.Sequential(type("Unhashable", (nn.Linear,), {"__hash__": None})(6, 6))
    before = copy.copy(vars(model))
    with pytest.raises(InspectionError, match=r"has no hash .*unhashable.* eq=False"):
        Inspector(model).run_inspection(torch.ones(4, 6))
    assert vars(model) == before
