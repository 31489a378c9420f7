"""The engine's promises, held against every model of the zoo."""

from __future__ import annotations

import functools
import itertools
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corpus.models.hooked import ZOO, Case, make, seeded
from pytest_modelhealth.report import Status
from tests.capture.architectures import ARCHITECTURES
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

# a script is run as a copy of its graph: see tests/capture/deployed
CASES = {n: c for n, c in (ZOO | ARCHITECTURES).items() if n not in ("script", "jit trace")}

# The zoo uses what torch deprecates or warns about on purpose; none of it is the engine's.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*hook.*always_call"),
]


def assert_unchanged(case: Case, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Do nothing if two fingerprints are equal, up to a batch that the forward itself changes."""
    assert [name for name in changes(before, after) if case.keeps_batch or name != "batch"] == []


def give_gradients(model: nn.Module) -> None:
    """Let every other parameter have a gradient from earlier."""
    for parameter in list(model.parameters())[::2]:
        if not isinstance(parameter, nn.parameter.UninitializedParameter):
            parameter.grad = torch.ones_like(parameter)


# what a second bare run is not, where the first wrote to the batch, trained or was compiled
CHANGES_BY_RUNNING = ("mutates its input", "optimizer in backward", "lazy")


@pytest.mark.parametrize("name", CASES)
def test_one_inspection_keeps_every_promise(name: str) -> None:
    """Every number is that of an independent truth, and the model neither notices nor changes."""
    case = CASES[name]
    expected = bare_run(case, *make(case))
    model, batch = make(case)
    give_gradients(model)
    seeded(RUN_SEED)
    before = fingerprint(model, batch)
    recorded = Recorded(model)
    backward = recorded.backward if expected.gradients else None
    observation = inspect(case, model, batch, loss=recorded.loss, backward=backward)
    assert observation.errors == ()
    # state, gradients, hooks, random generators and pickle are as before
    assert_unchanged(case, before, fingerprint(model, batch))
    # output, loss, gradients and buffers inside are those of a bare run, and so is a run afterwards
    if name == "lazy":  # a copy ran
        expected = replace(expected, gradients={}, buffers={})
        recorded.run = replace(recorded.run, gradients={}, buffers={})
    assert recorded.run == expected
    assert name in CHANGES_BY_RUNNING or bare_run(case, model, batch) == expected
    # statistics are those of clones that other hooks took, of a bare backward, and of a zero that
    # is added to each activation
    assert compare_activations(case, observation)
    compare_parameter_gradients(case, observation)
    assert not case.gradients_by_eps or compare_gradients(case, observation) is not None
    # no layer is absent, and each has the right status and a reason
    assert {n for n, r in observation.layers.items() if not case.expects(n, r.status)} == set()
    assert all(r.reason for r in observation.layers.values() if r.status is not Status.OBSERVED)


class Stop(BaseException):
    """An exception that no model catches, like KeyboardInterrupt."""


SITES = [("forward", Stop), ("loss", Stop), ("backward", Stop), ("forward", ValueError)]
REPRESENTATIVE = ["gpt2", "t5", "mixtral", "mamba2", "wav2vec2", "mobilenet", "llava"]
OF_ZOO = [name for name in ZOO if name in CASES]
RAISING = [(name, *site) for name, site in zip(OF_ZOO, itertools.cycle(SITES), strict=False)]
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
        site = "loss"
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
