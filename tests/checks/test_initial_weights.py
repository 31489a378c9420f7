"""The `initial_weights` check: weights that no initialiser should leave."""

import math

import pytest
import torch
from torch import nn

from corpus.models.hooked import make
from pytest_modelhealth.checks.facts import is_fresh, linear_maps, was_trained
from tests.capture.architectures import ARCHITECTURES


def found(report):
    """The layers that the check names."""
    return [v.layer for v in report.violations if v.check == "initial_weights"]


@pytest.fixture
def plain():
    """A plain network whose gradients survive whatever is done to one layer."""
    return nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )


def test_scale_is_standard_deviation_times_root_of_the_fan_in(batch, inspect):
    """For linear and convolution layers, plain and transposed, the fan-in is counted by hand."""
    model = nn.Sequential(
        nn.Linear(16, 48), nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 5, (2, 3)),
        nn.ConvTranspose2d(5, 7, 3),
    )  # fmt: skip
    report = inspect(model, batch)
    fans = {"0": 16, "2": 3 * 2 * 3, "3": 5 * 3 * 3}
    for name, fan_in in fans.items():
        (linear,) = linear_maps(report[name])
        weight = model.get_submodule(name).weight.double()
        assert linear.fan_in == fan_in
        assert linear.scale == pytest.approx(
            weight.std(unbiased=False).item() * math.sqrt(fan_in), rel=1e-6
        )


def test_zero_weights_in_a_plain_path_are_named(plain, batch, inspect):
    """The layer after it takes a constant; the cause says which one."""
    nn.init.zeros_(plain[2].weight)
    report = inspect(plain, batch)
    violation = next(v for v in report.violations if v.check == "initial_weights")
    assert (violation.layer, violation.tensor, violation.value) == ("2", "weight", 0.0)
    assert "'4'" in violation.cause


class Gated(nn.Module):
    """A residual branch, an adapter, a gate and a head that all start at zero."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.inner, self.outer = nn.Linear(16, 32), nn.Linear(32, 16)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.gate = nn.Linear(16, 16)
        for layer in (self.outer, self.up, self.gate, self.head):
            nn.init.zeros_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.outer(torch.relu(self.inner(x)))
        x = x + self.up(self.down(x))
        return self.head(x * (1 + self.gate(x)))


def test_zero_is_no_fault_in_gates_heads_adapters_and_residual_branches(batch, inspect):
    """Their output is added, multiplied, or the model's own."""
    assert found(inspect(Gated(), batch)) == []


def test_zero_first_layer_of_a_residual_branch_is_a_fault(batch, inspect):
    """Only the last layer of a branch may start at zero."""
    model = Gated()
    nn.init.zeros_(model.inner.weight)
    assert found(inspect(model, batch)) == ["inner"]


class Beside(nn.Module):
    """A head outside the loss and a state of the same numbers, which a layer takes."""

    def __init__(self, fill):
        super().__init__()
        self.stem, self.aside = nn.Linear(16, 16), nn.Linear(16, 16)
        self.recurrent, self.head, self.fill = nn.Linear(16, 16), nn.Linear(16, 4), fill
        nn.init.zeros_(self.aside.weight)
        nn.init.zeros_(self.aside.bias)

    def forward(self, x):
        h = self.stem(x)
        self.aside(h)
        return self.head(h + self.recurrent(torch.full_like(h, self.fill)))


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_zero_head_beside_a_state_of_zeros_is_no_fault(fill, batch, inspect):
    """Equal numbers are no way from one to the other."""
    assert found(inspect(Beside(fill), batch)) == []


class Weighed(nn.Module):
    """A branch of zeros that weighs itself, as squeeze-and-excitation does, or does not."""

    def __init__(self, is_weighed):
        super().__init__()
        self.stem, self.last, self.head = (nn.Linear(16, 16) for _ in range(3))
        self.squeeze, self.is_weighed = nn.Linear(16, 16), is_weighed
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        x = self.stem(x)
        branch = self.last(x)
        weights = torch.sigmoid(self.squeeze(branch))
        return self.head(x + (weights * branch if self.is_weighed else weights))


@pytest.mark.parametrize(("is_weighed", "names"), [(True, []), (False, ["last"])])
def test_zero_branch_that_is_multiplied_is_no_fault(is_weighed, names, batch, inspect):
    """Its gradient comes through the product; through the next weights alone none does."""
    assert found(inspect(Weighed(is_weighed), batch)) == names


class FirstState(nn.Module):
    """The first state of a recurrence, made of a condition, or its input."""

    def __init__(self, is_state):
        super().__init__()
        self.make, self.cell, self.head = nn.Linear(16, 16), nn.GRUCell(16, 16), nn.Linear(16, 4)
        self.is_state = is_state
        nn.init.zeros_(self.make.weight)

    def forward(self, x):
        return self.head(self.cell(x, self.make(x)) if self.is_state else self.cell(self.make(x)))


@pytest.mark.parametrize(("is_state", "names"), [(True, []), (False, ["make"])])
def test_zero_first_state_is_no_fault(is_state, names, batch, inspect):
    """The recurrence has its input beside it."""
    assert found(inspect(FirstState(is_state), batch)) == names


def test_constant_weights_are_named(plain, batch, inspect):
    """They make all units of the layer one."""
    nn.init.constant_(plain[0].weight, 0.1)
    violation = next(v for v in inspect(plain, batch).violations if v.check == "initial_weights")
    assert violation.layer == "0"
    assert "constant" in violation.cause


def test_constant_weights_that_are_frozen_are_a_filter(batch, inspect):
    """A mean over neighbours is written as a frozen convolution."""
    blur = nn.Linear(16, 16, bias=False).requires_grad_(False)
    nn.init.constant_(blur.weight, 1 / 16)
    assert found(inspect(nn.Sequential(blur, nn.Linear(16, 4)), batch)) == []


@pytest.mark.parametrize(("factor", "names"), [(1.0, []), (5.0, []), (12.0, ["2"]), (300.0, ["2"])])
def test_large_weights_are_named(factor, names, plain, batch, inspect):
    """Torch's default has a scale of 0.58: five times that is 2.9, twelve times 6.9."""
    with torch.no_grad():
        plain[2].weight.mul_(factor)
    assert found(inspect(plain, batch)) == names


@pytest.mark.parametrize(("factor", "names"), [(0.1, []), (0.01, ["2"]), (1e-4, ["2"])])
def test_small_weights_are_named(factor, names, plain, batch, inspect):
    """One layer a hundred times smaller than the others cuts signal and gradient."""
    with torch.no_grad():
        plain[2].weight.mul_(factor)
    assert found(inspect(plain, batch)) == names


def test_small_weights_before_a_normalisation_are_no_fault(batch, inspect):
    """What follows does not depend on their scale."""
    layers = nn.Linear(16, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4)
    nn.init.normal_(layers[1].weight, std=1e-4)
    assert found(inspect(nn.Sequential(*layers), batch)) == []


@pytest.mark.parametrize(("std", "names"), [(15 / 8, []), (40 / 8, ["1"])])
def test_large_weights_before_a_normalisation_have_more_room(std, names, batch, inspect):
    """It takes their scale away: 15 at a fan-in of 64 is more than a head may have, 40 too much."""
    layers = nn.Linear(16, 64), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4)
    nn.init.normal_(layers[1].weight, std=std)
    assert found(inspect(nn.Sequential(*layers), batch)) == names


def test_small_weights_that_many_layers_share_are_a_choice(plain, batch, inspect):
    """No single layer is to blame."""
    for layer in plain[::2]:
        nn.init.normal_(layer.weight, std=1e-4)
    assert found(inspect(plain, batch)) == []


class Equalised(nn.Linear):
    """StyleGAN's layer: weights of N(0, 1), scaled when they are used."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        nn.init.normal_(self.weight)

    def forward(self, x):
        return nn.functional.linear(x, self.weight / math.sqrt(self.in_features), self.bias)


def test_large_weights_that_are_scaled_down_in_use_are_no_fault(batch, inspect):
    """What counts is what the weights do to the signal."""
    model = nn.Sequential(Equalised(16, 64), nn.ReLU(), Equalised(64, 64), nn.Linear(64, 4))
    report = inspect(model, batch)
    assert linear_maps(report["2"])[0].scale > 4.5
    assert found(report) == []


def test_initialised_and_trained_are_told_apart(plain, batch, inspect):
    """A few steps of an optimizer move the biases beyond the bound of their initialiser."""
    assert not was_trained(inspect(plain, batch).observation)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        plain(batch).square().mean().backward()
        optimizer.step()
    assert was_trained(inspect(plain, batch).observation)


@pytest.mark.parametrize("training", [True, False])
def test_batches_that_a_normalisation_counted_are_training(training, batch, inspect):
    """A net that is not fresh has counted more batches than that of the inspection itself."""
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
    assert is_fresh(inspect(model.train(training), batch).observation)
    model.train()
    for _ in range(2):
        model(batch)
    observation = inspect(model.train(training), batch).observation
    assert was_trained(observation)
    assert not is_fresh(observation)


@pytest.mark.parametrize("name", ["switch", "sam", "mobilenet", "gpt2", "mamba"])
def test_transformers_at_the_edge_of_the_limits_are_healthy(name, inspect):
    """Routers of N(0, 1), a vision encoder at 1e-10, kernels initialised by their fan-out."""
    model, inputs = make(ARCHITECTURES[name])
    assert found(inspect(model, inputs)) == []


def test_a_limit_by_the_user_counts(plain, batch, inspect):
    """The default of torch is 0.58, over a limit of 0.5."""
    assert found(inspect(plain, batch, settings={"max_weight_scale": 0.5})) == ["0", "2"]


@pytest.mark.parametrize(("std", "names"), [(1.0, []), (3.0, ["4"])])
def test_heads_have_more_room(std, names, plain, batch, inspect):
    """N(0, 1) at a fan-in of 64 is a scale of 8: over the limit, within that of a head."""
    nn.init.normal_(plain[4].weight, std=std)
    assert found(inspect(plain, batch)) == names


def test_recurrent_layer_of_zeros_is_named_once(inspect):
    """Whatever takes its last state, nothing passes it."""
    model = Recurrent()
    assert inspect(model, torch.randn(64, 5, 8)).healthy
    for parameter in model.lstm.parameters():
        nn.init.zeros_(parameter)
    found = inspect(model, torch.randn(64, 5, 8)).violations
    assert [(v.check, v.layer, v.tensor) for v in found] == [
        ("initial_weights", "lstm", "weight_ih_l0")
    ]


class Recurrent(nn.Module):
    """Reads the last state."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize(("low", "names"), [(0.0, ["weight_hh_l0"]), (-1.0, [])])
def test_recurrent_weights_of_one_sign_are_named(low, names, inspect):
    """uniform_(0, 1) is no wider than (-1, 1), but sums up what its inputs share."""
    model = Recurrent()
    for name in ("weight_ih_l0", "weight_hh_l0"):
        nn.init.uniform_(getattr(model.lstm, name), low, 1.0)
    report = inspect(model, torch.randn(64, 8, 8))
    sided = [v for v in report.violations if v.check == "initial_weights"]
    assert [v.tensor for v in sided] == names
    assert all("one-sided" in v.message for v in sided)


@pytest.mark.parametrize(("factor", "word"), [(1.0, None), (0.0, "zero"), (100.0, "too large")])
def test_projections_of_torch_attention(factor, word, inspect):
    """Queries, keys and values in one matrix are judged as three."""
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True, dropout=0.0)
    model.self_attn.in_proj_weight.data *= factor
    found = [
        v
        for v in inspect(model, torch.randn(16, 8, 16)).violations
        if (v.check, v.layer) == ("initial_weights", "self_attn")
    ]
    assert len(found) == (word is not None)
    if word:
        assert word in f"{found[0].message} {found[0].cause}"


class TrainedScale(nn.Module):
    """A normalisation whose scale was trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(16))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def test_trained_part_with_a_new_head(batch, inspect):
    """Weights may have grown in training although a new norm and a bias of zero stand behind."""
    grown, head = nn.Linear(16, 64, bias=False), nn.Linear(64, 10)
    nn.init.normal_(grown.weight, 0.0, 1.8)
    nn.init.zeros_(head.bias)
    model = nn.Sequential(TrainedScale(), grown, nn.SiLU(), nn.LayerNorm(64), head)
    assert found(inspect(model, batch)) == []
    model[0] = nn.LayerNorm(16)
    assert found(inspect(model, batch)) == ["1"]


class StateOfZeros(nn.Module):
    """Weights of a state, which is zero at first."""

    def __init__(self):
        super().__init__()
        self.stem, self.state, self.head = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        nn.init.normal_(self.state.weight, 0.0, 2.0)

    def forward(self, x):
        return self.head(torch.tanh(self.stem(x) + self.state(torch.zeros(len(x), 64))))


def test_large_weights_of_a_state_of_zeros(batch, inspect):
    """What they are given tells nothing, and their scale does; the gates of an LSTM likewise."""
    assert found(inspect(StateOfZeros(), batch)) == ["state"]
    lstm = nn.LSTM(16, 32, batch_first=True)
    for name, parameter in lstm.named_parameters():
        if "weight" in name:
            nn.init.normal_(parameter, 0.0, 3.0)
    report = inspect(lstm, torch.zeros(64, 5, 16))
    assert report._judgement.broken == ()
    assert any(v.check == "initial_weights" for root in report.violations
               for v in (root, *root.folded))  # fmt: skip
