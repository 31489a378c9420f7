"""`compare`: what is the same passes, what is not is named where it begins and told in words."""

from __future__ import annotations

import functools
import json
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corpus.models.paired import Gpt, Mlp, batch
from corpus.pairs import BENIGN, CHANGES, HARMFUL, X, twins
from pytest_modelhealth import Comparison, LayerNotFoundError, ModelHealthError, compare
from pytest_modelhealth.alignment.result import Change
from pytest_modelhealth.comparison.results import measure

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

OF_SIXTEEN = {"sequential_to_attributes", "the_same_dropout", "unwrapped", "weights_swapped"}
PAIRS = [
    pytest.param(name, marks=pytest.mark.slow) if name == "compiled" else name
    for name in (*BENIGN, *HARMFUL)
]
WORDS = {
    "blocks_renamed": "renamed (blocks.0 -> h.0",
    "projection_split": "9 inserted (blocks.0.attn.q, blocks.0.attn.k",
    "identity_inserted": "2 inserted (norm, norm.0)",
    "one_weight": "other weights, other output: weight differs in 1 of 1,024 values",
    "weights_swapped": "weight differs in 256 of 256 values",
    "other_activation": "it is a LeakyReLU, was a ReLU",
    "tanh_gelu": "approximate is tanh, was none",
    "other_mode": "it is in training mode, the reference is in evaluation mode",
    "other_running_mean": "running_mean differs in 8 of 8 values",
    "residual_scaled": "is not: the product of `blocks.1.attn` and a number",
    "residual_lost": "its output is not: the sum of an earlier sum and `blocks.0.down` is gone",
    "skip_scaled": "skip is 0.999, was 1.0",
    "scale_inserted": "between them: inserted scale",
    "norm_removed": (
        "norm: no longer called; every layer before is right, the input of head"
    ),
    "mask_lost": "causal is False, was True",
    "parameter_frozen": "weight is frozen there",
    "gradient_detached": "the gradient that reaches the output of act1 is not",
    "fold_without_epsilon": "is not that of bn1, which was folded into it",
    "split_in_another_order": "between them: inserted blocks.1.attn.q, blocks.1.attn.k",
}  # fmt: skip


@functools.cache
def compared(name: str) -> Comparison:
    """The comparison of a pair of the corpus."""
    reference, candidate = (HARMFUL[name][0] if name in HARMFUL else BENIGN[name])()
    torch.manual_seed(0)
    inputs = torch.randn(8, 16) if name in OF_SIXTEEN else batch(reference)
    return compare(reference, candidate, inputs)


@pytest.mark.parametrize("name", PAIRS)
def test_what_computes_the_same_is_equivalent_and_the_rest_parts_where_it_begins(name):
    """No rewriting is a divergence; a change is named first at its layer, with its cause."""
    comparison = compared(name)
    assert comparison.equivalent is (name in BENIGN), str(comparison)
    if name in HARMFUL:
        assert comparison.first_divergence.layer == HARMFUL[name][1], str(comparison)
    assert WORDS.get(name, "") in (str if name in BENIGN else repr)(comparison)


@pytest.mark.parametrize("case", CHANGES)
def test_what_one_change_is_called(case):
    """Whether it is a divergence, of which layer, and in which words."""
    build, inputs, name, change, layer, words, facts = CHANGES[case]
    reference, candidate = twins(build)
    owner, _, attribute = name.rpartition(".")
    module = candidate.get_submodule(owner)
    if callable(change):
        tensor = getattr(module, attribute).data
        tensor.copy_(change(tensor))
    else:
        setattr(module, attribute, change)
    comparison = compare(reference, candidate, inputs)
    divergence = comparison.first_divergence
    assert comparison.equivalent is (divergence is None)
    assert (divergence.layer if divergence else None) == layer, str(comparison)
    assert words in repr(comparison) if divergence else words in "\n".join(comparison.notes)
    for fact, value in facts.items():
        assert operator.attrgetter(fact)(divergence) == value
    if case == "a word that is not in the batch":
        assert not comparison.diverged
        assert "other weights, although on this batch" in repr(comparison)
    if case == "what a step leaves in the buffers":
        assert "momentum is 0.01, was 0.1" in divergence.cause


@pytest.fixture(scope="module")
def broken() -> Comparison:
    """The comparison of a model with one whose second norm has another epsilon."""
    reference, candidate = twins(Gpt)
    candidate.blocks[1].ln2.eps = 1e-3
    return compare(reference, candidate, batch(reference))


def test_the_first_line_tells_the_whole_story(broken):
    """Where, what is the same, what is not, and the likely cause."""
    with pytest.raises(ModelHealthError) as caught:
        broken.assert_equivalent()
    first, *rest = str(caught.value).splitlines()
    assert first == (
        "not equivalent: blocks.1.ln2: same input, same weights, other output: "
        "eps is 0.001, was 1e-05"
    )
    assert len(rest) < 26
    assert any("other layers only show what began in blocks.1.ln2" in line for line in rest)
    assert any(line.startswith("  !  blocks.1.ln2") for line in rest)
    assert isinstance(caught.value.report, Comparison)


def test_what_only_changed_its_name_passes_and_is_listed():
    """A test that wants every name as it was asserts that there is none."""
    reference, candidate = BENIGN["blocks_renamed"]()
    changed = compare(reference, candidate, batch(reference)).changed_names
    assert ("blocks.0", "h.0") in {(pair.reference, pair.candidate) for pair in changed}
    assert not compare(reference, reference, batch(reference)).changed_names


def test_layers_are_found_by_either_name():
    """A layer's errors are read by its name in the reference or in the candidate."""
    comparison = compared("blocks_renamed")
    assert comparison["blocks.1.up"] is comparison["h.1.up"]
    assert comparison["blocks.1.up"].pair.change is Change.RENAMED
    assert comparison["blocks.1.up"].worst("activations").difference.count == 2 * 10 * 96
    with pytest.raises(LayerNotFoundError, match=r"did you mean 'blocks\.1\.up'"):
        comparison["blocks.1.upp"]
    shown = comparison._repr_html_()  # escaped
    assert "<b>equivalent by bitwise equality: " in shown
    assert "blocks.0 -&gt; h.0" in shown


def test_the_measures_of_a_layer_are_those_of_its_tensors():
    """Those that a forward hook and two plain backward passes give."""
    reference, candidate = twins(Mlp)
    candidate.fc2.weight.data[3] *= 1.5
    target, outputs = torch.randn(8, 4), []
    comparison = compare(reference, candidate, X, target, loss=nn.functional.mse_loss)
    for model in (reference, candidate):
        handle = model.fc2.register_forward_hook(lambda m, i, o: outputs.append(o.detach()))
        nn.functional.mse_loss(model(X), target).backward()
        handle.remove()
    a, b = (output.double() for output in outputs)
    difference = comparison["fc2"].worst("activations").difference
    assert difference.max_abs == (a - b).abs().max()
    assert difference.relative_l2 == pytest.approx(float((a - b).norm() / a.norm()))
    assert difference.unequal == int((a != b).sum())
    (gradient,) = [r for r in comparison["head"].tensors if r.key.tensor == "weight"]
    error = (reference.head.weight.grad - candidate.head.weight.grad).double().norm()
    assert gradient.difference.error_norm == pytest.approx(float(error), rel=1e-5)


def test_it_is_plain_data_on_request(broken):
    """`to_dict` goes through JSON and holds verdict, culprit and every tensor's errors."""
    data = json.loads(json.dumps(broken.to_dict()))
    assert data["equivalent"] is False
    assert data["divergence"]["layer"] == "blocks.1.ln2"
    layer = next(x for x in data["layers"] if x["reference"] == "blocks.1.ln2")
    assert layer["diverged"]
    assert {t["role"] for t in layer["tensors"]} >= {"inputs", "activations", "gradients"}
    assert pickle.loads(pickle.dumps(broken)).to_dict() == broken.to_dict()


def test_a_picture_shows_every_layer_that_was_compared(broken):
    """The figure has a row for each, and the culprit's name is red."""
    figure = broken.plot_errors()
    labels = {text.get_text(): text.get_color() for text in figure.axes[0].texts}
    layers = [layer for layer in broken.layers.values() if layer.tensors]
    assert {layer.label for layer in layers} <= labels.keys()
    assert labels["blocks.1.ln2"] != labels["blocks.0.ln2"]
    assert any(label.startswith("not equivalent") for label in labels)
    same = compared("the_same_object").plot_errors()
    assert same.axes[0].texts[0].get_text().startswith("equivalent")


@pytest.mark.parametrize("name", ["nan_in_a_weight", "parameter_frozen"])
def test_a_picture_is_drawn_of_what_has_no_number(name):
    """NaN and missing gradients are drawn as crosses, not as errors of the plot."""
    compared(name).plot_errors().canvas.draw()


def test_compiled_code_is_what_is_compared():
    """A backend whose outputs, or the averages that it leaves, are wrong is caught."""

    def backend(of_outputs: float, of_averages: float) -> Callable[..., Any]:
        def run(graph: torch.fx.GraphModule, *args: Tensor) -> tuple[Any, ...]:
            result = tuple(
                y * of_outputs if isinstance(y, Tensor) and y.is_floating_point() else y
                for y in graph(*args)
            )
            for tensor in args:
                if tensor.shape == (8,) and not tensor.requires_grad:
                    tensor.data.add_(of_averages)  # unseen by autograd
            return result

        return lambda graph, example: functools.partial(run, graph)

    def divergence(of_outputs: float, of_averages: float) -> Any:
        torch.compiler.reset()
        made = torch.compile(candidate, backend=backend(of_outputs, of_averages))
        return compare(reference, made, inputs).first_divergence

    reference, candidate = twins(lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)))
    inputs = torch.randn(8, 16)
    assert divergence(1.0, 0.0) is None
    assert divergence(1.01, 0.0) is not None
    found = divergence(1.0, 1.0)
    assert (found.layer, found.kind) == ("1", "buffers")


# ---- what is measured of two tensors -------------------------------------------------------------


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_measure_is_that_of_numpy(dtype):
    """Norms, errors and place are those of a float64 computation, in several chunks too."""
    torch.manual_seed(0)
    reference = torch.randn(1031, 1031).to(dtype)
    candidate = (reference * (1 + 0.01 * torch.randn(1031, 1031))).to(dtype)
    a, b = reference.double().numpy(), candidate.double().numpy()
    found = measure(reference, candidate)
    error = np.abs(a - b)
    assert found.count == 1031 * 1031 > 1 << 20
    assert found.unequal == (a != b).sum()
    assert found.max_abs == error.max()
    assert found.at == np.unravel_index(error.argmax(), a.shape)
    assert (found.expected, found.found) == (a[found.at], b[found.at])
    assert found.error_norm == pytest.approx(np.linalg.norm(a - b))
    assert found.relative_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a))


@pytest.mark.parametrize(
    ("a", "b", "unequal", "nans", "nonfinite"),
    [
        ([1.0, NAN], [1.0, NAN], 0, 1, 0),
        ([0.0], [-0.0], 0, 0, 0),
        ([1.0, NAN], [NAN, 1.0], 2, 0, 2),
        ([1.0, NAN], [2.0, NAN], 1, 1, 0),
        ([1.0], [1.0000001], 1, 0, 0),
        ([INF], [-INF], 1, 0, 1),
        ([NAN, INF, 2.0, -INF], [NAN, INF, 2.5, 0.0], 2, 1, 1),
    ],
)
def test_equal_means_every_element_and_nan_to_nan(a, b, unequal, nans, nonfinite):
    """NaN is equal to NaN, and zero to negative zero; what is none on one side is counted."""
    found = measure(torch.tensor(a), torch.tensor(b))
    assert (found.unequal, found.nan_both, found.nonfinite) == (unequal, nans, nonfinite)
