"""Custom functions of autograd: what is said of their backwards, beside what the corpus has."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from corpus.models import own_backwards as made
from corpus.models.own_backwards import Calls, model_of
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.probes.intervening import own_backwards
from pytest_modelhealth.report import Outcome, ProbeRecord

NAME = "custom_backward"


def batch(*shape: int) -> Tensor:
    """Return seeded normal numbers."""
    return torch.randn(shape or (6, 6), generator=torch.Generator().manual_seed(1))


def inspected(model: nn.Module, **given: Any) -> tuple[HealthReport, ProbeRecord | None]:
    """Return the report of a model, and what the probe took down."""
    report = Inspector(model).run_inspection(batch(), **given)
    return report, report.observation.probes.get(NAME)


def found(report: HealthReport, *, warned: bool = False) -> list[Any]:
    """Return the violations of the probe, or what it warns of."""
    return [v for v in (report.warnings if warned else report.violations) if v.check == NAME]


WRONG = {
    "sign": (made.WrongSign, 1, "-1.00 times the slope", "a sign"),
    "missing term": (made.MissingTerm, 1, "times the slope", "a term is missing"),
    "10 % off": (made.TenPercent, 1, "0.90 times the slope", "a constant factor"),
    "with a context set up apart": (made.WithSetupWrong, 1, "0.50 times", "a constant factor"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_backward_is_found_where_it_is_called(kind: str) -> None:
    """The layer whose own code calls it, the ratio to the slope and the cause, without asking.

    A gradient that differs by no known rule may be an approximation, and only warns.
    """
    function, arguments, ratio, cause = WRONG[kind]
    report, _ = inspected(model_of(function, arguments))
    violation = found(report, warned=kind == "missing term")[0]
    assert violation.layer == "1"
    assert ratio in violation.message
    assert f"{function.__name__!r} at" in violation.message
    assert "own_backwards.py:" in violation.message
    assert cause in violation.cause


def test_a_gradient_for_the_wrong_input_names_both_arguments() -> None:
    """Names are those of the forward."""
    report, _ = inspected(model_of(made.WrongInput, 2))
    assert ["'a'" in v.message for v in found(report)] == [True, False]
    assert ["'b'" in v.message for v in found(report)] == [False, True]


RIGHT = {
    "context set up apart": model_of(made.WithSetup),
    "clamp": model_of(made.Clamp),
    "in place": model_of(made.InPlace),
    "bound early": model_of(lambda x, f=made.Swish.apply: f(x)),
    # at the zeros of another ReLU half a slope is found, and none or all is given
    "kinks": nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Calls(made.Relu), nn.Linear(6, 3)),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_backward_is_healthy(kind: str) -> None:
    """It is held against slopes, and passes."""
    report, record = inspected(RIGHT[kind])
    assert record is not None
    assert (record.outcome, record.notes, record.partings) == (Outcome.JUDGED, (), ())
    assert record.forwards == 1
    assert report.verdict == "healthy"


MEANT = {
    "reversal": (made.Reversal, 1, "identity"),
    "spikes in float32": (made.SpikeInSingle, 1, "flat"),
    "rounding with a learnt step": (made.LearnedStep, 2, "flat"),
}


@pytest.mark.parametrize("probes", [None, True])
@pytest.mark.parametrize("kind", MEANT)
def test_a_gradient_on_purpose_is_a_note(kind: str, probes: bool | None) -> None:
    """The model stays healthy, whether all probes are asked for or none is."""
    function, arguments, why = MEANT[kind]
    model = model_of(function, arguments)
    if arguments > 1:
        with torch.no_grad():
            model[1].weights[0].fill_(0.1)
    report, record = inspected(model, probes=probes)
    assert record is not None
    assert "on purpose" in record.notes[0]
    assert why in record.notes[0]
    assert found(report) == []
    assert not [i for i in report.inconclusive if i.check == NAME]


def test_beside_one_on_purpose_a_wrong_one_is_found() -> None:
    """And the layer is that which calls it; without one nothing was judged, which its name says."""
    report, record = inspected(model_of(made.Reversal), probes=NAME)
    assert record is not None
    assert record.outcome is Outcome.NOT_APPLICABLE
    assert report.verdict == "inconclusive"
    model = nn.Sequential(
        nn.Linear(6, 6), Calls(made.Reversal), Calls(made.WrongSign), Calls(made.Round)
    )
    report, record = inspected(model)
    assert [v.layer for v in found(report)] == ["2"]
    assert record is not None
    assert len(record.notes) == 2


def test_what_may_be_a_design_does_not_fail() -> None:
    """A clamp that lets gradients through, no gradient at all, and what a setting allows."""
    report, _ = inspected(model_of(made.ClampThrough))
    assert report.verdict == "healthy"
    assert [w.check for w in report.warnings] == [NAME]
    report, _ = inspected(model_of(made.Forgotten, 2))
    assert [v.check for v in (*report.violations, *report.warnings)] == ["missing_gradients"]
    report = Inspector(model_of(made.TenPercent), max_slope_error=0.2).run_inspection(batch())
    assert found(report) == []


@pytest.mark.parametrize(
    ("probes", "verdict"), [(None, "healthy"), (True, "healthy"), (NAME, "inconclusive")]
)
def test_what_runs_in_float32_alone_cannot_be_told(probes: Any, verdict: str) -> None:
    """Who did not ask for it by name gets a note at most."""
    report, record = inspected(model_of(made.SinglePrecision), probes=probes)
    assert record is not None
    assert record.outcome is Outcome.NOT_TOLD
    assert "torch.float32" in record.reason
    assert report.verdict == verdict
    assert ("cannot tell: the backward of" in str(report)) is (probes is True)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Make this process one of two, whose collectives return what they are given."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_slopes_on_one_rank_tell_nothing_of_a_collective() -> None:
    """It says so, and holds no function against slopes, collective or not."""
    report, record = inspected(model_of(made.WrongSign))
    assert record is not None
    assert found(report) == []
    assert "on one of several ranks" in record.reason


class Checkpointed(nn.Module):
    def __init__(self, function: Any, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = Calls(function)
        self.reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


class InTrainingOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return made.WrongSign.apply(self.first(x)) if self.training else self.first(x)


def zeros() -> nn.Module:
    """Weights that start at zero have no slope; a point close by has."""
    model = model_of(made.WrongInput, 2)
    with torch.no_grad():
        for tensor in (model[0].weight, model[0].bias, model[1].weights[0]):
            tensor.zero_()
    return model


def kinds_of_calls() -> nn.Module:
    """An option that only a later layer sets is not taken for that of the first."""
    calls = [Calls(lambda x, w=w: made.WrongIfTold.apply(x, w)) for w in (False, False, True)]
    return nn.Sequential(nn.Linear(6, 6), *calls, nn.Linear(6, 3))


def factor(y: Tensor) -> Tensor:
    """Return a loss with a function of its own, which belongs to no layer but the model."""
    return made.WrongFactor.apply(y).mean()


@pytest.mark.parametrize(
    ("model", "given", "layers"),
    [
        (zeros(), {}, {"1"}),
        (kinds_of_calls(), {}, ["3"]),
        # the forward runs twice, and is one call
        (Checkpointed(made.WrongSign, use_reentrant=False), {}, ["inner"]),
        (nn.Linear(6, 3), {"loss": factor}, [""]),
        (InTrainingOnly(), {}, [""]),
        (InTrainingOnly().eval(), {}, []),
    ],
)
def test_a_wrong_backward_is_found_wherever_it_runs(
    model: nn.Module, given: dict[str, Any], layers: Any
) -> None:
    """In the mode that was inspected, by the layer whose own code calls it."""
    report, _ = inspected(model, **given)
    culprits = [v.layer for v in (*found(report), *found(report, warned=True))]
    assert type(layers)(culprits) == layers


def test_functions_of_torch_are_left_out() -> None:
    """A reentrant checkpoint is one; so the probe has no call to run, and asked by name says so."""
    assert inspected(nn.Linear(6, 3), probes=True)[1] is None
    _, record = inspected(nn.Linear(6, 3), probes=NAME)
    assert record is not None
    assert record.outcome is Outcome.NOT_APPLICABLE
    assert inspected(Checkpointed(torch.tanh, use_reentrant=True))[1] is None
    normalise = torch.nn.modules._functions.CrossMapLRN2d.apply
    model = nn.Sequential(
        nn.Linear(6, 6), Calls(lambda x: normalise(x[:, :, None, None], 3, 1e-4, 0.75, 1))
    )
    assert inspected(model)[1] is None


SWISH = vars(made.Swish)["forward"]


def left_as_it_was(model: nn.Module, run: Any) -> None:
    """Run, and hold state, modes, gradients, random numbers and forwards against those before."""
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    run()
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert vars(made.Swish)["forward"] is SWISH
    assert "forward" not in vars(made.WrongSign)
    assert torch.get_default_dtype() is torch.float32


def test_an_interrupt_within_a_function_ends_the_probe(ctrl_c: None) -> None:
    """Control-C in the forward of a function, as it is tried by itself."""
    model = model_of(made.Swish)
    count = 0

    class Stops(made.Swish):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            if count == 6:
                signal.raise_signal(signal.SIGINT)
            return made.Swish.forward(ctx, x)

    model[1].apply_it = Stops.apply

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            inspected(model)

    left_as_it_was(model, run)
    assert count >= 6


def test_the_flow_knows_the_users_own_functions() -> None:
    """In the order in which they ran, each once; those of torch are not among them."""
    model = nn.Sequential(Checkpointed(made.Swish, use_reentrant=False), Calls(made.Clamp))
    report, _ = inspected(model)
    graph = report.observation.flow.graph
    assert [graph.vertices[n].name for n in graph.own_functions] == ["swish", "clamp"]
    assert [graph.calls[graph.vertices[n].call].layer for n in graph.own_functions] == [
        "0.inner",
        "1",
    ]


def test_an_error_of_ours_costs_the_probe_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inspection stands, and who asked learns why nothing can be told."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(own_backwards, "what_backwards_give", broken)
    report, _ = inspected(model_of(made.WrongSign))
    assert report.verdict == "healthy"
    report, record = inspected(model_of(made.WrongSign), probes=NAME)
    assert report.verdict == "inconclusive"
    assert record is not None
    assert "ZeroDivisionError: ours" in record.reason
