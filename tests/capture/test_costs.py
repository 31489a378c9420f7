"""What a run costs, held against torch's own counters, its profiler and plain arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from corpus.models.counted import bert, lstm, net
from corpus.models.hooked import ZOO, make, seeded
from corpus.models.small import Checkpointed
from pytest_modelhealth import Inspector
from pytest_modelhealth.capture import Request, find_engine
from pytest_modelhealth.capture.costing.measure import FurtherRun, measured_forward
from pytest_modelhealth.report import Costs
from tests.capture.oracle import RUN_SEED, changes, fingerprint

UNMEASURED = {"script", "jit trace"}
"""The cases of the zoo whose costs are not measured, as the message says."""
UNREPEATED = {*UNMEASURED, "script in an attribute"}
"""And one that torch's own modes cannot run a second time: the script is optimised by then."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ZOO)
def test_measuring_leaves_every_model_as_it_was(name: str) -> None:
    """Beside an inspection and in its place: state, gradients, hooks, generators, bit for bit."""
    case = ZOO[name]
    model, batch = make(case)
    seeded(RUN_SEED)
    before = fingerprint(model, batch)
    engine, request = find_engine(model), Request(model, batch)
    seen = measured_forward(engine, request)
    again = FurtherRun(engine, request).after(seen)
    after = fingerprint(model, batch)
    assert [n for n in changes(before, after) if case.keeps_batch or n != "batch"] == []
    assert seen.errors == ()
    assert seen.costs is not None
    assert again.costs is not None
    assert bool(seen.costs.why_not) == (name in UNMEASURED)
    assert bool(again.costs.why_not) == (name in UNREPEATED)
    if not again.costs.why_not:
        assert again.costs.multiply_adds == seen.costs.multiply_adds
        assert again.costs.saved_bytes == seen.costs.saved_bytes
        assert again.costs.peak_bytes >= again.costs.held_bytes


def costs_of(model: nn.Module, batch: object) -> Costs:
    """What one forward costs."""
    costs = measured_forward(find_engine(model), Request(model, batch)).costs
    assert costs is not None
    assert costs.why_not == ""
    return costs


def counted(model: nn.Module, *batch: object) -> FlopCounterMode:
    """What torch counts by itself."""
    with FlopCounterMode(display=False) as counter:
        model(*batch)
    return counter


@pytest.mark.parametrize("made", [net, bert])
@pytest.mark.parametrize("training", [True, False])
def test_multiply_adds_of_each_layer_are_half_of_what_torch_counts(made, training) -> None:
    """Of the whole and of every layer with those inside, as `FlopCounterMode` attributes them."""
    model, batch = made()
    model.train(training)
    counter = counted(model, batch)
    summary = Inspector(model).summary(batch)
    by_name = {row["name"]: row["all_multiply_adds"] for row in summary.rows}
    assert summary.totals["multiply_adds"] == counter.get_total_flops() / 2 > 0
    counts = {name: sum(ops.values()) / 2 for name, ops in counter.get_flop_counts().items()}
    compared = [
        name for name, _ in model.named_modules() if f"{type(model).__name__}.{name}" in counts
    ]
    assert len(compared) >= 3
    for name in compared:
        assert by_name[name] == counts[f"{type(model).__name__}.{name}"], name


def test_multiply_adds_between_layers_are_the_models_own() -> None:
    """A product in the forward of the model belongs to no layer inside."""
    costs = costs_of(*net())
    assert costs.layers[""].multiply_adds == 4 * 4 * 2
    assert "never" in costs.layers  # for its parameters
    assert costs.layers["never"].multiply_adds == 0


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
def test_fused_recurrences_count_as_their_matrix_products(kind, options) -> None:
    """What the kernel of oneDNN hides from torch's counter is what it counts without that."""
    model, batch = kind(12, 20, **options), torch.randn(7, 3, 12)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # torch's own switch warns of GPUs of Intel
    try:
        expected = counted(model, batch).get_total_flops() / 2
    finally:
        torch._C._set_mkldnn_enabled(before)
    assert costs_of(model, batch).multiply_adds == expected > 0


def test_fused_attention_counts_as_its_matrix_products() -> None:
    """Of the fused kernel on the CPU, and of the fused path of evaluation."""

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 5, 16)
    with sdpa_kernel(SDPBackend.MATH):
        expected = counted(Attention(), q, k, k).get_total_flops() / 2
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert counted(Attention(), q, k, k).get_total_flops() == 0
        assert costs_of(Attention(), (q, k, k)).multiply_adds == expected > 0
    model, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(3, 5, 16)
    with sdpa_kernel(SDPBackend.MATH):
        expected = counted(model, x, x, x).get_total_flops() / 2
    model.eval()
    with torch.no_grad():
        assert counted(model, x, x, x).get_total_flops() / 2 < expected
        assert costs_of(model, (x, x, x)).multiply_adds == expected


def kept_for_backward(model: nn.Module, *batch: Tensor) -> int:
    """The bytes that autograd keeps, by hooks over a plain forward, which hold all it saves."""
    there = {
        t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *batch)
    }
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*batch)
    sizes = [t.untyped_storage().nbytes() for at, t in kept.items() if at not in there]
    del output
    return sum(sizes)


@pytest.mark.parametrize("made", [net, bert, lstm])
def test_saved_bytes_are_those_that_autograd_keeps(made) -> None:
    """The sum over layers is what plain hooks find, each storage once, without what is there."""
    model, batch = made()
    costs = costs_of(model, batch)
    torch.manual_seed(0)
    assert costs.saved_bytes == kept_for_backward(model, batch) > 0
    assert costs.saved_bytes == sum(layer.saved_bytes for layer in costs.layers.values())


def test_saved_bytes_are_at_the_layer_that_has_them_saved() -> None:
    """A linear layer keeps its input, which is the batch at the first, and ReLU what it returns."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4), nn.Flatten())
    costs = costs_of(model, torch.randn(32, 8))
    assert {name: costs.layers[name].saved_bytes for name in "0123"} == {
        "0": 0, "1": 32 * 16 * 4, "2": 0, "3": 0
    }  # fmt: skip
    model[1] = nn.GELU()  # keeps its input, and so the linear layer after it keeps another one
    costs = costs_of(model, torch.randn(32, 8))
    assert costs.layers["1"].saved_bytes == costs.layers["2"].saved_bytes == 32 * 16 * 4


def test_nothing_is_saved_where_no_gradient_is_asked_for() -> None:
    """Without gradients, and of a model that is frozen."""
    model, batch = net()
    with torch.no_grad():
        assert costs_of(model, batch).saved_bytes == 0
    assert costs_of(model.requires_grad_(False), batch).saved_bytes == 0


def test_activation_checkpointing_shows() -> None:
    """It saves bytes and lowers the peak; what it computes again is no part of the forward."""
    batch, target = torch.randn(2, 128, 16)
    model, seen = Checkpointed(), {}
    for _ in range(2):
        model.append(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)))
    for model.is_on in (False, True):
        report = Inspector(model).run_inspection(batch, target, loss=F.mse_loss, costs=True)
        seen[model.is_on] = costs = report.observation.costs
        assert costs.multiply_adds == costs_of(model, batch).multiply_adds > 0
    assert seen[True].multiply_adds == seen[False].multiply_adds
    assert seen[True].saved_bytes < seen[False].saved_bytes / 4
    assert seen[True].peak_bytes < seen[False].peak_bytes


def allocated_at_most(run) -> int:
    """The most bytes beyond the start that torch's allocator had handed out, by its profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    del kept
    allocations = profiler.profiler.kineto_results.events()
    level = peak = 0
    for event in allocations:
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def test_the_peak_is_that_of_torchs_allocator() -> None:
    """Of a forward and of a whole step, up to what kernels take for themselves."""
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.Tanh())
    batch, target = torch.randn(64, 64), torch.randn(64, 256)
    held = sum(p.nbytes for p in model.parameters()) + batch.nbytes

    forward = costs_of(model, batch)
    assert forward.held_bytes == held
    assert forward.peak_bytes - held == allocated_at_most(lambda: model(batch))

    def step() -> None:
        F.mse_loss(model(batch), target).backward()

    measured = Inspector(model).run_inspection(batch, target, loss=F.mse_loss, costs=True)
    whole = measured.observation.costs
    expected = allocated_at_most(step)
    assert whole.backward
    assert whole.held_bytes == held + target.nbytes
    assert whole.peak_bytes - whole.held_bytes == pytest.approx(expected, rel=0.01)


def test_what_is_freed_on_the_way_is_no_part_of_the_peak() -> None:
    """Without gradients two neighbours of a chain are in use at a time, no more."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(20)))
    with torch.no_grad():
        costs = costs_of(model, torch.randn(100, 32))
    assert costs.peak_bytes - costs.held_bytes == 2 * 100 * 32 * 4
    assert costs_of(model, torch.randn(100, 32)).peak_bytes > costs.peak_bytes + 10 * 100 * 32 * 4


def test_a_model_without_memory_has_costs_too() -> None:
    """On the meta device everything is as on the CPU."""
    on_cpu = costs_of(*bert())
    with torch.device("meta"):
        model, batch = bert()
    on_meta = costs_of(model, batch)
    assert replace(on_meta, peak_bytes=0) == replace(on_cpu, peak_bytes=0)
    assert on_meta.peak_bytes == pytest.approx(on_cpu.peak_bytes, rel=0.05)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_measured_says_so() -> None:
    """A script has shapes and parameters, and a sentence in place of costs."""
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(8, 4)
    script = Inspector(torch.jit.script(model)).summary(batch)
    assert script.totals["parameters"] == 20
    assert script.totals["multiply_adds"] is None
    assert "the costs of a deployed model are not measured" in str(script)
    compiled = torch.compile(model, backend="eager")
    assert Inspector(compiled).summary(batch).totals["multiply_adds"] == 8 * 4 * 4
    exported = torch.export.export(model, (batch,))
    assert Inspector(exported).summary(batch).totals["multiply_adds"] == 8 * 4 * 4


def test_saved_tensors_out_of_sight_say_so() -> None:
    """`torch.func` does not run below hooks on saved tensors; all else is measured."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda x: self.energy(x).square().sum())(x)

    summary = Inspector(Forces()).summary(torch.randn(8, 4))
    assert summary.totals["multiply_adds"] > 0
    assert summary.totals["saved_bytes"] is None
    assert "what autograd saves was not measured" in str(summary)


def test_an_error_of_the_model_is_its_own() -> None:
    """It passes as it is, with the hint that an inspection gives."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Inspector(nn.Linear(4, 4)).summary(torch.randn(8, 5))


def test_the_loss_and_backward_of_the_user_are_not_run_twice_by_accident() -> None:
    """A function that runs the backward pass is called by the inspection alone."""
    calls = []
    report = Inspector(nn.Linear(4, 4)).run_inspection(
        torch.randn(8, 4), backward=lambda loss: calls.append(loss.backward()), costs=True
    )
    assert len(calls) == 1
    assert report.observation.costs.backward


def test_several_losses_are_measured_as_their_sum() -> None:
    """Without the passes for each of them, which the inspection makes to compare them."""
    losses = {"a": lambda out: out[:, 0].square().mean(), "b": lambda out: out[:, 1].mean()}
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(64, 4)

    def costs(loss: object) -> Costs:
        return Inspector(model).run_inspection(batch, loss=loss, costs=True).observation.costs

    several, summed = costs(losses), costs(lambda out: losses["a"](out) + losses["b"](out))
    assert several.why_not == ""
    assert several.backward
    assert several.peak_bytes == pytest.approx(summed.peak_bytes, abs=16)  # a scalar more or less


def test_ctrl_c_leaves_no_mode_behind() -> None:
    """Whatever ends the forward, neither hooks nor modes stay on."""

    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        Inspector(model).summary(torch.randn(2, 2))
    assert not model._forward_hooks
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    packed: list[Tensor] = []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        torch.ones(2, requires_grad=True).sigmoid()
    assert len(packed) == 1
