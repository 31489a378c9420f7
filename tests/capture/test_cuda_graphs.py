"""CUDA graphs: a capture is not disturbed, and what a replay does is not taken for unseen code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import InspectionError, Inspector, ModelHealthWarning, compare
from pytest_modelhealth.report import Status, Verdict
from tests.capture.cuda_graphs import Cuda
from tests.capture.oracle import report_of


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Return CUDA graphs that run on the CPU."""
    return Cuda(monkeypatch)


class Net(nn.Module):
    """A body that may be graphed, between two layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))


def net() -> Net:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Net()


def graphed() -> Net:
    """Return that model with a body that replays a graph."""
    model = net()
    sample = torch.randn(8, 4, requires_grad=True)
    torch.cuda.make_graphed_callables(model.body, (sample,))
    return model


def test_the_layers_of_a_graphed_module_are_opaque_and_the_module_is_seen(cuda: Cuda) -> None:
    """Its inputs, outputs and gradients are the eager model's."""
    batch = torch.randn(8, 4)
    expected = report_of(net(), batch)
    report = report_of(graphed(), batch)
    for name in ("stem", "body", "head"):
        seen, wanted = report[name], expected[name]
        assert (seen.status, seen.calls) == (Status.OBSERVED, wanted.calls)
        for role in ("inputs", "activations", "gradients"):
            ours, theirs = getattr(seen, role), getattr(wanted, role)
            assert (ours.mean, ours.std) == pytest.approx((theirs.mean, theirs.std), abs=1e-6)
    for name in ("body.0", "body.1"):
        assert report[name].status is Status.OPAQUE
        assert "make_graphed_callables" in report[name].reason
        assert report[name].activations is None
    weights = report["body.0"].parameter_gradients["weight"]
    wanted = expected["body.0"].parameter_gradients["weight"]
    assert weights.rms == pytest.approx(wanted.rms, rel=1e-5)


def test_static_outputs_are_read_before_the_next_replay(cuda: Cuda) -> None:
    """A replay writes over what an earlier one gave out, and no version of a tensor tells."""

    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            first = self.body(x)
            self.body(2 * x)  # writes over `first` where it is graphed
            return self.head(first)

    torch.manual_seed(0)
    model = Twice()
    torch.cuda.make_graphed_callables(model.body, (torch.randn(8, 4, requires_grad=True),))
    batch = torch.randn(8, 4)
    with torch.no_grad():
        read = model.body(2 * batch).clone()
        report = Inspector(model).run_inspection(batch)
    assert report["head"].inputs.mean == pytest.approx(float(read.mean()), abs=1e-6)


def test_a_verdict_on_a_model_that_is_one_graph_says_that_nothing_inside_was_judged(
    cuda: Cuda,
) -> None:
    """Its outputs are compared, too, and no layer inside is said to be gone."""
    batch = torch.randn(8, 4)
    model = net()
    torch.cuda.make_graphed_callables(model, (torch.randn(8, 4, requires_grad=True),))
    report = Inspector(model).run_inspection(batch)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "inputs and outputs alone" in report._judgement.inconclusive[0].reason
    result = compare(net(), model, batch, backward=False)
    assert result.equivalent
    assert "no layer inside was compared" in str(result)
    with torch.no_grad():
        model.body[0].weight[0, 0] += 1.0
    result = compare(net(), model, batch, backward=False)
    assert result.first_divergence is not None
    assert result.first_divergence.cause.startswith("body.0: weight differs in 1 of 16 values")


def test_an_inspection_inside_a_capture_is_refused(cuda: Cuda) -> None:
    """Nothing is hooked or run, and afterwards it works."""
    model, batch, ran = net(), torch.randn(8, 4), []
    model.stem.register_forward_hook(lambda *_: ran.append(1))
    inspector = Inspector(model)
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(InspectionError, match="while a CUDA graph is captured"),
    ):
        inspector.run_inspection(batch)
    assert ran == []
    assert len(model.stem._forward_hooks) == 1
    assert inspector.run_inspection(batch).verdict is Verdict.HEALTHY


def test_a_monitor_steps_aside_while_a_graph_is_captured(cuda: Cuda) -> None:
    """What is captured is the user's step alone; it is said, and the next step is seen."""
    model, batch = net(), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    bare = torch.cuda.CUDAGraph()
    with torch.cuda.graph(bare):
        step()
    with Inspector(model).monitor() as monitor:
        watched = torch.cuda.CUDAGraph()
        with torch.cuda.graph(watched):
            step()
        with pytest.warns(ModelHealthWarning, match="a CUDA graph was captured in this step"):
            monitor.step_end()
        with (
            torch.cuda.graph(torch.cuda.CUDAGraph()),
            pytest.warns(ModelHealthWarning, match="end the step after it"),
        ):
            monitor.step_end()
        monitor.step_end(loss=step())
    assert [made[0] for made in watched.made] == [made[0] for made in bare.made]
    assert monitor.latest is not None
    assert monitor.latest.step == 2
    assert monitor.latest["stem", "activation_rms"] > 0


def test_nothing_asks_cuda_where_it_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking would be the first thing to touch a GPU."""
    if torch.cuda.is_initialized():
        pytest.skip("something has started CUDA")
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("it asked CUDA")
    )
    assert Inspector(net()).run_inspection(torch.randn(8, 4)).verdict is Verdict.HEALTHY


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_of_a_gpu() -> None:
    """The same on CUDA itself: a graphed module, and a capture that an inspection leaves alone."""
    torch.manual_seed(0)
    model, batch = Net().cuda(), torch.randn(8, 4, device="cuda")
    expected = Inspector(model).run_inspection(batch)
    sample = torch.randn(8, 4, device="cuda", requires_grad=True)
    torch.cuda.make_graphed_callables(model.body, (sample,))
    report = Inspector(model).run_inspection(batch)
    assert report["body.0"].status is Status.OPAQUE
    assert report["body"].activations.mean == pytest.approx(
        expected["body"].activations.mean, abs=1e-5
    )
    graph = torch.cuda.CUDAGraph()
    static = batch.clone()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = model.head(static)
        with pytest.raises(InspectionError, match="while a CUDA graph is captured"):
            Inspector(model).run_inspection(static)
    graph.replay()
    assert torch.allclose(output, model.head(static))
