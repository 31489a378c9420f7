"""What the monitor promises, held against every model of the zoo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from corpus.models.hooked import ZOO, Case, make, seeded
from pytest_modelhealth import Inspector, LayerRecord
from pytest_modelhealth.report import ROLES, Observation, Status
from tests.capture.oracle import RUN_SEED, call, inspect, projection, raw
from tests.training.traces import traces

# The zoo uses what torch deprecates or warns about on purpose; none of it is the monitor's.
pytestmark = pytest.mark.filterwarnings("ignore")

COMPILED = ("compiled, cold", "compiled, warm", "compiled in place")
"""Compiled: see test_compiled.py."""
DIFFERS_BARE = ("script", "moves between lists")
"""The first differs from run to run by itself, the second can run but once."""
CASES = {name: case for name, case in ZOO.items() if name not in (*COMPILED, *DIFFERS_BARE)}

WITHOUT_GRADIENTS = ("padded encoder", "encoder layer, evaluated", "inference mode")
"""They run without gradients, so none of their passes belongs to a training."""
SEEN_LATER: Mapping[str, tuple[str, ...]] = {
    "checkpoint": ("buffers",),
    "reentrant checkpoint": ("buffers",),
    "views of one memory": ("buffers",),
    "optimizer in backward": ("parameters", "parameter_gradients"),
}
"""Roles that have other values, or none any longer, when the step is over."""
STATISTICS = ("count", "nan_count", "inf_count", "mean", "std", "min", "max", "dead_fraction")
OUT_OF_REACH = ("fx", "script in an attribute", "nothing to train")
"""The engine exchanges the code of these, or knows by their loss that nothing is to be trained."""
REFUSED = ("jit trace",)
"""A TorchScript module calls no hooks."""


def train(
    case: Case, model: nn.Module, batch: Any, step_end: Callable[..., object], steps: int = 2
) -> list[Any]:
    """Train a case's model; return loss, gradients and random state of each step, bit for bit."""
    optimizer, run = None, []
    for step in range(steps):
        seeded(RUN_SEED + step)
        with case.context():
            if optimizer is not None:
                optimizer.zero_grad()
            loss = projection(call(model, batch))
            if loss.requires_grad:
                loss.backward()
        parameters = [p for p in model.parameters() if not is_lazy(p)]
        gradients = [raw(parameter.grad) for parameter in parameters]
        run.append((raw(loss), gradients, raw(torch.get_rng_state())))
        if optimizer is None and parameters:
            optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
        if optimizer is not None:
            optimizer.step()
        step_end(step, loss=loss)
    return [*run, *(raw(value) for value in model.state_dict().values() if type(value) is Tensor)]


def numbers(record: LayerRecord, role: str) -> dict[str, Any]:
    """Return what was seen in a role, to the last bit; NaN equals itself."""
    return {
        name: repr([getattr(seen, statistic) for statistic in STATISTICS])
        for name, seen in record.tensors(role).items()
    }


def differences(name: str, seen: Observation, expected: Observation) -> list[Any]:
    """Return where two observations of one step differ, but for what the monitor cannot know."""
    assert list(seen.layers) == list(expected.layers)
    roles = [role for role in ROLES if role not in SEEN_LATER.get(name, ())]
    found: list[Any] = []
    for layer, record in expected.layers.items():
        own = seen.layers[layer]
        found += [(layer, r) for r in roles if numbers(own, r) != numbers(record, r)]
        for field in ("status", "calls", "entered", "completed", "options", "tied"):
            if getattr(own, field) != getattr(record, field):
                found.append((layer, field))
    return found


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_a_monitored_training_is_the_bare_one(name: str) -> None:
    """Same bits with and without; the numbers of an inspection; and nothing stays anywhere."""
    case = CASES[name]
    bare = train(case, *make(case), lambda *_, **__: None)
    model, batch = make(case)
    seen: list[Observation] = []
    with Inspector(model).monitor() as monitor:
        monitor.observers.append(lambda row: seen.append(monitor.report.observation))
        assert train(case, model, batch, monitor.step_end) == bare
    assert traces(model) == []
    assert [observation.errors for observation in seen] == [(), ()]
    expected = inspect(case, *make(case))
    if name in WITHOUT_GRADIENTS:
        statuses = {record.status for record in seen[0].layers.values()}
        assert statuses == {Status.NOT_CALLED}
    elif name not in OUT_OF_REACH:
        assert differences(name, seen[0], expected) == []
