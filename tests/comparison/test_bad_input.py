"""What cannot be compared is said clearly, and both models stay as they were."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.changed import Both, Returning
from corpus.models.paired import Cnn, Gpt, Mlp, batch, seeded
from corpus.pairs import twins
from pytest_modelhealth import InspectionError, SettingsError, compare
from tests.capture.oracle import changes, fingerprint


@pytest.mark.parametrize("side", ["reference", "candidate"])
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda model: 3, ""),
        (lambda model: Mlp, ""),
        (lambda model: "weights.pt", ""),
        (lambda model: None, ""),
        (lambda model: lambda x: model(x), "Wrap it in a module: keep the layers that it calls"),
        (lambda model: functools.partial(model.forward), "Wrap it in a module"),
        (lambda model: model.forward, "Pass the module itself, not a method of it"),
    ],
)
def test_what_is_no_model_is_refused_by_side(side, made, words):
    """The message says which of the two it is, what it should be, and how to pass a function."""
    model = seeded(Mlp)
    pair = {"reference": model, "candidate": seeded(Mlp)} | {side: made(model)}
    with pytest.raises(InspectionError, match=f"the {side}.*{words}"):
        compare(pair["reference"], pair["candidate"], torch.randn(2, 16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "made", [nn.Module.state_dict, lambda model: torch.jit.freeze(torch.jit.script(model.eval()))]
)
def test_what_cannot_be_perturbed_is_no_reference(made):
    """There is no model to load a `state_dict` into, nor to run a frozen script's copies of."""
    model = seeded(nn.Tanh)
    with pytest.raises(InspectionError, match=r"frozen script or .* can only be the candidate"):
        compare(made(model), model, torch.randn(2, 16))


def _without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {}, r"Missing key\(s\)"),
        (lambda state: _without(state, "fc2.bias"), r"Missing key\(s\) .*\"fc2.bias\""),
        (lambda state: state | {"fc9.bias": torch.ones(1)}, r"Unexpected key\(s\) .*\"fc9.bias\""),
        (lambda state: {"epoch": 3, "model": state}, r"Unexpected key\(s\) .*\"epoch\", \"model\""),
        (lambda state: state | {"fc1.bias": torch.ones(3)}, "size mismatch for fc1.bias"),
    ],
)
def test_a_state_dict_that_does_not_fit_says_how(change, message):
    """Missing and unexpected keys and other shapes are told apart, in the words of torch."""
    model = seeded(Mlp)
    with pytest.raises(InspectionError, match=f"(?s)does not fit the reference: .*{message}"):
        compare(model, change(model.state_dict()), torch.randn(2, 16))


def test_an_exception_of_a_model_passes_and_says_whose_it_is():
    """The user's exception is the same object, with a note on which of the two models ran."""
    error = ValueError("too hot")

    class Failing(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            raise error

    for pair, side in (
        ((seeded(Mlp), Failing()), "candidate"),
        ((Failing(), seeded(Mlp)), "reference"),
    ):
        error.__notes__ = []
        with pytest.raises(ValueError, match="too hot") as caught:
            compare(*pair, torch.randn(2, 16))
        assert caught.value is error
        assert any(f"while the {side} of" in note for note in error.__notes__)


def test_models_without_a_layer_in_common_are_compared_by_their_outputs():
    """That no layer was found again is said, and the outputs decide."""
    reference = nn.Sequential(OrderedDict(a=nn.Flatten(), b=nn.Linear(16, 4)))
    candidate = nn.Sequential(OrderedDict(c=nn.Conv1d(1, 4, 16), d=nn.Flatten()))
    batch = torch.randn(3, 1, 16)
    same = copy.deepcopy(candidate)
    same.c.weight.data = reference.b.weight.data.view(4, 1, 16).clone()
    same.c.bias.data = reference.b.bias.data.clone()
    other = compare(reference, candidate, batch)
    assert not other.equivalent
    assert compare(reference, same, batch).equivalent
    unrelated = compare(nn.Tanh(), nn.Conv1d(1, 1, 1), batch)
    assert not unrelated.equivalent


FORMS = {
    "tuple": lambda y: (y, y),
    "dict": lambda y: {"logits": y},
    "namedtuple": lambda y: Both(y, y * 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_another_structure_of_the_output_is_no_equivalence(form):
    """The numbers are the same, the type is not: the story says how both are built."""
    reference, candidate = seeded(Mlp), Returning(FORMS[form])
    candidate.load_state_dict(reference.state_dict())
    divergence = compare(reference, candidate, batch(reference)).first_divergence
    assert divergence.kind == "structure"
    assert "returns tensor 8x4" in divergence.story


def test_another_shape_of_the_output_is_said():
    """A head with more classes differs by its shape, not by numbers."""
    reference, candidate = twins(Mlp)
    candidate.head = nn.Linear(32, 5)
    found = compare(reference, candidate, batch(reference)).first_divergence
    assert found.layer == "head"
    assert "shape" in f"{found.cause} {found.result.problem}"


def test_nan_on_both_sides_is_equal_and_said():
    """Two models that are broken alike are equivalent, and a note says where they are NaN."""
    reference, candidate = twins(Mlp)
    for model in (reference, candidate):
        model.fc2.weight.data[0, 0] = float("nan")
    comparison = compare(reference, candidate, batch(reference))
    assert comparison.equivalent
    assert any("NaN on both sides: fc2" in note for note in comparison.notes)


def test_nan_on_one_side_diverges_however_large_the_tolerance():
    """No rounding explains a NaN."""
    reference, candidate = twins(Mlp)
    candidate.fc2.bias.data[0] = float("nan")
    comparison = compare(reference, candidate, batch(reference), factor=1e30)
    assert comparison.first_divergence.layer == "fc2"


def test_an_onnx_file_that_is_missing_is_named(tmp_path):
    """The path is in the message, whether or not onnxruntime is there."""
    with pytest.raises(InspectionError, match=r"onnxruntime|there is no ONNX file"):
        compare(seeded(Mlp), tmp_path / "missing.onnx", torch.randn(2, 16))


def test_onnx_without_onnxruntime_says_what_to_install(monkeypatch, tmp_path):
    """Where the optional package is missing, the message is the command that brings it."""
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(InspectionError, match=r"pip install 'pytest-modelhealth\[onnx\]'"):
        compare(seeded(Mlp), Path("model.onnx"), torch.randn(2, 16))


def test_a_forward_that_writes_to_its_batch_does_not_change_the_other_run():
    """Each model has a copy of the batch, and the user's stays as it was."""

    class Writing(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return super().forward(x)

    reference = seeded(Writing)
    inputs = torch.randn(4, 16)
    before = inputs.clone()
    assert compare(reference, copy.deepcopy(reference), inputs).equivalent
    assert torch.equal(inputs, before)


@pytest.mark.parametrize("harmful", [False, True])
def test_both_models_and_the_random_state_are_left_as_they_were(harmful):
    """Bit for bit: weights, buffers, gradients, modes, hooks and generators."""
    reference, candidate = twins(Cnn)
    if harmful:
        candidate.bn1.eps = 1e-3
    reference.conv1.weight.grad = torch.ones_like(reference.conv1.weight)
    inputs, default = batch(reference), torch.get_default_dtype()
    before = [fingerprint(model, inputs) for model in (reference, candidate)]
    compare(reference, candidate, inputs, torch.arange(4), loss=F.cross_entropy)
    for model, seen in zip((reference, candidate), before, strict=True):
        assert changes(seen, fingerprint(model, inputs)) == []
    assert torch.get_default_dtype() is default


def test_a_reference_that_cannot_be_copied_is_still_compared():
    """Without further runs epsilon and depth are what is left, and a note says so."""

    class Uncopyable(Mlp):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise TypeError("not today")

    reference, candidate = seeded(Uncopyable), seeded(Mlp)
    assert compare(reference, candidate, batch(candidate)).equivalent
    candidate.norm.eps = 1e-2
    comparison = compare(reference, candidate, batch(candidate))
    assert comparison.first_divergence.layer == "norm"
    assert any("not today" in note for note in comparison.notes)


def test_tokens_and_keywords_go_in_as_they_do_for_an_inspection():
    """Whole numbers are never cast, a mapping goes in as keywords."""
    reference, candidate = twins(Gpt)
    assert compare(reference, candidate.bfloat16(), {"ids": batch(reference)}).equivalent


def test_a_memory_budget_of_nothing_gives_the_same_verdict():
    """What does not fit lies in a file meanwhile; the result says how much."""
    reference, candidate = twins(Mlp)
    candidate.norm.eps = 1e-12
    inside = compare(reference, candidate, batch(reference))
    spilled = compare(reference, candidate, batch(reference), memory_budget=0)
    assert not any("temporary file" in note for note in inside.notes)
    assert spilled.notes[-1].endswith("MiB of tensors lay in a temporary file")
    assert str(spilled.first_divergence) == str(inside.first_divergence)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"factor": -1}, "factor must be a number of at least 0, not -1"),
        ({"factor": "10"}, r"factor must be a number of at least 0, not '10' \(str\)"),
        ({"memory_budget": -1}, "memory_budget must be a whole number of at least 0, not -1"),
        ({"memory_budget": "1 GiB"}, "memory_budget must be a whole number .*, not '1 GiB'"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(argument, message):
    """The message says what was expected; neither model is called."""
    with pytest.raises(SettingsError, match=f"argument of compare: {message}"):
        compare(nn.Linear(2, 2), nn.Linear(2, 2), torch.randn(3), **argument)


def test_loss_and_backward_are_those_of_an_inspection():
    """Each is a function."""
    for argument, message in (("loss", "cannot be called"), ("backward", "backward must be")):
        with pytest.raises(InspectionError, match=message):
            compare(*twins(nn.Tanh), torch.randn(3, 2), **{argument: "mse"})
