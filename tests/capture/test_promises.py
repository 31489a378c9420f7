"""The engine's promises, held against every model of the zoo."""

from __future__ import annotations

import functools
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth.report import Status
from tests.capture.architectures import ARCHITECTURES
from tests.capture.models import ZOO, Case, make, seeded
from tests.capture.oracle import (
    RUN_SEED,
    Recorded,
    bare_run,
    call,
    changes,
    compare_activations,
    compare_gradients,
    compare_parameter_gradients,
    fingerprint,
    inspect,
    projection,
    tensors_in,
)

CASES = ZOO | ARCHITECTURES

# The zoo uses what torch deprecates or warns about on purpose; none of it is the engine's.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*hook.*always_call"),
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Each model in turn."""
    return CASES[request.param]


def assert_unchanged(case: Case, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Do nothing if two fingerprints are equal, up to a batch that the forward itself changes."""
    assert [name for name in changes(before, after) if case.keeps_batch or name != "batch"] == []


def give_gradients(model: nn.Module) -> None:
    """Let every other parameter have a gradient from earlier."""
    for parameter in list(model.parameters())[::2]:
        if not isinstance(parameter, nn.parameter.UninitializedParameter):
            parameter.grad = torch.ones_like(parameter)


def test_inspection_leaves_no_trace(case: Case) -> None:
    """State, gradients, hooks, random generators and pickle are what they were, bit for bit."""
    model, batch = make(case)
    give_gradients(model)
    before = fingerprint(model, batch)
    seeded(RUN_SEED)
    before |= {k: v for k, v in fingerprint(model, batch).items() if k in GENERATORS}
    observation = inspect(case, model, batch)
    assert_unchanged(case, before, fingerprint(model, batch))
    assert observation.errors == ()


GENERATORS = ("torch", "python", "numpy")


def test_inspected_run_is_the_bare_run(case: Case) -> None:
    """Output, loss, gradients and buffers inside an inspection equal a bare run's, bit for bit."""
    model, batch = make(case)
    expected = bare_run(case, model, batch)
    model, batch = make(case)
    recorded = Recorded(model)
    backward = recorded.backward if expected.gradients else None
    inspect(case, model, batch, loss=recorded.loss, backward=backward)
    if case is ZOO["lazy"]:  # a copy ran
        expected.gradients = expected.buffers = recorded.run.gradients = recorded.run.buffers = {}
        assert recorded.run == expected
        return
    if case is ZOO["script"]:  # even bare, its gradients change in the second run: it is optimised
        recorded.run.gradients = expected.gradients
        assert recorded.run == expected
        return
    assert recorded.run == expected
    # a batch that was written to is the user's own, and a bare run trains the second of these
    if case not in (ZOO["mutates its input"], ZOO["optimizer in backward"]):
        assert bare_run(case, model, batch) == expected


def test_activation_statistics_are_those_of_clones(case: Case) -> None:
    """Statistics of every layer are those of clones taken by independent hooks."""
    model, batch = make(case)
    observation = inspect(case, model, batch)
    assert compare_activations(case, observation)


def test_parameter_gradient_statistics_are_those_of_backward(case: Case) -> None:
    """Each parameter's gradient has the statistics of the one that a bare backward leaves."""
    model, batch = make(case)
    observation = inspect(case, model, batch)
    compare_parameter_gradients(case, observation)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gradients_by_eps])
def test_gradients_are_those_of_brute_force(name: str) -> None:
    """The gradient with respect to each activation is that of a zero added to it."""
    case = CASES[name]
    model, batch = make(case)
    observation = inspect(case, model, batch)
    compare_gradients(case, observation)


def test_every_layer_ends_with_the_right_status(case: Case) -> None:
    """No layer is absent; each is observed, or says what else became of it and why."""
    model, batch = make(case)
    observation = inspect(case, model, batch)
    unexpected = {
        name: (record.status, record.reason)
        for name, record in observation.layers.items()
        if not case.expects(name, record.status)
    }
    assert unexpected == {}
    assert all(r.reason for r in observation.layers.values() if r.status is not Status.OBSERVED)


class Stop(BaseException):
    """An exception that no model catches, like KeyboardInterrupt."""


SITES = [("forward", Stop), ("forward", ValueError), ("loss", Stop), ("backward", Stop)]
REPRESENTATIVE = ["gpt2", "t5", "mixtral", "mamba2", "wav2vec2", "mobilenet", "llava"]
RAISING = [(name, *site) for name in ZOO for site in SITES]
RAISING += [
    (name, site, kind)
    for name in REPRESENTATIVE
    for site in ("forward", "loss", "backward")
    for kind in (ValueError, KeyboardInterrupt)
]


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("name", "site", "kind"), RAISING, ids=[f"{n}-{s}-{k.__name__}" for n, s, k in RAISING]
)
def test_exceptions_pass_through_and_leave_no_trace(
    name: str, site: str, kind: type[BaseException]
) -> None:
    """Whatever is raised reaches the user as the same object, and the model is as it was."""
    case, error = CASES[name], kind("here")
    raiser = _raiser(error)
    model, batch = make(case)
    if site == "backward" and not bare_run(case, *make(case)).gradients:
        pytest.skip("no backward pass")
    give_gradients(model)
    if site == "forward":
        hook = _raise_late(case, model, raiser)
    seeded(RUN_SEED)
    before = fingerprint(model, batch)

    def loss(output: Any) -> Tensor:
        if site == "loss":
            raiser()
        value = projection(output)
        for tensor in tensors_in(output) if site == "backward" else ():
            if tensor.requires_grad:
                tensor.register_hook(raiser)
        return value

    with pytest.raises(kind) as raised:
        inspect(case, model, batch, loss=loss)
    assert raised.value is error or kind is KeyboardInterrupt  # Python makes its own
    assert_unchanged(case, before, fingerprint(model, batch))
    if site == "forward":
        hook.remove()
    with case.context():
        call(model, batch)  # it still works


def _raise_late(case: Case, model: nn.Module, raiser: _raiser) -> Any:
    """Let the module that returns last but the model itself raise after its forward."""
    twin, batch = make(case)
    returned: list[str] = []
    for name, module in twin.named_modules():
        hook = functools.partial(_append, returned, name)
        nn.Module.register_forward_hook(module, hook)
    with case.context():
        call(twin, batch)
    inner = [name for name in returned if name not in ("", "_orig_mod")]
    modules = dict(model.named_modules())
    name = next((n for n in reversed(inner) if n in modules and n != "fails"), "")
    return nn.Module.register_forward_hook(modules[name], raiser)


def _append(names: list[str], name: str, *args: Any) -> None:
    names.append(name)


class _raiser:  # noqa: N801 - used as a function, but it has to be pickled
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *args: Any) -> None:
        if isinstance(self.error, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does
        raise self.error

    def __deepcopy__(self, memo: Any) -> _raiser:
        return self
