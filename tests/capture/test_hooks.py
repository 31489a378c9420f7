"""What hooks and the function mode see of calls, options and shared gradients, and leave."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.report import LayerRecord
from tests.capture.oracle import report_of

BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def layers_of(model: nn.Module, batch: Tensor = BATCH) -> Mapping[str, LayerRecord]:
    """Return the layers of a run whose loss is the sum."""
    return Inspector(model).run_inspection(batch, loss=torch.sum).observation.layers


def largest_gradients(layers: Mapping[str, LayerRecord]) -> dict[str, float]:
    """Return the largest gradient of each layer that has one."""
    return {n: r.gradients.max for n, r in layers.items() if r.gradients is not None}


def test_a_gradient_that_two_layers_share_is_read_once() -> None:
    """A container returns what its last layer did: one gradient, one object in the report.

    What a linear layer makes of three dimensions is a view.
    """
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Flatten(0, 1))
    layers = layers_of(model, torch.ones(2, 3, 6))
    assert largest_gradients(layers) == {"": 1.0, "0": 1.0, "0.0": 1.0, "1": 1.0}
    assert layers["0"].gradients is layers["0.0"].gradients
    assert layers[""].gradients is layers["1"].gradients


def test_a_view_without_a_gradient_was_written_to_unless_another_shares_its_base() -> None:
    """A linear layer's view that is written to has the gradient of its base; an unused one none.

    What flattens a tensor returns a view of a base that the loss may be computed from all the same.
    """

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.unused = nn.Linear(6, 6), nn.Flatten(0, 1)

        def forward(self, x: Tensor) -> Tensor:
            made = self.lin(x)
            made[:, 0].mul_(4.0)
            again = made * 2.0
            self.unused(again)
            return again

    batch = torch.ones(2, 3, 6)
    seen, model = [], Views()
    model.lin.register_forward_hook(
        lambda _, __, y: seen.append(y._base.register_hook(seen.append))
    )
    layers = layers_of(model, batch)
    gradients = layers["lin"].gradients
    expected = next(one for one in seen if isinstance(one, Tensor))
    assert gradients is not None
    assert (gradients.min, gradients.max) == (expected.min(), expected.max()) == (2.0, 8.0)
    assert layers["unused"].gradients is None
    assert layers["unused"].status == "unused_in_loss"


@pytest.mark.parametrize(("write", "factor"), [("mul_", 3.0), ("add_", 1.0)])
def test_a_gradient_of_a_view_whose_base_is_written_to_is_two(write: str, factor: float) -> None:
    """The layer inside returned the view as it was before, the container as it is after.

    What arrives at an addition has no memory of its own, as the gradient of a sum.
    """

    class WritesToBase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fold, self.lin = nn.Unflatten(1, (2, 3)), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lin(x)
            view = self.fold(x)
            getattr(x, write)(3)
            return view

    gradients = largest_gradients(layers_of(WritesToBase()))
    assert gradients == {"": 1.0, "fold": factor, "lin": factor}


def test_a_gradient_changed_between_two_layers_is_two() -> None:
    """A hook of the user's, put on inside the container, changes what reaches the layer inside."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lin(x)
            x.register_hook(lambda gradient: 3 * gradient)
            return x

    assert largest_gradients(layers_of(Scales())) == {"lin": 1.0, "": 3.0}


# ---- how modules and calls are set up ------------------------------------------------------------


def records(model: nn.Module) -> Mapping[str, LayerRecord]:
    """Return the layers of one inspection."""
    return report_of(model, torch.randn(4, 6)).layers


def test_modules_tell_how_they_are_set_up() -> None:
    """Plain attributes of modules are recorded; tensors, tuples and private ones are not."""
    model = nn.Sequential(nn.BatchNorm1d(6, eps=1e-3), nn.Dropout(0.25), nn.Softmax(dim=0)).eval()
    seen = records(model)
    assert seen["0"].options == {
        "training": False,
        "num_features": 6,
        "eps": 1e-3,
        "momentum": 0.1,
        "affine": True,
        "track_running_stats": True,
    }
    assert seen["1"].options == {"training": False, "p": 0.25, "inplace": False}
    assert seen["2"].options == {"training": False, "dim": 0}
    assert seen[""].options == {"training": False}


def test_modules_of_one_class_tell_each_its_own() -> None:
    """An attribute that one of them alone has, or has as a number, is none of the other."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].rank = 4
    model[2].rank = [4]
    own = [records(model)[name].options for name in "012"]
    shared = {"training": True, "in_features": 6, "out_features": 6}
    assert own == [shared, shared | {"rank": 4}, shared]


class Calls(nn.Module):
    """Functional calls with arguments by position and by name."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(x, 0.3)
        x = F.softmax(x, dim=-1) + torch.softmax(x, 0) + x.softmax(dim=1)
        return F.dropout(x, 0.1)


def test_functional_calls_tell_their_arguments() -> None:
    """A functional layer's options are its call's plain arguments; dropout is its caller's."""
    seen = records(Calls().eval())
    assert seen["leaky_relu"].options == {"negative_slope": 0.3, "inplace": False}
    assert [seen[f"softmax{i}"].options for i in ("", "_1", "_2")] == [
        {"dim": -1},
        {"dim": 0},
        {"dim": 1},
    ]
    assert seen[""].options == {"training": False, "dropout_p": 0.1, "dropout_training": True}


def test_training_is_that_of_the_forward() -> None:
    """A forward that switches a layer's mode is recorded as it ran, and undone."""

    class Switches(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0].train()(x)

    model = Switches(nn.Dropout(0.5)).eval()
    assert records(model)["0"].options["training"] is True
    assert not model[0].training


# ---- the function mode among the user's own modes ------------------------------------------------


def modes() -> list[Any]:
    """Return the modes that are on, the outermost first."""
    depth = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(level) for level in range(depth)]


@pytest.mark.parametrize(
    ("event", "function"), [("return", "__enter__"), ("call", "__exit__"), ("call", "__enter__")]
)
def test_an_interruption_of_torchs_own_code_leaves_no_mode(event: str, function: str) -> None:
    """While torch had the mode in hand: it would put it back when its generator is collected."""
    code = inspect.unwrap(torch.overrides._pop_mode_temporarily).__code__

    def interrupt(frame: FrameType, happened: str, _: Any) -> None:
        manager = frame.f_locals.get("self")
        is_here = (happened, frame.f_code.co_name) == (event, function)
        if is_here and getattr(getattr(manager, "gen", None), "gi_code", None) is code:
            sys.setprofile(None)
            raise KeyboardInterrupt

    class Activates(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(F.softmax(x, -1))

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            Inspector(Activates()).run_inspection(torch.ones(2, 3))
    finally:
        sys.setprofile(None)
    assert modes() == []
    del raised
    gc.collect()
    assert modes() == []


def test_the_mode_is_off_inside_torchs_own_layers_and_on_around_them() -> None:
    """A functional layer after a Linear is seen, and so is one in a hook of the user's on it."""
    seen: dict[str, bool] = {}

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.hooked = nn.Linear(4, 4), nn.Linear(4, 4)
            self.hooked.register_forward_hook(lambda module, args, output: F.relu(output))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.hooked(F.gelu(self.plain(x))))

    model = Looks()
    forward = nn.Linear.forward

    def looking(module: nn.Linear, x: Tensor) -> Tensor:
        seen["plain" if module is model.plain else "hooked"] = bool(modes())
        return forward(module, x)

    nn.Linear.forward = looking
    try:
        report = Inspector(model).run_inspection(torch.randn(5, 4))
    finally:
        nn.Linear.forward = forward
    assert seen == {"plain": False, "hooked": True}
    assert {"gelu", "hooked.relu", "sigmoid"} <= set(report.layers)


# ---- the garbage collector waits while a step runs -----------------------------------------------


USUAL, RARE = (700, 11, 12), (100_000, 11, 12)


@pytest.fixture
def thresholds() -> Iterator[None]:
    """Thresholds that nobody else has, put back in any case."""
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


class Does(nn.Module):
    """Does something with the collector in its forward."""

    def __init__(self, what: Callable[[], object]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        self.what()
        return x * 2


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize(
    ("what", "after"),
    [
        (lambda: None, USUAL),
        (lambda: 1 / 0, USUAL),
        (lambda: gc.set_threshold(500, 5, 5), (500, 5, 5)),  # as a bare run would leave them
    ],
)
def test_a_step_runs_under_higher_thresholds(
    what: Callable[[], object], after: tuple[int, int, int]
) -> None:
    """A hundred thousand objects are waited for; afterwards they are what they were."""
    seen = []
    model = Does(lambda: (seen.append(gc.get_threshold()), what()))
    try:
        Inspector(model).run_inspection(torch.ones(2, 3), backward=False)
    except ZeroDivisionError:
        assert after is USUAL
    assert seen == [RARE]
    assert gc.get_threshold() == after
