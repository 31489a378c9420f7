"""What checks measure, held against plain torch, and the limits that users set for them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks import initial_weights, inputs, normalization, saturation
from corpus.checks.dead_units import dead
from corpus.checks.parts import Mlp, Net, Scales, holding, normal
from corpus.models.hooked import make
from pytest_modelhealth import Inspector
from pytest_modelhealth.checks.facts import is_fresh, linear_maps, seems_trained
from pytest_modelhealth.errors import SettingsError
from tests.capture.architectures import ARCHITECTURES


def says(report, check):
    """Return what a check says, but for what is folded under another finding."""
    return [f for f in report._judgement.findings if f.check == check]


def mean_square(output):
    """A loss without a target."""
    return output.square().mean()


# ---- grad_norm ----------------------------------------------------------------------------------


@pytest.fixture
def norms(mlp, batch):
    """The gradient norm of each layer's own parameters, by plain torch in float64."""
    mean_square(mlp(batch)).backward()
    own = {name: [*module.parameters(recurse=False)] for name, module in mlp.named_modules()}
    truth = {
        name: math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters))
        for name, parameters in own.items()
        if parameters
    }
    mlp.zero_grad()
    return truth


def test_gradient_norm_is_that_of_the_layers_own_parameters(norms, mlp, batch, inspect):
    """The value reported for each layer is the L2 norm over its weight and bias."""
    report = inspect(mlp, batch, loss=mean_square, settings={"max_grad_norm": 0.0})
    assert {v.layer: v.value for v in report.violations} == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize(
    ("setting", "factor", "broken"),
    [
        ("max_grad_norm", 1.01, 0),
        ("max_grad_norm", 0.99, 1),
        ("min_grad_norm", 1.01, 1),
        ("min_grad_norm", 0.99, 0),
    ],
)
def test_bounds_of_the_user(setting, factor, broken, norms, mlp, batch, inspect):
    """A norm beyond a limit is a violation that names limit and origin."""
    limit = factor * (max if setting == "max_grad_norm" else min)(norms.values())
    report = inspect(mlp, batch, loss=mean_square, settings={setting: limit})
    assert len(report.violations) == broken
    for violation in report.violations:
        assert violation.limit == pytest.approx(limit)
        assert violation.origin == "argument of inspector"


def test_norm_over_batches_does_not_grow_with_their_number(norms, mlp, batch):
    """Over batches the norm is the root mean square, so that a limit means the same."""
    inspector = Inspector(mlp, max_grad_norm=1.01 * max(norms.values()))
    report = inspector.run_batches([(batch, torch.zeros(64, 10))] * 5, loss=F.mse_loss)
    assert report.observation.batches == 5
    assert report.healthy


# ---- activations and samples --------------------------------------------------------------------


def test_growth_is_the_root_mean_square_by_that_of_the_inputs(batch, inspect):
    """By plain torch in float64."""
    model = nn.Sequential(nn.Linear(16, 32), Scales(1e4), nn.Linear(32, 4))
    (violation,) = says(inspect(model, batch), "activation_scale")
    with torch.no_grad():
        out = model[:2](batch).double().square().mean().sqrt()
    assert violation.value == pytest.approx((out / batch.double().square().mean().sqrt()).item())


@pytest.mark.parametrize(
    ("fraction", "limit", "healthy"), [(0.5, 0.6, True), (0.5, 0.4, False), (0.75, 0.75, True)]
)
def test_dead_fraction_is_compared_with_its_limit(fraction, limit, healthy, batch, inspect):
    """A dead fraction equal to its limit passes."""
    first = dead(holding(nn.Linear(16, 32), bias=50.0), fraction)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(32, 4))
    report = inspect(model, batch, settings={"max_dead_fraction": limit})
    assert report["1"].activations.dead_fraction == fraction
    assert report.healthy is healthy
    for violation in report.violations:
        assert (violation.role, violation.value) == ("activations", fraction)


def test_channels_are_the_units_of_a_convolution(inspect):
    """One dead channel of four is a quarter, however many pixels it has."""
    norm = dead(nn.BatchNorm2d(4), 1 / 4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU()).eval()
    assert inspect(model, torch.randn(32, 3, 8, 8))["2"].activations.dead_fraction == 0.25


def test_dead_in_one_batch_but_not_in_another_is_alive(batch):
    """A unit is dead only if it is dead over all batches."""
    first = holding(nn.Linear(16, 8), weight=lambda w: w.uniform_(0.5, 1.5), bias=0.0)
    inspector = Inspector(nn.Sequential(first, nn.ReLU()))
    negative, positive = -batch.abs(), batch.abs()
    assert not inspector.run_inspection(negative).healthy
    assert inspector.run_batches([negative, positive]).healthy
    assert not inspector.run_batches([negative, negative]).healthy


@pytest.mark.parametrize(("limit", "violated"), [(0.4, True), (0.6, False)])
def test_saturation_is_the_part_that_is_flat(limit, violated, batch, inspect):
    """Half of the inputs are at 100, the others at 0.5: by hand, one half is saturated."""
    model = saturation.bounded(torch.tanh)
    values = torch.tensor([100.0, -100.0, 0.5, -0.5]).repeat(8)
    holding(model.fc, weight=0.0, bias=lambda bias: bias.copy_(values))
    report = inspect(model, batch, settings={"max_saturated_fraction": limit})
    found = says(report, "saturation") + [f for v in report.violations for f in v.folded]
    found = [f for f in found if f.check == "saturation"]
    assert [v.value for v in found] == [0.5] * violated
    assert all("bias" in v.cause for v in found)


def test_one_hot_value_is_the_mean_sum_of_squares(inspect):
    """Held against the rows themselves."""
    model, tokens = saturation.attention(8.0, fused=False)
    scores = model.q(tokens) @ model.k(tokens).transpose(-1, -2) * 8.0
    rows = torch.softmax(scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf), -1)
    report = inspect(model, tokens, settings={"max_one_hot": 0.5})
    every = [f for v in report.violations for f in (v, *v.folded)]
    (violation,) = (f for f in every if f.check == "saturation")
    assert violation.value == pytest.approx(rows.double().square().sum(-1).mean().item(), rel=1e-6)


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "t5", "sam"])
def test_positions_and_class_tokens_are_equal_for_all_samples(name, inspect):
    """They are features of the model, and the output differs all the same."""
    found = says(inspect(*make(ARCHITECTURES[name])), "collapse")
    assert [(f.layer, f.grade) for f in found] == [("mask_decoder", "unsure")] * (name == "sam")


@pytest.mark.parametrize("most", [3, 5, 8])
def test_flow_that_ends_before_the_output_breaks_nothing(most, monkeypatch, batch, inspect):
    """Of a run of too many operations the rest was not followed; who did it is still named."""
    monkeypatch.setattr("pytest_modelhealth.capture.observing.flow.rows.MOST_VERTICES", most)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), Net(lambda m, x: x * 0 + 0.5), nn.Linear(32, 4)
    )
    report = inspect(model, batch, settings={"checks": ["collapse"]})
    assert [f.layer for f in report.violations] == ["2"]
    assert not report.flow.is_exact


# ---- weights ------------------------------------------------------------------------------------


# routers of N(0, 1), a vision encoder at 1e-10, kernels initialised by their fan-out
@pytest.mark.parametrize("name", ["switch", "sam", "mobilenet", "gpt2", "mamba"])
def test_transformers_at_the_edge_of_the_limits_are_healthy(name, inspect):
    """Each has weights that another network would not have."""
    assert says(inspect(*make(ARCHITECTURES[name])), "initial_weights") == []


def test_limits_of_the_user_count(batch, inspect):
    """The default of torch is 0.58, over a limit of 0.5; a batch of normal values has 1."""
    report = inspect(initial_weights.plain(), batch, settings={"max_weight_scale": 0.5})
    assert [f.layer for f in says(report, "initial_weights")] == ["0", "2"]
    report = inspect(Mlp(), batch, settings={"max_input_rms": 0.5})
    assert [f.grade for f in says(report, "inputs")] == ["fail"]
    model, values = inputs.features(lambda x: 100 + x)  # which is only warned of by default
    report = inspect(model, values, settings={"max_input_rms": 0.5})
    assert [f.grade for f in says(report, "inputs")] == ["fail"]


def test_recurrent_layer_of_zeros_is_named_once(inspect):
    """Whatever takes its last state, nothing passes it."""
    model, values = initial_weights.recurrent(-1.0)
    holding(model.lstm, **{name: 0.0 for name, _ in model.lstm.named_parameters()})
    (violation,) = inspect(model, values).violations
    assert (violation.check, violation.layer) == ("initial_weights", "lstm")
    assert (violation.tensor, violation.value) == ("weight_ih_l0", 0.0)


def test_large_weights_that_are_scaled_down_in_use_are_no_fault(batch, inspect):
    """What counts is what the weights do to the signal: so StyleGAN has its layers."""

    def equalised(size):
        layer = holding(nn.Linear(size, 64), weight=normal(1.0))
        layer.forward = lambda x: F.linear(x, layer.weight / math.sqrt(size), layer.bias)
        return layer

    report = inspect(
        nn.Sequential(equalised(16), nn.ReLU(), equalised(64), nn.Linear(64, 4)), batch
    )
    assert says(report, "initial_weights") == []
    assert linear_maps(report["2"])[0].scale > 4.5


def test_scale_is_standard_deviation_times_root_of_the_fan_in(batch, inspect):
    """For linear and convolution layers, plain and transposed, the fan-in is counted by hand."""
    model = nn.Sequential(
        nn.Linear(16, 48), nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 5, (2, 3)),
        nn.ConvTranspose2d(5, 7, 3),
    )  # fmt: skip
    report = inspect(model, batch)
    for name, fan_in in {"0": 16, "2": 3 * 2 * 3, "3": 5 * 3 * 3}.items():
        (linear,) = linear_maps(report[name])
        std = model.get_submodule(name).weight.double().std(unbiased=False).item()
        assert linear.fan_in == fan_in
        assert linear.scale == pytest.approx(std * math.sqrt(fan_in), rel=1e-6)


def test_initialised_and_trained_are_told_apart(batch, inspect):
    """A few steps of an optimizer move the biases beyond the bound of their initialiser."""
    model = initial_weights.plain()
    assert not seems_trained(inspect(model, batch).observation)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    assert seems_trained(inspect(model, batch).observation)


@pytest.mark.parametrize("training", [True, False])
def test_batches_that_a_normalisation_counted_are_training(training, batch, inspect):
    """A net that is not fresh has counted more batches than that of the inspection itself."""
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
    assert is_fresh(inspect(model.train(training), batch).observation)
    model.train()
    for _ in range(2):
        model(batch)
    observation = inspect(model.train(training), batch).observation
    assert seems_trained(observation)
    assert not is_fresh(observation)


def test_mismatch_of_running_statistics_is_the_output_by_scale_and_shift(batch, inspect):
    """By plain torch in float64."""
    model = copy.deepcopy(normalization.trained(**{"1.running_mean": lambda m: m.add_(30.0)}))
    violation = says(inspect(model, batch), "normalization")[0]
    with torch.no_grad():
        out = model[:2](batch).double()
        scale, shift = (p.double().square().mean().sqrt().item() for p in model[1].parameters())
    expected = out.square().mean().sqrt().item() / math.hypot(scale, shift)
    assert violation.value == pytest.approx(expected, rel=1e-5)


# ---- loss ---------------------------------------------------------------------------------------


@pytest.fixture
def labels():
    """A class for each sample of the batch."""
    return torch.randint(0, 10, (64,))


@pytest.fixture
def sure(mlp):
    """A fresh classifier that is too sure of itself."""
    nn.init.uniform_(mlp.head.weight, -100.0, 100.0)
    return mlp


def of_loss(report):
    """Return the layers that the check of losses names."""
    return [found.layer for found in report.violations if found.check == "loss"]


def test_initial_loss_is_compared_with_a_uniform_guess(sure, batch, labels, inspect):
    """The value is how many times ln(classes) it is, and the user may allow more."""
    options = {"loss": F.cross_entropy, "settings": {"checks": ["loss"]}}
    (violation,) = inspect(sure, batch, labels, **options).violations
    with torch.no_grad():
        expected = F.cross_entropy(sure(batch), labels).item() / math.log(10)
    assert violation.layer == "head"
    assert violation.value == pytest.approx(expected, rel=1e-5)
    assert (violation.limit, violation.origin) == (10.0, "default")
    options["settings"] = {"max_initial_loss": 1e6}
    assert of_loss(inspect(sure, batch, labels, **options)) == []


def test_initial_loss_of_few_targets_is_inconclusive(sure, batch, labels, inspect):
    """Four samples say little about a loss."""
    options = {"loss": F.cross_entropy, "settings": {"checks": ["loss"]}}
    report = inspect(sure, batch[:4], labels[:4], **options)
    assert [found.grade for found in says(report, "loss")] == ["unsure"]
    assert report.verdict == "inconclusive"


def test_loss_of_a_trained_model_may_be_large(mlp, batch, labels, inspect):
    """A trained classifier on labels that are not its own is no fault of its initialisation."""
    optimizer = torch.optim.Adam(mlp.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(mlp(batch), labels).backward()
        optimizer.step()
    holding(mlp.head, weight=lambda weight: weight.mul_(500.0))
    report = inspect(mlp, batch, (labels + 1) % 10, loss=F.cross_entropy)
    assert report.loss > 10 * math.log(10)
    assert of_loss(report) == []


def test_large_inputs_are_not_the_heads_doing(mlp, batch, labels, inspect):
    """Where large numbers come in, the layer that makes the logits is not to blame."""
    report = inspect(mlp, 1e4 * batch, labels, loss=F.cross_entropy)
    assert report.loss > 10 * math.log(10)
    assert of_loss(report) == []


def test_softmax_without_a_graph_is_found(mlp, batch, labels, inspect):
    """The numbers tell where autograd does not."""
    with torch.no_grad():
        report = inspect(nn.Sequential(mlp, nn.Softmax(1)), batch, labels, loss=F.cross_entropy)
    assert of_loss(report) == ["1"]


def test_loss_module_inside_a_model_is_seen(mlp, batch, labels, inspect):
    """A loss of torch.nn that the model's forward calls is the layer that calls the function."""
    model = Net(
        lambda m, x, labels: m.criterion(m.model(x), labels),
        model=nn.Sequential(mlp, nn.Softmax(1)), criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    report = inspect(model, (batch, labels))
    assert [call.layer for call in report.observation.loss_calls] == ["criterion"]
    assert of_loss(report) == ["model.1"]


def test_fault_in_the_model_does_not_hide_that_of_the_loss(batch, inspect):
    """How the loss is written follows from nothing else, and is a story of its own."""
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.zeros_(model[0].weight)
    report = inspect(model, batch, torch.randn(64), loss=lambda o, t: (o - t).square().mean())
    assert len(of_loss(report)) == 1
    assert len(report.violations) > 1


def test_loss_of_something_else_is_named(mlp, batch, inspect):
    """A loss that does not depend on the output trains nothing."""
    other = torch.ones(3, requires_grad=True)
    report = inspect(mlp, batch, loss=lambda o: other.pow(2).sum())
    (found,) = says(report, "loss")
    assert "does not depend on the output" in found.message


# ---- headroom ------------------------------------------------------------------------------------


def of_headroom(report, check="headroom"):
    """The layer, role and value of each violation, folded ones included."""
    everything = [v for root in report.violations for v in (root, *root.folded)]
    return [(v.layer, v.role, v.value) for v in everything if v.check == check]


@pytest.mark.parametrize(("factor", "names"), [(1.0, []), (20000.0, ["0"])])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_near_the_largest_are_named(factor, names, dtype, batch, inspect):
    """The part used is the largest value over 65504; float32 has room for more."""
    values = (batch / batch.abs().max() * 2).to(dtype)
    report = inspect(nn.Sequential(Scales(factor)), values, backward=False)
    seen = [(layer, role) for layer, role, _ in of_headroom(report)]
    expected = names if dtype is torch.float16 else []
    assert seen == [(name, "activations") for name in expected]
    for _, _, value in of_headroom(report):
        assert value == pytest.approx(40000.0 / 65504.0, rel=1e-3)


def test_masks_at_the_lowest_number_are_no_overflow(batch, inspect):
    """They are made to be as low as the dtype goes."""

    class Masks(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 0, torch.finfo(x.dtype).min)

    assert of_headroom(inspect(nn.Sequential(Masks()), batch.half(), backward=False)) == []


@pytest.mark.parametrize(
    ("planned", "names"),
    [
        (None, []),
        ("bfloat16", []),
        ("float16", ["0"]),
        (torch.float16, ["0"]),
        ("torch.float16", ["0"]),
    ],
)
def test_planned_dtype(planned, names, batch, inspect):
    """Values that float32 holds, and float16 would not."""
    settings = {} if planned is None else {"planned_dtype": planned}
    report = inspect(nn.Sequential(Scales(1e6)), batch, backward=False, settings=settings)
    assert [layer for layer, _, _ in of_headroom(report)] == names


def test_planned_dtype_that_is_unknown_is_refused(mlp, batch, inspect):
    """The message lists those that are known, before anything runs."""
    with pytest.raises(SettingsError, match="planned_dtype must be one of float16, bfloat16"):
        inspect(mlp, batch, settings={"planned_dtype": "half"})


def test_gradients_of_which_none_is_finite_are_left_to_another_check(mlp, batch, inspect):
    """There is nothing to count: `finite` names them, and this check runs to its end."""
    settings = {"planned_dtype": "float16"}
    report = inspect(mlp, batch, loss=lambda out: out.sum() * float("nan"), settings=settings)
    assert report._judgement.broken == ()
    assert {violation.check for violation in report.violations} == {"finite"}
