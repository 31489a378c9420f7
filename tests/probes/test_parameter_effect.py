from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.capture import Request, find_engine
from pytest_modelhealth.probes import all_probes
from pytest_modelhealth.probes.conventions import Conventions
from pytest_modelhealth.probes.probing import Probing
from pytest_modelhealth.report import Observation, Outcome, ProbeRecord
from pytest_modelhealth.training import default_settings

NAME = "parameter_effect"


def batch() -> Tensor:
    """Return seeded normal numbers."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Read(nn.Module):
    """A head on features that are read in some way."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))
        self.head, self.read = nn.Linear(6, 3), read

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self.encoder(x)))


def detached(x: Tensor) -> Tensor:
    """Return the values alone."""
    return x.detach()


def selected(x: Tensor) -> Tensor:
    """Return a discrete selection."""
    return F.one_hot(x.argmax(-1), 6).to(x.dtype)


def inspected(model: nn.Module, **given: Any) -> tuple[HealthReport, ProbeRecord]:
    """Return the report of a model, and what the probe took down."""
    given = {"probes": NAME} | given
    report = Inspector(model, checks=NAME).run_inspection(batch(), **given)
    return report, report.observation.probes[NAME]


def test_a_smooth_path_without_gradient_is_inconclusive() -> None:
    """The optimizer alone tells; the layer before the cut is named, and the line that cuts."""
    report, record = inspected(Read(detached))
    assert report.verdict == "inconclusive"
    (doubt,) = report.inconclusive
    assert doubt.layer == "encoder.1"
    assert "encoder.0.weight" in doubt.reason
    assert "optimizer" in doubt.reason
    assert "test_parameter_effect.py:" in doubt.reason
    assert record.forwards == 4


def test_not_asked_for_by_name_it_warns() -> None:
    """All probes leave the verdict of a healthy model alone, and say what was seen."""
    report, _ = inspected(Read(detached), probes=True)
    assert report.healthy
    assert [(warning.check, warning.layer) for warning in report.warnings] == [(NAME, "encoder.1")]


@pytest.mark.parametrize(
    ("target", "loss"),
    [
        (None, None),
        (None, lambda y: y.square().mean()),
        (None, {"a": lambda y: y.mean()}),
        (torch.zeros(8, 3), F.mse_loss),
    ],
)
def test_whatever_the_loss_is(target: Any, loss: Any) -> None:
    """A projection of ours is as good as a loss, and so are several; a target is converted too."""
    assert inspected(Read(detached), target=target, loss=loss)[0].verdict == "inconclusive"


def jumping(x: Tensor) -> Tensor:
    """Return what jumps at every small step."""
    return (x.detach() * 3e5).round().remainder(2)


def frozen() -> nn.Module:
    """Return a model with a part that asks for no gradient, and one that has no part in a run."""
    model = Read(detached)
    model.encoder.requires_grad_(False)
    model.idle = nn.Linear(6, 6)
    return model


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Read(detached)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float()


class Strict(Single):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("float32 only")
        return self.inner(x)


@pytest.mark.parametrize(
    ("model", "outcome", "forwards", "why"),
    [
        (Read(selected), Outcome.JUDGED, None, None),
        (Read(jumping), Outcome.JUDGED, None, None),  # what jumps has no slope
        (Read(F.relu), Outcome.JUDGED, 0, None),
        (Read(lambda x: x * 0), Outcome.JUDGED, None, None),
        # where the loss is the same on both sides, a smaller step has nothing to add
        (Read(lambda x: x.detach() * 0 + 1), Outcome.JUDGED, 2, None),
        (nn.Linear(6, 3), Outcome.JUDGED, 0, None),
        (frozen(), Outcome.JUDGED, 0, None),
        # steps so small are lost in float32
        (Single(), Outcome.NOT_TOLD, None, "float32"),
        (Strict(), Outcome.NOT_TOLD, None, "float32 only"),
    ],
)
def test_what_it_cannot_tell_is_inconclusive_and_the_rest_is_healthy(
    model: nn.Module, outcome: Outcome, forwards: int | None, why: str | None
) -> None:
    """Where nothing lacks a gradient nothing is moved, and it is judged all the same."""
    report, record = inspected(model)
    assert record.outcome is outcome
    assert forwards is None or record.forwards == forwards
    assert why is None or why in record.reason
    assert report.verdict == ("healthy" if why is None else "inconclusive")


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 3), nn.Linear(6, 3)
        self.b = nn.ParameterList([torch.ones(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).detach() * self.b[0].detach() + self.c(x)


def test_each_part_has_a_story() -> None:
    """Parts of the model are moved one after the other."""
    report, record = inspected(Product())
    assert [doubt.layer for doubt in report.inconclusive] == ["a", "b"]
    assert record.forwards == 8
    assert record.partings[1].names == ("b.0",)


def known(model: nn.Module, trained: frozenset[str]) -> Observation:
    """Return what is seen where an optimizer is known to hold parameters."""
    settings = default_settings().override({"probes": NAME}, "test")
    engine, request = find_engine(model), Request(model, batch())
    conventions = Conventions(trained=trained)
    return Probing(engine, request, settings, conventions).after(engine.run(request))


def test_what_an_optimizer_holds_is_a_violation() -> None:
    """And what it does not hold is nothing."""
    settings = default_settings().override({"probes": NAME}, "test")
    probe = next(probe for probe in all_probes() if probe.name == NAME)
    held = known(Read(detached), frozenset({"encoder.0.weight"}))
    (violation,) = probe.run(held, settings)
    assert (violation.layer, violation.tensor) == ("encoder.0", "weight")
    assert held.probes[NAME].partings[0].names == ("encoder.0.weight",)
    others = known(Read(detached), frozenset({"head.weight"}))
    assert list(probe.run(others, settings)) == []
    assert list(probe.run(replace(held, probes=others.probes), settings)) == []


def test_it_runs_where_it_is_asked_for_and_has_a_backward_pass() -> None:
    """By itself, a teacher that is not frozen would make every verdict inconclusive."""
    _, record = inspected(Read(detached), backward=False)
    assert record.outcome is Outcome.NOT_APPLICABLE
    report = Inspector(Read(detached)).run_inspection(batch())
    assert report.observation.probes.get(NAME) is None


class Stops(nn.Module):
    """Raises in the copy, once it has written to its state."""

    def __init__(self, how: type[BaseException]) -> None:
        super().__init__()
        self.inner, self.how = Read(detached), how
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x + torch.rand(()))
        self.seen += 1
        if x.dtype is torch.float64:
            raise self.how("now")
        return y


@pytest.mark.parametrize("how", [None, RuntimeError, KeyboardInterrupt])
def test_everything_is_as_it_was(how: type[BaseException] | None) -> None:
    """Bit for bit, however the probe ends."""
    model = Read(detached) if how is None else Stops(how)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = batch()
    try:
        Inspector(model).run_inspection(x, probes=NAME)
        assert how is not KeyboardInterrupt
    except KeyboardInterrupt:
        assert how is KeyboardInterrupt
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(p.grad is None and p.dtype is torch.float32 for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(x, batch())
    assert model.training
