"""What the engine says of a run, beyond the promises that hold for every model."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import re
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from corpus.models.hooked import (
    CatchesException,
    Encodes,
    ForwardCalledDirectly,
    Functional,
    Lazy,
    Lists,
    MutatesInput,
    Normalises,
    PlainList,
    ReturnsNone,
    SharedByName,
    Small,
    Wrapped,
    padded,
    padded_encoder,
    x,
)
from pytest_modelhealth import Inspector
from pytest_modelhealth.capture import Request, find_engine
from pytest_modelhealth.report import Observation, Status
from tests.capture.oracle import (
    Recorded,
    assert_statistics,
    changes,
    fingerprint,
    numbers,
    projection,
)


def inspect(model: Any, batch: Any = None, **options: Any) -> Observation:
    """Run one inspection without an error of ours."""
    observation = run(model, batch, **options)
    assert observation.errors == ()
    return observation


def run(model: Any, batch: Any = None, **options: Any) -> Observation:
    """Run one inspection."""
    request = Request(model, x() if batch is None else batch, **options)
    return find_engine(model).run(request)


# ---- errors of ours ----------------------------------------------------------------------------


class Unexpected(Tensor):
    """A tensor that raises when it is asked what no code of torch asks of it."""

    @property
    def dtype(self) -> torch.dtype:
        raise RuntimeError("broken on purpose")

    def is_floating_point(self) -> bool:
        raise RuntimeError("broken on purpose")


class Returns(nn.Linear):
    """A layer that returns a tensor of this class."""

    kind: type[Tensor] = Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.as_subclass(Tensor)).as_subclass(self.kind)


def test_our_own_errors_never_reach_the_user() -> None:
    """A hook of ours that fails costs what it would have seen of one layer, and is said."""
    runs = []
    for kind in (Tensor, Unexpected):
        torch.manual_seed(0)
        model, batch = nn.Sequential(Returns(6, 5), nn.ReLU(), Returns(5, 2)), x()
        model[0].kind = kind
        recorded = Recorded(model)
        observation = run(model, batch, loss=recorded.loss, backward=recorded.backward)
        runs.append(recorded.run)
    assert runs[0] == runs[1]
    assert "layer '0'" in observation.errors[0]
    assert "broken on purpose" in observation.errors[0]
    assert observation.layers["0"].status is Status.UNSUPPORTED
    assert "an error in pytest-modelhealth" in observation.layers["0"].reason
    assert observation.layers["2"].activations is not None


# ---- statuses and notes ------------------------------------------------------------------------


def test_a_record_has_every_field() -> None:
    """It is filled without the constructor, which would give what is left out its default."""
    report = Inspector(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).run_inspection(torch.ones(2, 2))
    for record in report.layers.values():
        assert vars(record).keys() == {field.name for field in fields(record)}
        assert replace(record) == record


def ids() -> Tensor:
    """Return ids of a table of eleven."""
    return torch.randint(0, 11, (3, 5))


# each with a layer, what became of it, and what its reason says
REASONS: list[tuple[Any, Any, str, Status, str]] = [
    (Lists, x, "blocks", Status.NOT_CALLED, "no forward"),
    (SharedByName, ids, "shared", Status.NOT_CALLED, "'embed', tied to its parameters"),
    (
        *(SharedByName, ids, "read", Status.PARAMETERS_READ),
        "`[a-z_]+` read its weight, in .* the code around",
    ),
    (Encodes, x, "codebook", Status.NOT_CALLED, "other methods"),
    (
        *(ForwardCalledDirectly, x, "lin", Status.PARAMETERS_READ),
        "`linear` read its weight and bias, in its own .forward()",
    ),
    (CatchesException, x, "fails", Status.UNSUPPORTED, "raised ValueError"),
    (ReturnsNone, x, "nothing", Status.UNSUPPORTED, "^it returned None, no tensor$"),
]


@pytest.mark.parametrize(("build", "batch", "layer", "status", "words"), REASONS)
def test_what_was_not_observed_says_why(
    build: Any, batch: Any, layer: str, status: Status, words: str
) -> None:
    """A container, a tied weight and a direct `.forward()` are told apart; so is what raised.

    An exception that is handled around the inspection is none of the layer's, and what follows one
    that the model caught is not the layer's own.
    """
    try:
        raise KeyError("earlier")
    except KeyError:
        layers = inspect(build(), batch()).layers
    assert layers[layer].status is status
    assert re.search(words, layers[layer].reason)
    assert "fails.relu" not in layers


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_backward_that_builds_a_graph_is_not_taken_for_the_loss_and_said() -> None:
    """Gradients of a pass with create_graph are left out, with the reason."""
    layers = inspect(Small(), backward=lambda loss: loss.backward(create_graph=True)).layers
    assert layers["0"].gradients is None
    assert "create_graph" in layers["0"].reason


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Small, []),  # noise is a bug
        (lambda: torch.compile(Small(), backend="eager"), ["the model is compiled"]),
        (Lazy, ["a copy was inspected"]),
        (PlainList, ["2 modules (BatchNorm1d, Linear) are kept in plain attributes"]),
        (MutatesInput, ["the forward wrote to tensor 0 of the batch"]),
        (lambda: Normalises(6, 2), ["wrote to the parameter 'weight'"]),
        (lambda: nn.Sequential(nn.Tanh(), Normalises(6, 2)), ["the parameter '1.weight'"]),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_notes(build: Any, words: list[str]) -> None:
    """What a reader should know is said once."""
    notes = inspect(build()).notes
    assert len(notes) == len(words)
    assert all(said in note for said, note in zip(words, notes, strict=True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_functional_layers_that_cannot_be_looked_at_are_noted() -> None:
    """Inside a fused encoder the functional mode is off, and that is said."""
    with torch.no_grad():
        _, note = inspect(padded_encoder(), padded()).notes
    assert "functional layers inside 'TransformerEncoder'" in note


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_in_a_plain_list_are_not_initialised_either() -> None:
    """They are no part of the registry, yet the forward would make their parameters for good."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.LazyLinear(3), nn.LazyBatchNorm1d()]

        def forward(self, x: Tensor) -> Tensor:
            for module in self.hidden:
                x = module(x)
            return x

    model = Hidden()
    notes = inspect(model).notes
    assert any("a copy was inspected" in note for note in notes)
    held = [t for m in model.hidden for t in (*m._parameters.values(), *m._buffers.values())]
    assert sum(map(is_lazy, held)) == 6  # all but the count of batches


# ---- functional layers -------------------------------------------------------------------------


def test_functional_activations_are_layers_named_after_their_caller() -> None:
    """Each call is one layer; a module's own call of its function is none."""
    observation = inspect(Functional())
    functional = {n: r.activation for n, r in observation.layers.items() if r.functional}
    assert functional == {
        "relu": "relu",
        "relu_1": "relu",
        "sigmoid": "sigmoid",
        "gelu": "gelu",
        "softmax": "softmax",
    }
    assert list(observation.layers)[:3] == ["", "lin", "relu"]


def test_functional_statistics_are_those_of_the_same_computation() -> None:
    """Activations and gradients of a functional layer, computed again by hand."""
    model, batch = Functional(), x()
    layers = inspect(model, batch, loss=projection).layers
    hidden = model.lin(batch).relu()
    hidden.retain_grad()
    middle = hidden.relu() + hidden.sigmoid()
    squashed = F.gelu(middle)
    squashed.retain_grad()
    projection(squashed.tanh().softmax(1)).backward()
    assert_statistics(layers["relu"].activations, numbers([hidden]), "relu")
    assert_statistics(layers["relu"].gradients, numbers([hidden.grad]), "gradient of relu")
    assert_statistics(layers["gelu"].inputs, numbers([middle]), "input of gelu")
    assert_statistics(layers["gelu"].gradients, numbers([squashed.grad]), "gradient of gelu")


def test_functional_names_avoid_modules() -> None:
    """A functional layer does not take the name of a module."""

    class Clash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.relu(x))

    layers = inspect(Clash()).layers
    assert layers["relu"].type_name == "Linear"
    assert layers["relu_1"].activation == "relu"


def test_modes_of_the_user_stay_where_they_were() -> None:
    """A function mode around the inspection sees the model's calls, and is still on afterwards."""
    seen = []

    class Sees(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    model, batch = padded_encoder(), padded()
    with torch.no_grad(), Sees() as mode:
        inspect(model, batch)
        assert torch._C._len_torch_function_stack() == 1
        assert torch._C._get_function_stack_at(0) is mode
    assert F.linear in seen


# ---- each thing once ---------------------------------------------------------------------------


def test_no_tensor_is_reduced_twice() -> None:
    """An output that is the next layer's input, or its container's output, is one object."""
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.Sigmoid()), nn.Linear(5, 2))
    layers = inspect(model, backward=False).layers
    assert layers[""].inputs is layers["0"].inputs is layers["0.0"].inputs
    assert layers["0.0"].activations is layers["0.1"].inputs
    assert layers["0"].activations is layers["0.1"].activations is layers["1"].inputs
    assert layers[""].activations is layers["1"].activations


def test_units_are_kept_of_a_tensor_first_seen_as_an_input() -> None:
    """A residual sum is first an input, without units, then the output of its block."""

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            total = super().forward(x) + x
            nn.functional.relu(total)
            return total

    assert inspect(Block(6, 6)).layers[""].activations.units is not None


# ---- what lies around the model ----------------------------------------------------------------


def test_a_graph_from_before_can_still_be_differentiated() -> None:
    """Buffers that an outer graph saved are put back without a trace in their version."""

    class Scales(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 2)
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model = Scales()
    outer = model(x()).sum()
    inspect(model)
    outer.backward()
    assert model.weight.grad is not None


def test_leaves_outside_the_model_get_no_gradient() -> None:
    """A parameter that only the loss knows keeps its own gradient."""
    temperature = nn.Parameter(torch.ones(2))
    temperature.grad = earlier = torch.full((2,), 5.0)
    inspect(Small(), loss=lambda output: (output * temperature).sum())
    assert temperature.grad is earlier
    assert torch.equal(earlier, torch.full((2,), 5.0))


# ---- memory ------------------------------------------------------------------------------------


class Alive:
    """Counts, at each layer's return, how many outputs are alive."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: list[weakref.ref[Tensor]] = []
        self.counts: list[int] = []
        for module in model.modules():
            module.register_forward_hook(self.see)

    def see(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs.append(weakref.ref(output))
        self.counts.append(self.now())

    def now(self) -> int:
        return len(
            {id(tensor) for tensor in (output() for output in self.outputs) if tensor is not None}
        )


@pytest.fixture
def without_gc() -> Any:
    """Turn off the collector of cycles: what is freed is freed at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_gc")
def test_a_run_leaves_nothing_to_the_garbage_collector() -> None:
    """All that a run made is freed with its report: results of layers are a good part of it."""
    step = nn.Sequential(nn.Linear(6, 6), nn.Flatten(), nn.ReLU(), Functional())
    inspect(step)
    gc.collect()
    inspect(step)
    assert gc.collect() == 0


@pytest.mark.usefixtures("without_gc")
@pytest.mark.parametrize("grad", [True, False])
def test_no_activation_outlives_the_bare_run(grad: bool) -> None:
    """At every layer as many outputs are alive as in a bare run, and none after it."""

    def build() -> tuple[nn.Module, Alive]:
        layers = [m for _ in range(6) for m in (nn.Linear(6, 6), nn.Flatten(), nn.ReLU())]
        model = nn.Sequential(nn.Sequential(*layers), Functional())
        return model, Alive(model)

    bare, expected = build()
    inspected, seen = build()
    with torch.set_grad_enabled(grad):
        loss = projection(bare(x()))
        in_loss = expected.now()
        if grad:
            loss.backward()
        del loss
        in_inspected_loss = []

        def counted(output: Tensor) -> Tensor:
            value = projection(output)
            in_inspected_loss.append(seen.now())
            return value

        inspect(inspected, loss=counted)
    assert seen.counts == expected.counts
    # the loss's own argument is the one tensor more
    assert in_inspected_loss[0] <= in_loss + 1
    assert seen.now() == expected.now() == 0


# ---- hooks in copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_made_during_a_run_carries_no_hook(duplicate: Any) -> None:
    """A copy or a pickle made in the loss runs without us, and nothing of it is recorded."""
    model = Small()
    copies = []

    def copying(output: Tensor) -> Tensor:
        copies.append(duplicate(model))
        copies[0](x())
        return output.sum()

    observation = inspect(model, loss=copying)
    assert observation.layers["0"].calls == 1
    assert copies[0](x()).shape == (4, 2)


def test_a_compiled_model_is_not_compiled_again() -> None:
    """Neither the inspection nor the next bare run compiles anything."""
    counter = torch._dynamo.testing.CompileCounter()
    model, batch = torch.compile(Small(), backend=counter), x()
    model(batch)
    assert counter.frame_count == 1
    inspect(model, batch)
    model(batch)
    assert counter.frame_count == 1


def test_compiled_models_in_two_threads_leave_the_stance_as_it_was() -> None:
    """The compiler's stance is one for the process: the last run to end resets it."""
    models = [torch.compile(Small(), backend="eager") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(inspect, models))
    assert torch._dynamo.eval_frame._stance.stance == "default"


# ---- Ctrl-C while the model is put back --------------------------------------------------------


class Impatient(random.Random):
    """A generator during whose restoration the user presses Ctrl-C again."""

    def setstate(self, state: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        super().setstate(state)


class DrawsImpatiently(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.fails = Impatient(0), False

    def between(self, x: Tensor) -> Tensor:
        self.drawn = self.generator.random()
        if self.fails:
            raise ValueError("of the model")
        return x * self.drawn


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("fails", [False, True])
def test_ctrl_c_waits_until_the_model_is_put_back(fails: bool) -> None:
    """A Ctrl-C that falls into the restoration is raised after it, not in the middle of it."""
    model = DrawsImpatiently()
    model.fails = fails
    batch, handler = x(), signal.getsignal(signal.SIGINT)
    state, before = model.generator.getstate(), fingerprint(model, batch)
    with pytest.raises(KeyboardInterrupt) as raised:
        run(model, batch)
    assert changes(before, fingerprint(model, batch)) == []
    assert model.generator.getstate() == state
    assert signal.getsignal(signal.SIGINT) is handler
    assert isinstance(raised.value.__context__, ValueError) == fails
