"""What a `Comparison` says, as text, as data and as a picture."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch import nn

from corpus.models.paired import Cnn, Gpt, Mlp, batch, seeded
from corpus.pairs import BENIGN, HARMFUL, twins
from pytest_modelhealth import Comparison, LayerNotFoundError, ModelHealthError, compare
from pytest_modelhealth.alignment.result import Change


def broken() -> Comparison:
    """Return the comparison of a model with one whose second norm has another epsilon."""
    reference, candidate = twins(Gpt)
    candidate.blocks[1].ln2.eps = 1e-3
    return compare(reference, candidate, batch(reference))


def test_the_first_line_tells_the_whole_story():
    """Where, what is the same, what is not, and the likely cause."""
    with pytest.raises(ModelHealthError) as caught:
        broken().assert_equivalent()
    first, *rest = str(caught.value).splitlines()
    assert first == (
        "not equivalent: blocks.1.ln2: same input, same weights, other output: "
        "eps is 0.001, was 1e-05"
    )
    assert len(rest) < 26
    assert any("other layers only show what began in blocks.1.ln2" in line for line in rest)
    assert any(line.startswith("  !  blocks.1.ln2") for line in rest)
    assert isinstance(caught.value.report, Comparison)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_weight", "other weights, other output: weight differs in 1 of 1,024 values"),
        ("weights_swapped", "weight differs in 256 of 256 values"),
        ("other_activation", "it is a LeakyReLU, was a ReLU"),
        ("tanh_gelu", "approximate is tanh, was none"),
        ("other_mode", "it is in training mode, the reference is in evaluation mode"),
        ("other_running_mean", "running_mean differs in 8 of 8 values"),
        (
            "residual_scaled",
            "is not: the product of `blocks.1.attn` and a number",
        ),
        (
            "residual_lost",
            "its output is not: the sum of an earlier sum and `blocks.0.down` is gone",
        ),
        ("skip_scaled", "skip is 0.999, was 1.0"),
        ("scale_inserted", "between them: inserted scale"),
        ("norm_removed", "norm: no longer called; every layer before is right, the input of head"),
        ("mask_lost", "causal is False, was True"),
        ("parameter_frozen", "weight is frozen there"),
        ("gradient_detached", "the gradient that reaches the output of act1 is not"),
        ("fold_without_epsilon", "is not that of bn1, which was folded into it"),
        ("split_in_another_order", "blocks.1.attn.q, blocks.1.attn.k, blocks.1.attn.v together"),
    ],
)
def test_the_cause_is_named(name, words):
    """Weights, settings, modes, code, inserted and removed layers are told apart."""
    reference, candidate = HARMFUL[name][0]()
    inputs = torch.randn(8, 16) if name == "weights_swapped" else batch(reference)
    assert words in repr(compare(reference, candidate, inputs))


def test_strict_names_fails_what_only_changed_its_name():
    """Without it a rename passes with a note; with it the first renamed layer is named."""
    reference, candidate = BENIGN["blocks_renamed"]()
    loose = compare(reference, candidate, batch(reference))
    assert loose.equivalent
    assert "renamed (blocks.0 -> h.0" in str(loose)
    strict = compare(reference, candidate, batch(reference), strict_names=True)
    assert not strict.equivalent
    assert strict.first_divergence is None
    with pytest.raises(ModelHealthError, match=r"strict_names.*blocks\.0 -> h\.0 renamed"):
        strict.assert_equivalent()
    assert compare(reference, reference, batch(reference), strict_names=True).equivalent


def test_what_could_not_be_matched_is_named_although_all_numbers_agree():
    """The parts of a split projection and an inserted layer stand in the text."""
    reference, candidate = BENIGN["projection_split"]()
    text = str(compare(reference, candidate, batch(reference)))
    assert "blocks.0.attn.qkv is split into blocks.0.attn.q, blocks.0.attn.k" in text
    reference, candidate = BENIGN["identity_inserted"]()
    assert "2 inserted (norm, norm.0)" in str(compare(reference, candidate, batch(reference)))


def test_layers_are_found_by_either_name():
    """A layer's errors are read by its name in the reference or in the candidate."""
    reference, candidate = BENIGN["blocks_renamed"]()
    comparison = compare(reference, candidate, batch(reference))
    assert comparison["blocks.1.up"] is comparison["h.1.up"]
    assert comparison["blocks.1.up"].pair.change is Change.RENAMED
    assert comparison["blocks.1.up"].worst("activations").difference.count == 2 * 10 * 96
    with pytest.raises(LayerNotFoundError, match=r"did you mean 'blocks\.1\.up'"):
        comparison["blocks.1.upp"]


def test_the_measures_of_a_layer_are_those_of_its_tensors():
    """Error, relative L2 and place are what a forward hook and plain torch say."""
    reference, candidate = twins(Mlp)
    candidate.fc2.weight.data[3] *= 1.5
    inputs = batch(reference)
    seen = []
    for model in (reference, candidate):
        handle = model.fc2.register_forward_hook(lambda m, i, o: seen.append(o.detach().double()))
        model(inputs)
        handle.remove()
    found = compare(reference, candidate, inputs)["fc2"].worst("activations").difference
    a, b = seen
    assert found.max_abs == (a - b).abs().max()
    assert found.relative_l2 == pytest.approx(float((a - b).norm() / a.norm()))
    assert found.unequal == int((a != b).sum())


def test_gradients_are_compared_with_those_of_a_bare_backward():
    """A parameter gradient's error is that of two plain backward passes."""
    reference, candidate = twins(lambda: nn.Linear(4, 3))
    candidate.weight.data *= 1.5
    inputs, target = torch.randn(5, 4), torch.randn(5, 3)
    comparison = compare(reference, candidate, inputs, target, loss=nn.functional.mse_loss)
    nn.functional.mse_loss(reference(inputs), target).backward()
    nn.functional.mse_loss(candidate(inputs), target).backward()
    (found,) = [r for r in comparison[""].tensors if r.key.tensor == "weight"]
    error = (reference.weight.grad - candidate.weight.grad).double().norm()
    assert found.difference.error_norm == pytest.approx(float(error), rel=1e-5)


def test_it_is_plain_data_on_request():
    """`to_dict` goes through JSON and holds verdict, culprit and every tensor's errors."""
    comparison = broken()
    data = json.loads(json.dumps(comparison.to_dict()))
    assert data["equivalent"] is False
    assert data["divergence"]["layer"] == "blocks.1.ln2"
    layer = next(x for x in data["layers"] if x["reference"] == "blocks.1.ln2")
    assert layer["diverged"]
    assert {t["role"] for t in layer["tensors"]} >= {"inputs", "activations", "gradients"}
    assert pickle.loads(pickle.dumps(comparison)).to_dict() == comparison.to_dict()


def test_a_notebook_shows_the_table():
    """The HTML is the text, escaped."""
    reference, candidate = BENIGN["blocks_renamed"]()
    shown = compare(reference, candidate, batch(reference))._repr_html_()
    assert shown.startswith("<pre>equivalent")
    assert "blocks.0 -&gt; h.0" in shown


def test_a_picture_shows_every_layer_that_was_compared():
    """The figure has a row for each, and the culprit's name is red."""
    comparison = broken()
    figure = comparison.plot_errors()
    labels = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    compared = [layer for layer in comparison.layers.values() if layer.tensors]
    assert {layer.label for layer in compared} <= labels.keys()
    assert labels["blocks.1.ln2"] != labels["blocks.0.ln2"]
    assert any(label.startswith("not equivalent") for label in labels)
    model = seeded(Mlp)
    same = compare(model, model, batch(model)).plot_errors()
    assert same.axes[0].texts[0].get_text().startswith("equivalent")


@pytest.mark.parametrize("name", ["nan_in_a_weight", "parameter_frozen"])
def test_a_picture_is_drawn_of_what_has_no_number(name):
    """NaN and missing gradients are drawn as crosses, not as errors of the plot."""
    reference, candidate = HARMFUL[name][0]()
    compare(reference, candidate, batch(reference)).plot_errors().canvas.draw()


def test_other_weights_are_a_divergence_although_the_batch_does_not_show_them():
    """An embedding of a word that is not in the batch is still another embedding."""
    reference, candidate = twins(Gpt)
    candidate.tokens.weight = nn.Parameter(candidate.tokens.weight.detach().clone())
    inputs = torch.zeros(2, 10, dtype=torch.int64)
    reference.head, candidate.head = nn.Identity(), nn.Identity()
    candidate.tokens.weight.data[7] *= 1.001
    comparison = compare(reference, candidate, inputs)
    assert not comparison.diverged
    assert comparison.first_divergence.layer == "tokens"
    assert "other weights, although on this batch" in repr(comparison)
    assert "weight differs in 24 of 960 values: weight[7, 0]" in repr(comparison)


def test_weights_that_differ_by_a_rounding_are_the_same_weights():
    """A weight that was folded or computed anew is off by a few epsilons."""
    reference, candidate = twins(Mlp)
    candidate.fc2.weight.data *= 1 + 2.0**-23
    assert compare(reference, candidate, batch(reference)).equivalent


def test_buffers_that_no_number_shows_are_a_note():
    """In training mode a batch norm does not read its averages: another average is only said."""
    reference, candidate = twins(lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)))
    candidate[1].running_mean += 1
    comparison = compare(reference, candidate, torch.randn(8, 16))
    assert comparison.equivalent
    assert any("1: running_mean differs" in note for note in comparison.notes)


def test_what_a_step_leaves_in_the_buffers_is_compared():
    """Another momentum changes no number of this step, and what the layer keeps for evaluation."""
    reference, candidate = twins(Cnn)
    candidate.bn2.momentum = 0.01
    found = compare(reference, candidate, batch(reference)).first_divergence
    assert (found.layer, found.kind) == ("bn2", "buffers")
    assert "running_mean and running_var are not the same" in found.story
    assert "momentum is 0.01, was 0.1" in found.cause
    text = str(compare(reference.eval(), candidate.eval(), batch(reference)))
    assert text.startswith("equivalent")  # nothing is written there


def test_buffers_of_a_lower_precision_are_judged_by_its_rounding():
    """Running averages of a bfloat16 copy are off by what bfloat16 rounds, and no more."""
    reference, candidate = twins(Cnn)
    assert compare(reference, candidate.bfloat16(), batch(reference)).equivalent


def test_averages_of_inputs_that_cancel_may_be_off_by_the_rounding_of_the_inputs():
    """The mean of values of size 1 that cancel is near 0; what it is off by is not."""

    class Shifted(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.running_mean = self.running_mean + shift
            return y

    reference, candidate = nn.Sequential(nn.BatchNorm2d(8)), nn.Sequential(Shifted(8))
    half = torch.randn(8, 8, 36, 36)
    inputs = torch.cat([half, -half])
    shift = 2.0**-26  # an eighth of the epsilon of float32
    assert compare(reference, candidate, inputs).equivalent
    shift = 2.0**-16
    found = compare(reference, candidate, inputs).first_divergence
    assert (found.layer, found.result.key.tensor) == ("0", "running_mean")


def test_what_compiled_code_leaves_in_the_buffers_is_compared():
    """A backend whose outputs are right and whose averages are not is caught."""

    def wrong(graph: torch.fx.GraphModule, example: object) -> object:
        def run(*args: torch.Tensor) -> object:
            result = graph(*args)
            for tensor in args:
                if tensor.shape == (8,) and not tensor.requires_grad:
                    tensor.data.add_(1)  # unseen by autograd, which keeps it for the backward
            return result

        return run

    reference, candidate = twins(Cnn)
    inputs = batch(reference)
    assert compare(reference, torch.compile(candidate, backend="eager"), inputs).equivalent
    torch.compiler.reset()
    found = compare(reference, torch.compile(candidate, backend=wrong), inputs).first_divergence
    assert (found.layer, found.kind) == ("bn1", "buffers")


def test_a_list_of_layers_without_code_of_its_own_is_no_culprit():
    """What is done between the layers of a `ModuleList` stands in the module that holds it."""

    class Graph(nn.Module):
        def __init__(self, loops: float) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
            self.loops = loops

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed = torch.full((8, 8), 0.1) + self.loops * torch.eye(8)
            for layer in self.layers:
                x = layer(mixed @ x)
            return x

    reference, candidate = seeded(lambda: Graph(1.0)), seeded(lambda: Graph(0.0))
    found = compare(reference, candidate, torch.randn(8, 16)).first_divergence
    assert found.layer == ""
    assert "loops is 0.0, was 1.0" in found.cause


def test_one_wrong_element_among_many_is_found():
    """An error that the norm of a large tensor hides is held to the worst element's noise."""

    class Spoiled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).clone()
            y[3, 5] += 1e-4
            return y

    reference = seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
    candidate = nn.Sequential(Spoiled(64, 64), nn.Tanh())
    candidate.load_state_dict(reference.state_dict())
    found = compare(reference, candidate, torch.randn(512, 64)).first_divergence
    assert found.layer == "0"
    assert found.result.difference.at == (3, 5)
    assert found.result.difference.unequal == 1


def test_a_float64_run_that_computes_something_else_is_no_truth():
    """A model that behaves otherwise in float64 is judged by perturbed runs, not excused by it."""

    class Odd(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * x if x.dtype == torch.float64 else x)

    reference = seeded(Odd)
    candidate = seeded(Odd)
    candidate.norm.eps = 1e-3
    found = compare(reference, candidate, batch(seeded(Mlp))).first_divergence
    assert found.layer == "norm"
