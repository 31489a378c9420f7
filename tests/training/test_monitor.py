"""The monitor of a training loop: what it sees, when it looks, and that nothing of it stays."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import re
import signal
import threading
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from pytest_modelhealth import InspectionError, Inspector, LayerNotFoundError, ModelHealthWarning
from pytest_modelhealth.training.monitoring.row import STATISTICS, StepRow
from tests.training.models import Net, adam, batch, loss_of, net, train, trained, values
from tests.training.traces import traces


def copies(parameters: Iterator[Tensor]) -> list[np.ndarray]:
    """Return copies of parameters in float64."""
    return [parameter.detach().double().numpy().copy() for parameter in parameters]


def norm(arrays: list[np.ndarray]) -> float:
    """Return the norm of arrays together."""
    return math.sqrt(sum(float((array**2).sum()) for array in arrays))


def test_updates_and_gradients_are_those_of_the_optimizer() -> None:
    """Ratios equal the norms of clones; the gradient norm is the one before clipping."""
    model = net()
    optimizer = adam(model)
    with Inspector(model).monitor() as monitor:
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            before = copies(model.parameters())
            optimizer.step()
            after = copies(model.parameters())
            monitor.step_end(step, loss=loss)
            row = monitor.latest
            changes = [a - b for a, b in zip(after, before, strict=True)]
            assert row.gradient_norm == pytest.approx(float(total), rel=1e-6)
            assert row.update_ratio == pytest.approx(norm(changes) / norm(before), rel=1e-5)
            assert row["a", "parameter_norm"] == pytest.approx(norm(before[:2]), rel=1e-9)
            assert row["a", "update_ratio"] == pytest.approx(
                norm(changes[:2]) / norm(before[:2]), rel=1e-5
            )
            assert row.loss == loss.item()


def test_a_row_holds_the_statistics_of_the_report() -> None:
    """Each number of a row is one of the layer's record; `relu` is a functional layer."""
    model = net()
    with Inspector(model).monitor() as monitor:
        train(model, monitor)
    row, report = monitor.latest, monitor.report
    assert row.layers == ("", "a", "norm", "relu", "drop", "b") == tuple(report.layers)
    for layer in report:
        out, back = layer.activations, layer.gradients
        assert out is not None
        assert back is not None
        assert row[layer.name, "activation_std"] == out.std
        assert row[layer.name, "activation_abs_max"] == out.abs_max
        assert row[layer.name, "dead_fraction"] == out.dead_fraction
        assert row[layer.name, "gradient_norm"] == back.norm
        assert row[layer.name, "activation_nonfinite"] == 0
    assert row["b", "parameter_gradient_norm"] == pytest.approx(
        math.hypot(*(seen.norm for seen in report["b"].parameter_gradients.values()))
    )
    assert math.isnan(row["relu", "parameter_norm"])
    assert report.loss == row.loss
    assert str(row).startswith("step 3: loss ")
    assert "update ratio" in str(row)


class Prompt(nn.Module):
    """A layer that returns its parameter, so that a hook on its output is one on the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(16))

    def forward(self) -> Tensor:
        return self.value


class Prompted(Net):
    """The same, to which a prompt is added."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = Prompt()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(F.relu(self.norm(self.a(x) + self.prompt()))))


def hooks_of(model: nn.Module, *others: Any) -> dict[Any, Any]:
    """Return all dictionaries of hooks of modules, parameters, other objects and of torch."""
    named = [*model.named_modules(), *enumerate(others), ("torch", optimizers)]
    held = [(name, key, value) for name, one in named for key, value in vars(one).items()]
    both = ("_backward_hooks", "_post_accumulate_grad_hooks")
    held += [(name, key, getattr(p, key)) for name, p in model.named_parameters() for key in both]
    hooks = {(name, key): value for name, key, value in held if "hooks" in key}
    return {key: list(v.items()) if isinstance(v, dict) else v for key, v in hooks.items()}


def test_steps_between_are_free_of_us() -> None:
    """Hooks lie on the model in watched steps alone, and the training is the bare one.

    Between, each dictionary of hooks of model, parameters, optimizer and torch holds what the user
    put into it, and is none where it was none.
    """
    torch.manual_seed(0)
    model = Prompted()
    bare, optimizer = copy.deepcopy(model), adam(model)
    model.a.register_forward_hook(lambda *_: None)
    model.a.weight.register_hook(lambda gradient: gradient)
    optimizer.register_step_post_hook(lambda *_: None)
    before, changed = hooks_of(model, optimizer), [0]

    def look(step: int) -> None:
        changed.extend([step] * (hooks_of(model, optimizer) != before))

    with Inspector(model).monitor(every=3) as monitor:
        train(model, monitor, 8, optimizer=optimizer, after=look)
        assert hooks_of(model, optimizer) == before
    assert changed == [0, 0, 3, 6]
    assert monitor.history.steps.tolist() == [0, 3, 6]
    train(bare, steps=8)
    assert values(model) == values(bare)
    assert traces(model) == []


@pytest.mark.parametrize(
    ("every", "given", "watched"),
    [
        (1, [None, None, None], [0, 1, 2]),
        (2, [None] * 5, [0, 2, 4]),
        (10, [7, 8, 9, 10, 11], [7, 10]),
        (10, [1, 4, 7, 10, 13, 16, 19, 22], [1, 10, 22]),  # numbers that rise by three
        (100, [0, 64, 128, 192, 256], [0, 128, 256]),  # the first stride is a guess
        (5, [3, None, None, 6], [3, 5]),
    ],
)
def test_the_first_step_and_those_that_pass_a_multiple_are_watched(
    every: int, given: list[int | None], watched: list[int]
) -> None:
    """The next number is guessed from the last two."""
    model = net()
    with Inspector(model).monitor(every) as monitor:
        for number in given:
            loss_of(model).backward()
            monitor.step_end(number)
    assert monitor.history.steps.tolist() == watched


def test_only_what_is_watched_is_seen() -> None:
    """Wildcards, types, expressions and roles select; weights are not copied in vain."""
    model = net()
    with Inspector(model).watch("[ab]", "activations").monitor() as monitor:
        train(model, monitor)
    row = monitor.latest
    assert row.layers == ("a", "b")
    assert math.isnan(row.update_ratio)
    assert row["a", "activation_rms"] > 0
    assert math.isnan(row["a", "gradient_norm"])
    inspector = Inspector(model).watch(types=nn.BatchNorm1d, what="gradients")
    with inspector.watch(re.compile("b$")).monitor() as monitor:
        train(model, monitor, 1)
    row = monitor.latest
    assert row.layers == ("norm", "b")
    assert row["norm", "gradient_rms"] > 0
    assert math.isnan(row["norm", "activation_std"])
    assert row["b", "update_ratio"] > 0
    assert math.isnan(row["norm", "update_ratio"])


def test_micro_batches_count_together() -> None:
    """Activations are merged over them, and the gradient is the accumulated one."""
    model = net().eval()
    optimizer = adam(model)
    with Inspector(model).monitor() as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            for number in range(3):
                (loss_of(model, number) / 3).backward()
            total = norm(copies(p.grad for p in model.parameters()))
            optimizer.step()
            monitor.step_end()
    row = monitor.latest
    assert (row.passes, row.optimizer_steps) == (3, 1)
    assert row.gradient_norm == pytest.approx(total, rel=1e-6)
    assert monitor.report["a"].activations.count == 3 * 32 * 16
    assert monitor.report["a"].calls == 3


def test_hundreds_of_passes_in_a_step_take_no_more_memory() -> None:
    """What was found is merged as it comes; every pass counts."""
    model = net()
    optimizer = adam(model)
    with Inspector(model).monitor() as monitor:
        peaks = []
        for passes in (20, 80):
            tracemalloc.start()
            for _ in range(passes):
                loss_of(model).backward()
            optimizer.step()
            monitor.step_end()
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert monitor.latest.passes == passes
            assert monitor.report["a"].activations.count == passes * 32 * 16
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.parametrize("unscales", [True, False])
def test_a_scaler_leaves_the_numbers_as_they_are(unscales: bool) -> None:
    """Gradients come without the scale, whether the loop unscales them or the scaler does."""
    rows = []
    for is_scaled in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=is_scaled)
        with Inspector(model).monitor(scaler=scaler) as monitor:
            for step in range(2):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                scaler.scale(loss).backward()
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                monitor.step_end(loss=loss)
        rows.append(monitor.latest)
    plain, scaled = rows
    assert scaled.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-12)
    for statistic in STATISTICS:
        assert scaled.values[statistic].tolist() == pytest.approx(
            plain.values[statistic].tolist(), rel=1e-12, nan_ok=True
        )


def test_a_step_that_the_scaler_skips_is_no_step() -> None:
    """Infinite gradients are counted, and no update is claimed."""
    model = net()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with Inspector(model).monitor(scaler=scaler) as monitor:
        before = values(model)[0]
        scaler.scale(loss_of(model) * 1e4).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step_end()
    row = monitor.latest
    assert values(model)[0] == before
    assert row.optimizer_steps == 0
    assert math.isnan(row.update_ratio)
    assert not math.isfinite(row.gradient_norm)
    assert row.values["parameter_gradient_nonfinite"][1:].any()
    assert "no optimizer step" in str(row)


def test_two_optimizers_are_seen_apart() -> None:
    """Each parameter's gradient is the one that its own optimizer took."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"make": nn.Linear(4, 8), "judge": nn.Linear(8, 1)})
    bare = copy.deepcopy(model)

    def run(model: nn.ModuleDict) -> list[float]:
        make, judge = model["make"], model["judge"]
        makers, judges = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (make, judge))
        fake = make(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
        (judge(fake.detach()).mean() - judge(torch.ones(16, 8)).mean()).backward()
        taken = norm(copies(p.grad for p in judge.parameters()))
        judges.step()
        (-judge(fake).mean()).backward()  # adds to the judge's gradients
        makers.step()
        return [taken, norm(copies(p.grad for p in make.parameters()))]

    with Inspector(model).monitor() as monitor:
        run(model)
        monitor.step_end()
    row, taken = monitor.latest, run(bare)
    assert values(model) == values(bare)
    norms = [row[layer, "parameter_gradient_norm"] for layer in ("judge", "make")]
    assert norms == pytest.approx(taken, rel=1e-6)
    assert row.optimizer_steps == 2
    assert row["make", "update_ratio"] > 0
    assert row["judge", "update_ratio"] > 0
    assert monitor.report["judge"].calls == 3


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_closures_run_within_the_step(kind: type[torch.optim.Optimizer]) -> None:
    """The passes of a closure belong to the step, which begins with its weights."""

    def run(model: Net, step_end: Callable[..., object] = lambda **_: None) -> None:
        optimizer = kind(model.parameters(), lr=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(3):
            step_end(loss=optimizer.step(closure))

    model, bare = net(), net()
    rows: list[StepRow] = []
    with Inspector(model).monitor() as monitor:
        monitor.observers.append(rows.append)
        run(model, monitor.step_end)
    run(bare)
    assert values(model) == values(bare)
    assert all(row.optimizer_steps == 1 and row.update_ratio > 0 for row in rows)
    assert all(row.gradient_norm > 0 for row in rows)
    assert rows[-1].passes > 1 if kind is torch.optim.LBFGS else rows[-1].passes == 1


def test_optimizers_that_run_in_the_backward_are_seen() -> None:
    """Gradients that are gone when the backward is over are read when an optimizer takes them."""
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def descend(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    expected = net()
    loss_of(expected).backward()
    with Inspector(model).monitor() as monitor:
        loss_of(model).backward()
        monitor.step_end()
    row = monitor.latest
    assert row.gradient_norm == pytest.approx(
        norm(copies(p.grad for p in expected.parameters())), rel=1e-6
    )
    assert row.optimizer_steps == len(optimizers)
    assert row["a", "update_ratio"] > 0


class Force(Net):
    """A model that turns gradients on inside."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_validation_in_between_is_not_counted(in_thread: bool) -> None:
    """Passes without gradients, and those of other threads, are none of the training."""
    torch.manual_seed(0)
    model = Force()

    def after(step: int) -> None:
        model.eval()
        validate = threading.Thread(target=model, args=(torch.full((5, 8), 1e6),))
        with torch.no_grad():
            (validate.start if in_thread else validate.run)()
        if in_thread:
            validate.join()
        model.train()

    with Inspector(model).monitor() as monitor:
        train(model, monitor, after=after)
    assert monitor.latest.passes == monitor.report["a"].calls == 1
    assert monitor.report["a"].activations.abs_max < 1e3
    assert values(model) == trained()


def test_a_monitor_that_is_forgotten_leaves_nothing() -> None:
    """Started and never closed, it takes its hooks with it."""
    model = net()
    monitor = Inspector(model).monitor().start()
    train(model, monitor)
    assert traces(model)
    del monitor
    assert traces(model) == []
    assert all(p._backward_hooks is None for p in model.parameters())


def test_an_inspection_in_between_is_kept_apart() -> None:
    """It sees what it sees without the monitor, and the monitor does not see it."""

    def inspected(model: Net, monitor: Any = None) -> list[str]:
        reports: list[str] = []

        def inspect(step: int) -> None:
            x, y = batch(77)
            report = Inspector(model).run_inspection(x, y, loss=F.cross_entropy, probes=False)
            reports.append(report.render("json"))

        train(model, monitor, after=inspect)
        return reports

    model = net()
    with Inspector(model).monitor(every=2) as monitor:
        assert inspected(model, monitor) == inspected(net())
    assert monitor.report["a"].calls == monitor.latest.passes == 1
    assert values(model) == trained()


def test_gradients_of_other_things_are_not_the_loss_s() -> None:
    """Forces within a forward and a penalty with ``create_graph`` do not count."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            energy = self.layer(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, retain_graph=True)
            return energy + 0 * force.sum()

    model = Energy()
    with Inspector(model).monitor() as monitor:
        x = torch.ones(2, 3, requires_grad=True)
        out = model(x)
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.square().sum()).backward()
        monitor.step_end()
    gradients = monitor.report["layer"].gradients
    assert gradients.count == 2  # one pass of three


class Stops(nn.Module):
    """Raises when it is told to."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return F.relu(x)


def stopping() -> nn.Sequential:
    """Return a model that raises in its middle when it is told to."""
    return nn.Sequential(nn.Linear(8, 8), Stops(), nn.Linear(8, 4))


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_exception_passes_through_and_leaves_nothing(error: BaseException) -> None:
    """It is the very object, and the model is free of us."""
    model = stopping()
    monitor = Inspector(model).monitor()

    def fail(step: int) -> None:
        model[1].error = error if step == 1 else None

    with pytest.raises(type(error)) as caught, monitor:
        train(model, monitor, after=fail)
    assert caught.value is error
    assert traces(model) == []
    assert len(monitor.history) == 2


def test_a_step_that_was_given_up_does_not_disturb_the_next() -> None:
    """A batch that raises in the forward and is skipped costs its own numbers alone."""
    model = stopping()
    with Inspector(model).monitor() as monitor:
        for error in (MemoryError(), KeyboardInterrupt(), None):
            model[1].error = error
            with suppress(MemoryError, KeyboardInterrupt):
                loss_of(model).backward()
            monitor.step_end()
    assert len(monitor.history) == 3
    assert monitor.report["1.relu"].calls == 1
    assert monitor.report["2"].gradients is not None
    assert traces(model) == []


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_step_end_leaves_nothing() -> None:
    """A signal that arrives while we settle is raised by us, and nothing stays."""
    model = net()
    monitor = Inspector(model).monitor()
    monitor.observers.append(lambda row: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), monitor:
        train(model, monitor)
    assert traces(model) == []
    assert len(monitor.history) == 1


def test_a_copy_made_meanwhile_is_not_watched_and_needs_nothing_of_ours() -> None:
    """Copies and pickles of a hooked model work like those of a bare one, without this package."""
    model = net()
    made: list[Any] = []

    def keep(step: int) -> None:
        made.append((copy.deepcopy(model), pickle.dumps(model)))

    with Inspector(model).monitor() as monitor:
        train(model, monitor, 1, after=keep)
        twin, data = made[0]
        assert b"modelhealth" not in data
        for other in (twin, pickle.loads(data)):
            assert torch.equal(other.eval()(batch()[0]), model.eval()(batch()[0]))
        assert values(twin) == values(model)


def test_thousands_of_steps_take_constant_memory() -> None:
    """Nothing of a step stays but its row, no tensor of it lives on, and no garbage is made."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(2, 2)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            monitor.step_end()

    with Inspector(model).monitor(keep=16) as monitor:
        run(40)
        gc.collect()
        tensors = _tensors()
        tracemalloc.start()
        run(140)  # in which what was there before is made anew, and counted
        gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        gc.disable()
        try:
            run(60)
            assert _tensors() == tensors
            assert gc.collect() == 0
        finally:
            gc.enable()
            last = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
        assert last - first < 20_000
    assert len(monitor.history) <= 16


def _tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_the_weights_before_are_gone_when_the_step_is() -> None:
    """Copies live between the two hooks of an optimizer alone."""
    model = net()
    counts: list[int] = []
    with Inspector(model).monitor() as monitor:
        train(model, monitor, 2, after=lambda step: counts.append(_tensors()))
    train(model, None, 2, after=lambda step: counts.append(_tensors()))
    assert counts[1] <= counts[3] + 2


class Nan(nn.Module):
    """Makes what is no number, forward or back, when it is told to."""

    kind = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "forward":
            return x / (x - x)
        return x + (x - x).sqrt() if self.kind == "backward" else x * 1.0


@pytest.mark.parametrize(
    ("what", "layer", "role", "text"),
    [
        ("forward", "block.1", "activations", "first in the activations of 'block.1'"),
        ("backward", "block.0", "gradients", "first in the gradients of 'block.0'"),
        ("batch", "block.0", "inputs", "first in the inputs of 'block.0'"),
        ("weight", "block.2", "parameters", "first in the parameter 'weight' of 'block.2'"),
        ("loss", "", "loss", "the loss is not finite, though all activations are"),
        ("", None, None, "loss"),
    ],
)
def test_the_origin_of_what_is_no_number_is_named(
    what: str, layer: str | None, role: str | None, text: str
) -> None:
    """The first layer that was given numbers, or where they are lost on the way back."""
    block = nn.Sequential(nn.Linear(8, 8), Nan(), nn.Linear(8, 4))
    model = nn.Sequential(OrderedDict(block=block))
    block[1].kind = what
    x, y = batch()
    if what == "batch":
        x[3, 2] = math.nan
    if what == "weight":
        block[2].weight.data[0, 0] = math.inf
    with Inspector(model).monitor() as monitor:
        loss = F.cross_entropy(model(x), y)
        loss = loss + math.inf if what == "loss" else loss
        loss.backward()
        monitor.step_end(loss=loss)
    origin = monitor.latest.origin
    assert (layer, role) == ((None, None) if origin is None else (origin.layer, origin.role))
    assert text in str(monitor.latest)


def test_observers_come_after_the_history_and_may_raise() -> None:
    """What one raises reaches the loop, which may go on."""
    model = net()
    lengths: list[int] = []

    def refuse(row: StepRow) -> None:
        lengths.append(len(monitor.history))
        if row.step == 1:
            raise RuntimeError("stop")

    with Inspector(model).monitor() as monitor:
        monitor.observers.append(refuse)
        for step in range(3):
            loss_of(model).backward()
            with pytest.raises(RuntimeError, match="stop") if step == 1 else nullcontext():
                monitor.step_end(step)
    assert lengths == [1, 2, 3]
    assert traces(model) == []


def test_two_models_are_monitored_side_by_side() -> None:
    """One monitor a model; a second one of the same, or of a part, is refused."""
    model, other = net(), net()
    with Inspector(model).monitor() as first, Inspector(other).monitor() as second:
        for monitored, monitor in ((model, first), (other, second)):
            with pytest.raises(InspectionError, match="monitored already"):
                Inspector(monitored).monitor().start()
            with pytest.raises(InspectionError, match="monitored already"):
                Inspector(monitored.a).monitor().start()
            train(monitored, monitor, 2)
    assert len(first.history) == len(second.history) == 2
    assert first.latest.layers == second.latest.layers
    with Inspector(model).monitor() as again:
        train(model, again, 1)


def test_a_monitor_begins_outside_of_an_inspection() -> None:
    """Within one it is refused, and the inspection is not disturbed."""
    model = net()
    monitor = Inspector(model).monitor()

    def loss(output: Tensor) -> Tensor:
        with pytest.raises(InspectionError, match="within an inspection"):
            monitor.start()
        return output.sum()

    Inspector(model).run_inspection(batch()[0], loss=loss, probes=False)
    with monitor:
        train(model, monitor, 1)


def test_a_loop_around_another_object_is_warned_of() -> None:
    """The monitor says so after the first step, once."""
    model, other = net(), net()
    with Inspector(model).monitor() as monitor:
        loss_of(other).backward()
        with pytest.warns(ModelHealthWarning, match=r"no forward pass of Net was seen in step 0"):
            monitor.step_end()
        monitor.step_end()


def test_parts_may_be_called_without_the_whole() -> None:
    """Each outermost call is a pass; functional layers in it are seen."""
    block = nn.Sequential(nn.Linear(8, 8), Stops())
    model = nn.ModuleDict({"encoder": block, "head": nn.Linear(8, 4)})
    with Inspector(model).monitor() as monitor:
        F.cross_entropy(model["head"](model["encoder"](batch()[0])), batch()[1]).backward()
        monitor.step_end()
    assert monitor.latest.passes == 2
    assert monitor.report["encoder.1.relu"].gradients is not None
    assert torch._C._len_torch_function_stack() == 0


def test_a_pattern_without_a_layer_is_refused() -> None:
    """Of functional layers, which show when the model runs, after a step."""
    model = net()
    monitor = Inspector(model).watch("gelu").monitor()
    with pytest.raises(LayerNotFoundError, match="matches no layer"), monitor:
        train(model, monitor)
    assert traces(model) == []
