"""Layers that ran where no hook is called: `opaque`, and told from those that were left out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from corpus.models.out_of_sight import Net, Product, X, of_fake, traced
from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.capture.step import run
from pytest_modelhealth.report import Status
from tests.capture.oracle import changes, fingerprint

pytestmark = pytest.mark.filterwarnings("ignore")  # TorchScript is about to be dropped


OPAQUE, NOT_CALLED, OBSERVED = Status.OPAQUE, Status.NOT_CALLED, Status.OBSERVED
READ = Status.PARAMETERS_READ
ALL = (OPAQUE,) * 4
WAYS: dict[str, tuple[Callable[..., Any], tuple[Status, ...]]] = {
    # the part, a, act and b
    "traced before": (traced, ALL),
    "scripted before": (lambda inner: (script := torch.jit.script(inner)) and script.__call__, ALL),
    "traced in the forward": (lambda inner: lambda x: torch.jit.trace(inner, x)(x), ALL),
    "an autograd function": (
        lambda inner: lambda x: Product.apply(x, inner.a.weight),
        (OPAQUE, OPAQUE, OPAQUE, NOT_CALLED),
    ),
    "compiled in the forward": (
        lambda inner: lambda x: torch.compile(inner, backend="eager")(x),
        (OBSERVED,) * 4,
    ),
    "compiled before": (
        lambda inner: torch.compile(lambda x: inner(x), backend="eager"),
        (OBSERVED,) * 4,
    ),
    "functional_call": (
        lambda inner: (
            lambda x: torch.func.functional_call(inner, dict(inner.named_parameters()), (x,))
        ),
        (OBSERVED,) * 4,
    ),
    "vmap": (lambda inner: torch.vmap(inner), (Status.UNSUPPORTED,) * 4),
    "forward": (lambda inner: inner.forward, (NOT_CALLED, OBSERVED, OBSERVED, OBSERVED)),
    "read directly": (
        lambda inner: lambda x: F.linear(x, weight=inner.a.weight + sum([inner.b.weight])),
        (NOT_CALLED, READ, NOT_CALLED, READ),
    ),
    "joined": (
        lambda inner: lambda x: x @ torch.cat([inner.a.weight, inner.b.weight])[:6],
        (NOT_CALLED, READ, NOT_CALLED, READ),
    ),
    "transposed": (
        lambda inner: lambda x: x @ inner.a.weight.T @ inner.b.weight.type(torch.float32),
        (NOT_CALLED, READ, NOT_CALLED, READ),
    ),
    "left out": (lambda inner: torch.sin, (NOT_CALLED,) * 4),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_ran_out_of_sight_is_opaque(way: str) -> None:
    """Parameters with gradients that no call took: what used them is hidden, and said to be."""
    build, expected = WAYS[way]
    torch.manual_seed(0)
    model = Net(build)
    before = fingerprint(model, X)
    report = Inspector(model).run_inspection(X, loss=lambda output: output.square().mean())
    assert changes(before, fingerprint(model, X)) == []
    layers = [report[f"inner{name}"] for name in ("", ".a", ".act", ".b")]
    assert tuple(layer.status for layer in layers) == expected
    assert all(layer.reason for layer in layers if layer.status is not OBSERVED)
    assert report["inner.spare"].status is NOT_CALLED


def test_what_a_forward_compiles_first_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though torch's compiler was not loaded when the run began; `torch.compile` is put back."""
    monkeypatch.setattr(run, "sys", SimpleNamespace(modules={}))
    compile_ = torch.compile
    report = Inspector(Net(WAYS["compiled in the forward"][0])).run_inspection(X)
    assert report["inner.a"].status is OBSERVED
    assert torch.compile is compile_
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_forward_that_scripts_is_refused() -> None:
    """TorchScript would compile our hooks; the message says what to do, and the model is whole."""
    model = Net(lambda inner: lambda x: torch.jit.script(inner)(x))
    before = fingerprint(model, X)
    with pytest.raises(InspectionError, match=r"while 'inner' is watched.* once, in __init__"):
        Inspector(model).run_inspection(X)
    assert changes(before, fingerprint(model, X)) == []


FAKES = ["mode", "mode, with real tensors", "model", "batch"]


@pytest.mark.parametrize("fake", FAKES)
def test_fake_tensors_are_refused(fake: str) -> None:
    """They have no values to observe; a model outside the mode is as it was."""
    mode = FakeTensorMode(allow_non_fake_inputs=fake == "mode, with real tensors")
    with mode if fake == "model" else contextlib.nullcontext():
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    with mode if fake in ("mode", "model", "batch") else contextlib.nullcontext():
        batch = torch.ones(4, 6)
    before = None if fake == "model" else fingerprint(model, None)
    where = mode if fake.startswith("mode,") or fake == "mode" else contextlib.nullcontext()
    with where, pytest.raises(InspectionError, match="FakeTensorMode, whose tensors have shapes"):
        Inspector(model).run_inspection(batch, loss=lambda output: output.sum())
    assert before is None or changes(before, fingerprint(model, None)) == []


def test_a_forward_may_use_fake_tensors() -> None:
    """The layer that ran on them is `unsupported`, and nothing else is disturbed."""
    report = Inspector(Net(of_fake)).run_inspection(X)
    layer = report["inner.a"]
    assert (layer.status, layer.reason) == (Status.UNSUPPORTED, "a fake tensor has no values")
    assert report["inner.b"].status is OBSERVED
    assert report.observation.errors == ()


def test_gradients_on_the_meta_device_are_no_error_of_ours() -> None:
    """A loss there is differentiated, and each layer says why nothing was seen."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to("meta")
    report = Inspector(model).run_inspection(X.to("meta"), loss=lambda output: output.sum())
    assert report.observation.errors == ()
    assert all("meta device has no values" in layer.reason for layer in report)
