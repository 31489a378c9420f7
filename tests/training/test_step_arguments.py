"""Wrong arguments to `run_step`: a clear error, and everything stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import InspectionError, Inspector
from tests.capture.oracle import changes, fingerprint
from tests.training.steps import X, Y, net, ran, sgd, usual


def two(model: Any, batch: Any) -> None:
    """Take two arguments."""


def more(model: Any, optimizer: Any, batch: Any, rate: float) -> None:
    """Take one more."""


def silent(model: Any, optimizer: Any, batch: Any) -> None:
    """Return nothing."""
    usual(model, optimizer, batch)


def scores(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Return the output."""
    usual(model, optimizer, batch)
    return model(batch[0])


def words(model: Any, optimizer: Any, batch: Any) -> dict[str, str]:
    """Return no number."""
    usual(model, optimizer, batch)
    return {"loss": "low"}


NOTHING = dict.fromkeys(("step", "optimizer", "batch"))
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no step function": ({"step": 3}, r"step must be a function step\(model, optimizer, batch\)"),
    "too few": ({"step": two}, r"two\(model.* cannot be called as two\(model, optimizer, batch\)"),
    "too many": ({"step": more}, r"more\(.*functools\.partial"),
    "nothing returned": ({"step": silent}, r"silent returned nothing, not the loss: return it"),
    "many values": ({"step": scores}, r"scores returned Tensor of shape \(16, 3\), not the loss"),
    "no number": ({"step": words}, r"words returned dict, not the loss"),
    "parameters": ({"optimizer": list(net().parameters())}, "must be a torch.optim.Optimizer"),
    "a generator": ({"optimizer": net().parameters()}, "not an iterator of type generator"),
    "a class": ({"optimizer": torch.optim.SGD}, "a torch.optim.Optimizer, .* not the class"),
    "none at all": ({"optimizer": None}, "run_step needs the optimizer that the step steps"),
    "no optimizer": ({"optimizer": ()}, "optimizer is empty: give the optimizer that the step"),
    "a number to restore": ({"restore": 3}, "restore takes objects with state_dict .* int"),
    "a class to restore": ({"restore": [nn.Linear]}, "restore takes objects with .* not the class"),
    "an iterator as a batch": ({"batch": iter([1])}, "batch is an iterator of type list_iterator"),
    "no calls": ({"calls": 0}, "calls must be a whole number from 1 on, not 0"),
    "half calls": ({"calls": 2.5}, "calls must be a whole number"),
    "true calls": ({"calls": True}, "calls must be a whole number from 1 on, not True"),
    "one call to learn": ({"overfit": 1}, "overfit must be a whole number from 2 on, not 1"),
    "overfit as a switch": ({"overfit": True}, "overfit must be a whole number"),
    "a target beside a step": ({"target": Y}, "inputs, target and loss are of the usual step"),
    "a loss beside a step": ({"loss": nn.MSELoss()}, "inputs, target and loss are of the usual"),
    "usual, no optimizer": ({"inputs": X, "target": Y, **NOTHING}, "run_step needs the optim"),
    "usual, with a batch": ({"step": None}, "batch is of a step of your own: .*inputs"),
    "usual, no inputs": ({"step": None, "batch": None}, "usual step needs inputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_a_clear_error(name: str) -> None:
    """It says what is expected; the model is as it was and can be stepped."""
    arguments, message = WRONG[name]
    model = net()
    before = fingerprint(model, X)
    given: dict[str, Any] = {"step": usual, "optimizer": sgd(model), "batch": (X, Y), **arguments}
    with pytest.raises(InspectionError, match=message):
        Inspector(model).run_step(**given)
    assert changes(before, fingerprint(model, X)) == []
    assert ran(usual, model)


def test_a_model_is_stepped_once_at_a_time() -> None:
    """Within a monitor, an inspection or another step it is refused, and works afterwards."""
    model = net()
    optimizer, inspector = sgd(model), Inspector(model)

    def within(model: Any, optimizer: Any, batch: Any) -> Any:
        return inspector.run_step(usual, optimizer, batch)

    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            within(model, optimizer, (X, Y))
            return x

    with (
        inspector.monitor(),
        pytest.raises(InspectionError, match=r"run_step watches .* Net is being mon"),
    ):
        inspector.run_step(usual, optimizer, (X, Y))
    with pytest.raises(InspectionError, match=r"run_step watches .* Net is being mon"):
        inspector.run_step(within, optimizer, (X, Y))
    with pytest.raises(InspectionError, match=r"run_step watches .* from within an insp"):
        Inspector(Inside()).run_inspection(X)
    assert inspector.run_step(usual, optimizer, (X, Y))


def test_only_modules_are_stepped() -> None:
    """As with a monitor."""
    inspector = Inspector(torch.export.export(net(), (X,)))
    with pytest.raises(InspectionError, match=r"run_step runs a torch\.nn\.Module as a loop"):
        inspector.run_step(usual, sgd(net()), (X, Y))


def test_a_model_without_values_is_refused() -> None:
    """Lazy parameters, and those on the meta device."""
    lazy, meta = nn.Sequential(nn.LazyLinear(3)), nn.Linear(8, 3, device="meta")
    for model, message in ((lazy, r"0\.weight is lazy"), (meta, "weight lies on the meta device")):
        with pytest.raises(InspectionError, match=message):
            ran(usual, model)


def test_an_iterator_that_runs_out_is_said_to() -> None:
    """It cannot be put back, and the cause says what to give in its place."""
    batches = iter([(X, Y)] * 2)
    report = ran(lambda model, optimizer, _: usual(model, optimizer, next(batches)), batch=None)
    assert "runs out" in report.violations[0].cause
