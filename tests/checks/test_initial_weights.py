"""The `initial_weights` check: weights that no initialiser should leave."""

import math

import pytest
import torch
from torch import nn

from corpus.models.hooked import make
from pytest_modelhealth.checks.facts import is_fresh, linear_maps, seems_trained
from tests.capture.architectures import ARCHITECTURES
from tests.checks.rows import Net, hold, holding, says


def scaled(factor):
    """Return what multiplies weights."""
    return lambda weight: weight.mul_(factor)


def normal(std):
    """Return what draws weights from a normal distribution."""
    return lambda weight: weight.normal_(0.0, std)


def plain(**values):
    """Return a plain network whose gradients survive whatever is done to one layer."""
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )
    return holding(model, **values)


def zero(*sizes, **options):
    """Return a layer of zeros."""
    layer = nn.Linear(*sizes, **options)
    return holding(layer, weight=0.0, **({} if layer.bias is None else {"bias": 0.0}))


def gates(inner=None):
    """Return a residual branch, an adapter, a gate and a head that all start at zero."""

    def forward(m, x):
        x = m.stem(x)
        x = x + m.outer(torch.relu(m.inner(x)))
        x = x + m.up(m.down(x))
        return m.head(x * (1 + m.gate(x)))

    return Net(
        forward, stem=(16, 16), inner=inner or nn.Linear(16, 32), outer=zero(32, 16),
        down=nn.Linear(16, 4, bias=False), up=zero(4, 16, bias=False), gate=zero(16, 16),
        head=zero(16, 4),
    )  # fmt: skip


def beside(fill):
    """Return a head outside the loss and a state of the same numbers, which a layer takes."""

    def forward(m, x):
        h = m.stem(x)
        m.aside(h)
        return m.head(h + m.recurrent(torch.full_like(h, fill)))

    return Net(forward, stem=(16, 16), aside=zero(16, 16), recurrent=(16, 16), head=(16, 4))


def weighed(*, by_itself):
    """Return a branch of zeros that weighs itself, as squeeze-and-excitation does, or does not."""

    def forward(m, x):
        x = m.stem(x)
        branch = m.last(x)
        weights = torch.sigmoid(m.squeeze(branch))
        return m.head(x + (weights * branch if by_itself else weights))

    return Net(
        forward, stem=(16, 16), last=holding(nn.Linear(16, 16), weight=0.0), head=(16, 16),
        squeeze=(16, 16),
    )  # fmt: skip


def first_state(forward):
    """Return a recurrence, and a layer of zeros that makes its first state or its input."""
    return Net(
        forward, make=holding(nn.Linear(16, 16), weight=0.0), cell=nn.GRUCell(16, 16), head=(16, 4)
    )


def before_a_norm(std):
    """Return a network whose second layer, before a normalisation, is drawn anew."""
    return nn.Sequential(
        nn.Linear(16, 64), holding(nn.Linear(64, 64), weight=normal(std)), nn.LayerNorm(64),
        nn.Linear(64, 4),
    )  # fmt: skip


def recurrent(samples=8, **values):
    """Return a model that reads the last state, and sequences."""
    lstm = holding(nn.LSTM(8, 16, batch_first=True), **values)
    model = Net(lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=lstm, head=(16, 4))
    return model, torch.randn(64, samples, 8)


def drawn(low):
    """Return what draws weights from `low` to one."""
    return lambda weight: weight.uniform_(low, 1.0)


def attention(factor):
    """Return a transformer's layer, whose projections are scaled, and sequences."""
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True, dropout=0.0)
    holding(model.self_attn, in_proj_weight=scaled(factor))
    return model, torch.randn(16, 8, 16)


def grown(first):
    """Return weights that may have grown in training, before a new norm and a bias of zero."""
    layers = (
        holding(nn.Linear(16, 64, bias=False), weight=normal(1.8)), nn.SiLU(), nn.LayerNorm(64),
        holding(nn.Linear(64, 10), bias=0.0),
    )  # fmt: skip
    return nn.Sequential(first, *layers)


def trained_scale():
    """Return a normalisation whose scale was trained."""
    return Net(
        lambda m, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * m.weight,
        weight=nn.Parameter(1.0 + 0.1 * torch.randn(16)),
    )


CASES = {
    # the layer after it takes a constant; the cause says which one
    "zeros in a plain path": (lambda _: plain(**{"2.weight": 0.0}), {"2": "fail"}, "'4'", "weight"),
    # the output of these is added, multiplied, or the model's own
    "gates, heads, adapters and residual branches": (lambda _: gates(), {}),
    "the first layer of a residual branch": (
        lambda _: gates(holding(nn.Linear(16, 32), weight=0.0)), {"inner": "fail"},
    ),
    # equal numbers are no way from one to the other
    "a head beside a state of zeros": (lambda _: beside(0.0), {}),
    "a head beside a state of ones": (lambda _: beside(1.0), {}),
    # the gradient comes through the product; through the next weights alone none does
    "a branch that is multiplied": (lambda _: weighed(by_itself=True), {}),
    "a branch that is not": (lambda _: weighed(by_itself=False), {"last": "fail"}),
    # the recurrence has its input beside it
    "a first state": (lambda _: first_state(lambda m, x: m.head(m.cell(x, m.make(x)))), {}),
    "an input of zeros": (
        lambda _: first_state(lambda m, x: m.head(m.cell(m.make(x)))), {"make": "fail"},
    ),
    # they make all units of the layer one
    "constants": (lambda _: plain(**{"0.weight": 0.1}), {"0": "fail"}, "a constant initialiser"),
    # a mean over neighbours is written so
    "a frozen filter": (
        lambda _: nn.Sequential(
            holding(nn.Linear(16, 16, bias=False), weight=1 / 16).requires_grad_(False),
            nn.Linear(16, 4),
        ),
        {},
    ),
    # torch's default has a scale of 0.58: five times that is 2.9, twelve times 6.9
    "torch's default": (lambda _: plain(), {}),
    "5 times as large": (lambda _: plain(**{"2.weight": scaled(5.0)}), {}),
    "12 times as large": (lambda _: plain(**{"2.weight": scaled(12.0)}), {"2": "fail"}),
    "300 times as large": (lambda _: plain(**{"2.weight": scaled(300.0)}), {"2": "fail"}),
    # one layer a hundred times smaller than the others cuts signal and gradient
    "a tenth": (lambda _: plain(**{"2.weight": scaled(0.1)}), {}),
    "a hundredth": (lambda _: plain(**{"2.weight": scaled(0.01)}), {"2": "fail"}),
    "a ten thousandth": (lambda _: plain(**{"2.weight": scaled(1e-4)}), {"2": "fail"}),
    "all layers small": (lambda _: plain(**{f"{n}.weight": normal(1e-4) for n in (0, 2, 4)}), {}),
    # a normalisation takes the scale away: 15 at a fan-in of 64 is more than a head may have
    "small before a normalisation": (lambda _: before_a_norm(1e-4), {}),
    "large before a normalisation": (lambda _: before_a_norm(15 / 8), {}),
    "too large before a normalisation": (lambda _: before_a_norm(40 / 8), {"1": "fail"}),
    # N(0, 1) at a fan-in of 64 is a scale of 8: over the limit, within that of a head
    "a large head": (lambda _: plain(**{"4.weight": normal(1.0)}), {}),
    "a head too large": (lambda _: plain(**{"4.weight": normal(3.0)}), {"4": "fail"}),
    # uniform_(0, 1) is no wider than (-1, 1), but sums up what its inputs share
    "recurrent weights of one sign": (
        lambda _: recurrent(weight_ih_l0=drawn(0.0), weight_hh_l0=drawn(0.0)), {"lstm": "fail"},
        "one-sided", "weight_hh_l0",
    ),
    "recurrent weights": (
        lambda _: recurrent(weight_ih_l0=drawn(-1.0), weight_hh_l0=drawn(-1.0)), {},
    ),
    # queries, keys and values in one matrix are judged as three
    "projections": (lambda _: attention(1.0), {}),
    "projections of zeros": (lambda _: attention(0.0), {"self_attn": "fail"}, "weight are zero"),
    "large projections": (lambda _: attention(100.0), {"self_attn": "fail"}, "too large"),
    "a new head on a trained part": (lambda _: grown(trained_scale()), {}),
    "the same untrained": (lambda _: grown(nn.LayerNorm(16)), {"1": "fail"}),
    # what they are given tells nothing, and their scale does
    "weights of a state of zeros": (
        lambda _: Net(
            lambda m, x: m.head(torch.tanh(m.stem(x) + m.state(torch.zeros(len(x), 64)))),
            stem=(16, 64), state=holding(nn.Linear(64, 64), weight=normal(2.0)), head=(64, 10),
        ),
        {"state": "fail"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", CASES.values(), ids=CASES)
def test_what_is_said_of(row):
    """Zeros, constants and scales, each where it is a fault and where it is none."""
    hold("initial_weights", *row)


# routers of N(0, 1), a vision encoder at 1e-10, kernels initialised by their fan-out
@pytest.mark.parametrize("name", ["switch", "sam", "mobilenet", "gpt2", "mamba"])
def test_transformers_at_the_edge_of_the_limits_are_healthy(name):
    """Each has weights that another network would not have."""
    hold("initial_weights", lambda _: make(ARCHITECTURES[name]), {})


def test_a_limit_by_the_user_counts():
    """The default of torch is 0.58, over a limit of 0.5."""
    layers = {"0": "fail", "2": "fail"}
    hold("initial_weights", lambda _: plain(), layers, max_weight_scale=0.5)


def test_value_of_zero_weights(batch, inspect):
    """And the tensor."""
    (violation,) = says(inspect(plain(**{"2.weight": 0.0}), batch), "initial_weights")
    assert (violation.tensor, violation.value) == ("weight", 0.0)


def test_recurrent_layer_of_zeros_is_named_once(inspect):
    """Whatever takes its last state, nothing passes it."""
    assert inspect(*recurrent(5)).healthy
    model, inputs = recurrent(5)
    zeros = {name: 0.0 for name, _ in model.lstm.named_parameters()}
    holding(model.lstm, **zeros)
    (violation,) = inspect(model, inputs).violations
    assert (violation.check, violation.layer) == ("initial_weights", "lstm")
    assert violation.tensor == "weight_ih_l0"


def test_large_gates_of_a_state_of_zeros(inspect):
    """Weights of an LSTM that is given zeros are judged by their scale."""
    lstm = nn.LSTM(16, 32, batch_first=True)
    holding(lstm, **{name: normal(3.0) for name, _ in lstm.named_parameters() if "weight" in name})
    report = inspect(lstm, torch.zeros(64, 5, 16))
    assert report._judgement.broken == ()
    assert "fail" in [v.grade for v in says(report, "initial_weights")]


def test_large_weights_that_are_scaled_down_in_use_are_no_fault():
    """What counts is what the weights do to the signal: so StyleGAN has its layers."""

    def equalised(inputs):
        layer = holding(nn.Linear(inputs, 64), weight=normal(1.0))
        layer.forward = lambda x: nn.functional.linear(
            x, layer.weight / math.sqrt(inputs), layer.bias
        )
        return layer

    model = nn.Sequential(equalised(16), nn.ReLU(), equalised(64), nn.Linear(64, 4))
    report = hold("initial_weights", lambda _: model, {})
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
    model = plain()
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
