"""`guess_inputs`: every model of the blind list runs on what is guessed, and is left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import InspectionError
from pytest_modelhealth.capture import Inputs
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.guessing import guess_inputs
from tests.guessing.blind import MODELS, TAUGHT

EXPECTED: dict[str, tuple[tuple[int, ...], ...]] = {
    "Mlp": ((32, 13),),
    "HeadFirst": ((32, 9),),
    "LeNet": ((32, 1, 28, 28),),
    "DeepConv": ((8, 3, 128, 128),),
    "MonoWaves": ((32, 1024),),
    "TinyGpt": ((32, 8),),
    "Translator": ((32, 12), (32, 12)),
    "TwoTowers": ((32,), (32,)),
    "Multimodal": ((32, 3, 32, 32), (32, 12), (32, 4)),
    "Vae": ((32, 784),),
    "Gcn": ((40, 11), (2, 160)),
    "Bare": ((32, 10),),
    "PatchVit": ((32, 3, 48, 48),),
    "Mixer": ((32, 12, 20),),
    "DuelingCritic": ((32, 6), (32, 5)),
    "Batched": ((32, 6),),
    "Listed": ((32, 6), (32, 5)),
    "Fourier": ((32, 2),),
    "Siamese": ((32, 1, 28, 28), (32, 1, 28, 28)),
    "WithExample": ((16, 2, 9),),
    "TimmLike": ((32, 3, 48, 48),),
    "Bilinear": ((32, 8), (32, 6)),
    "Spectrogram": ((32, 40, 32),),
}
"""Shapes that follow from the definitions in `blind`, worked out by hand."""


def _tensors(inputs: object) -> list[Tensor]:
    given = Inputs.of(inputs)
    return find_tensors((given.args, given.kwargs))


def _call(model: nn.Module, inputs: object) -> object:
    given = Inputs.of(inputs)
    with torch.no_grad():
        return copy.deepcopy(model)(*given.args, **given.kwargs)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_guessed_runs(name: str) -> None:
    """The batch runs, its text makes the same batch, and nothing else has changed."""
    torch.manual_seed(0)
    model = MODELS[name]()
    lazy = name == "Lazy"
    before = {} if lazy else copy.deepcopy(model.state_dict())
    state, mode = torch.get_rng_state(), model.training
    guess = guess_inputs(model)

    assert torch.equal(torch.get_rng_state(), state)
    assert model.training is mode
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value), key
    output = _call(model, guess.inputs)
    if guess.loss is not None:
        given = (output,) if guess.target is None else (output, guess.target)
        assert guess.loss(*given).isfinite()
    if name in EXPECTED:
        assert tuple(tuple(t.shape) for t in _tensors(guess.inputs)) == EXPECTED[name]

    names = {"model": model}
    torch.set_rng_state(state)
    exec(compile(guess.source, name, "exec"), names)
    for ours, written in zip(_tensors(guess.inputs), _tensors(names["inputs"]), strict=True):
        assert ours.shape == written.shape
        assert ours.dtype == written.dtype


@pytest.mark.parametrize("name", TAUGHT)
def test_models_of_transformers_compute_their_own_loss(name: str) -> None:
    """Labels are among the inputs, as the head takes them."""
    model = TAUGHT[name]()
    guess = guess_inputs(model)
    assert guess.loss is None
    assert _call(model, guess.inputs).loss.isfinite()  # type: ignore[attr-defined]


def test_values_are_those_of_the_seed() -> None:
    """Two seeds give two batches, one seed the same."""
    model = nn.Linear(4, 3)
    drawn = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        drawn.append(guess_inputs(model).inputs)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


class Sealed(nn.Module):
    """Takes what nobody can guess."""

    def forward(self, order):
        if order.customer != "Ada":
            raise ValueError("no such customer")
        return order


def test_what_cannot_be_guessed_says_what_was_tried() -> None:
    """With what the model raised, and what to write."""
    with pytest.raises(InspectionError) as caught:
        guess_inputs(Sealed())
    text = str(caught.value)
    assert "cannot guess what Sealed.forward takes" in text
    assert "'Tensor' object has no attribute 'customer'" in text
    assert "make() returns (model, inputs)" in text
    with pytest.raises(InspectionError, match=r"for a torch\.nn\.Module, not for int"):
        guess_inputs(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "has_loss"),
    [
        (nn.Linear(4, 3), True),
        (nn.Linear(4, 4), False),  # a width given back is no row of logits
        (nn.Linear(4, 1), False),
        (nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), False),
        (nn.Sequential(nn.Linear(4, 3), nn.Tanh()), False),  # a policy
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU()), False),  # an encoder
        (nn.LazyLinear(3), True),
    ],
)
def test_a_loss_is_given_where_the_output_says_so(model: nn.Module, has_loss: bool) -> None:
    """And the sentence says what stands for it where it does not."""
    guess = guess_inputs(model)
    assert (guess.loss is not None) is has_loss
    assert ("class logits" if has_loss else "random projection") in guess.how


def test_log_probabilities_get_their_likelihood() -> None:
    """Cross-entropy would take their logarithm again."""
    guess = guess_inputs(nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)))
    assert guess.loss is F.nll_loss
    assert guess.loss_source == "F.nll_loss"
    assert guess.how.endswith("it returns log probabilities of 3 classes")


def test_optional_targets_are_given_where_a_loss_comes_back() -> None:
    """As a language model that returns logits and, with targets, a loss."""
    model = MODELS["NanoGpt"]()
    guess = guess_inputs(model)
    given = Inputs.of(guess.inputs)
    assert given.kwargs["targets"].shape == given.args[0].shape
    assert not torch.equal(given.kwargs["targets"], given.args[0])
    assert guess.loss(_call(model, guess.inputs)).isfinite()
    assert guess.loss_source == "lambda output: output[1]"
