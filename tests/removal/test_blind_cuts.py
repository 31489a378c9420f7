"""The verdicts on models of which it is known what can be cut out."""

import copy

import pytest
import torch

from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.removal.result import RemovableUnits
from pytest_modelhealth.report.removable import Removable
from tests.removal.blind_cuts import CUTS


def units_of(case):
    """The claims of a case as a result."""
    report = Inspector(case.model).run_inspection(case.batch, backward=False)
    return RemovableUnits(Removable(layers=case.layers), report, case.model, case.batch)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", CUTS)
def test_what_can_be_cut_is_cut_and_the_rest_refused_with_its_reason(name):
    """The copy is smaller by just these units, and its outputs are the model's in float64 too."""
    case = CUTS[name]()
    units = units_of(case)
    before = copy.deepcopy(case.model.state_dict())
    if not case.cut:
        with pytest.raises(InspectionError) as caught:
            units.smaller()
        for layer, word in case.refused.items():
            assert any(word in line for line in lines_of(caught.value, layer)), str(caught.value)
        return
    made = units.smaller_copy()
    assert dict(made.cut) == case.cut, str(made)
    assert set(made.refused) == set(case.refused), str(made)
    for layer, word in case.refused.items():
        assert word in made.refused[layer], str(made)
    after = case.model.state_dict()
    assert all(
        torch.equal(before[key], after[key]) for key in before if torch.is_tensor(before[key])
    )
    assert list(made.model.state_dict()) == list(before)
    merged = any(claim.duplicates for claim in case.claims.values())
    assert_same(case.model, made.model, case.batch, 1e-6 if merged else 1e-9)


def lines_of(error, layer):
    """The lines of an error that are about a layer."""
    return [line for line in str(error).splitlines() if line.startswith(f"  {layer}: ")]


def assert_same(model, other, batch, slack):
    """Outputs agree in float64 on another batch; merged weights were rounded to float32."""
    model, other = copy.deepcopy(model).double(), copy.deepcopy(other).double()
    inputs = Inputs.of(copy.deepcopy(batch))
    args = [x.double() * 1.1 if x.is_floating_point() else x for x in inputs.args]
    with torch.no_grad():
        ours, theirs = find_tensors(model(*args)), find_tensors(other(*args))
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=slack, atol=slack)
