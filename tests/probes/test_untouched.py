"""What a user gave stays as it was, and runs that cannot be compared are not judged."""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corpus.models.own_backwards import Swish
from pytest_modelhealth.report import Outcome
from tests.capture.oracle import fingerprint
from tests.probes.models import probed

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Module:
    """Return a small perceptron."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class Uncopyable:
    """Holds a tensor, and refuses to be copied."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies")


class Opens(nn.Linear):
    """Computes on what an object holds."""

    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch.value)


def test_a_batch_with_a_graph_stays_and_is_probed() -> None:
    """Tensors that are computed, such as embeddings, are copied without their graph."""
    batch = nn.Linear(6, 6)(X)
    before = batch.detach().clone()
    report = probed(mlp(), batch)
    assert torch.equal(batch, before)
    assert report.probes["sample_independence"].outcome is Outcome.JUDGED
    assert report.healthy


def test_a_batch_that_cannot_be_copied_stays() -> None:
    """It is not changed, and so nothing is told."""
    batch = Uncopyable(X.clone())
    report = probed(Opens(6, 3), batch)
    assert torch.equal(batch.value, X)
    assert {record.outcome for record in report.probes.records} == {Outcome.NOT_TOLD}
    assert "cannot be copied" in report.probes["causality"].reason


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_batches_are_left_alone(layout: torch.layout) -> None:
    """Their samples are not looked into; no error of ours is seen."""

    class Dense(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to_dense())

    report = probed(Dense(6, 3), X.relu().to_sparse(layout=layout))
    assert "sparse" in report.probes["sample_independence"].reason
    assert report.probes["repeatability"].outcome is Outcome.JUDGED
    assert not [r for r in report.probes.records if "an error in" in r.reason]


def test_a_trace_keeps_nothing_that_was_looked_up_in_it() -> None:
    """Scripts keep the methods that they are asked for."""
    model = torch.jit.trace(mlp(), X)
    before = fingerprint(model, X)
    report = probed(model, X)
    assert fingerprint(model, X) == before
    assert report.probes["sample_independence"].outcome is Outcome.JUDGED


class Keeping(nn.Module):
    """A loss with a state, a parameter and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(3)), 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor) -> Tensor:
        self.calls += 1
        self.mean += output.mean().detach()
        return (output * self.weight).square().mean()


class Alike(nn.Module):
    """Its samples are alike, so that it is trained for some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("far", torch.tensor([100.0, -100.0, 50.0]))

    def forward(self, x: Tensor) -> Tensor:
        return 0.1 * self.last(1e-4 * self.first(x)) + self.far


@pytest.mark.parametrize("build", [mlp, Alike])
def test_a_loss_with_a_state_is_as_after_one_call(build: Any) -> None:
    """The inspection calls it once; the calls of probes leave no trace, nor a gradient.

    So does a number that the loss alone knows, through which three training steps go.
    """
    loss, scale = Keeping(), torch.ones(3, requires_grad=True)
    report = probed(build(), X, loss=loss)
    assert loss.calls == 1
    assert loss.weight.grad is None
    probed(build(), X, loss=lambda output: (output * scale).square().mean())
    assert scale.grad is None
    assert build is mlp or report.probes["alike_samples"].forwards > 1


def test_what_evaluation_mode_raises_is_the_models() -> None:
    """`train` may be the user's own."""

    class Refusing(nn.Linear):
        def train(self, mode: bool = True) -> Any:
            if not mode:
                raise NotImplementedError("only training")
            return super().train(mode)

    reason = probed(Refusing(6, 3), X).probes["repeatability"].reason
    assert reason == "in evaluation mode the model raises NotImplementedError: only training"


class Slow(nn.Linear):
    """Calls a custom function, and takes so long that threads overlap."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1)
        return Swish.apply(super().forward(x))


def test_threads_put_back_what_is_one_for_all_of_them() -> None:
    """The forwards of custom functions, and torch's switch for fused attention."""
    forward, reasons = vars(Swish)["forward"], list[str]()

    def inspect() -> None:
        report = probed(Slow(6, 3), X, probes=("custom_backward", "repeatability"))
        reasons.extend(record.reason for record in report.probes.records)

    threads = [threading.Thread(target=inspect) for _ in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.04)  # the first to come is the first to leave
    for thread in threads:
        thread.join()
    assert vars(Swish)["forward"] is forward
    assert torch.backends.mha.get_fastpath_enabled()
    assert reasons == [""] * 6


def test_the_model_is_quiet_about_batches_that_only_probes_make() -> None:
    """The deviation over one sample, which nobody but the probe asks for, is warned of by torch."""

    class Whitened(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x - x.mean(0)) / x.std(0))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = probed(Whitened(6, 3), X, probes="sample_independence")
        filters = list(warnings.filters)
    assert report.probes["sample_independence"].partings
    assert not told
    assert filters[0][0] == "always"
