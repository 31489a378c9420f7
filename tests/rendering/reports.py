"""Reports for the tests of renderings: each is a case that a format must get right."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.inspector import Inspector
from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.report import Finding, HealthReport, Judgement, Observation, Status
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import Waiver
from tests.builders import layer, observation

HOSTILE = '<b id="x">&amp;{{ 7*7 }}\n\t\x1b[31m,"quoted"; \u202e\u65e5\u672c$x_{$'
"""A layer name that no format may interpret or let through to the terminal."""


def judged(
    seen: Observation, *findings: Finding, settings: Settings | None = None, **rest: Any
) -> HealthReport:
    """Return a report with exactly these findings, whatever the checks would say."""
    return HealthReport(
        seen, settings or default_settings(), Verdicts(findings, **rest), renderer=renderer
    )


class Verdicts:
    """A judge whose mind is made up; a class, so that its reports can be pickled."""

    def __init__(self, findings: tuple[Finding, ...], **rest: Any) -> None:
        self._judgement = Judgement(findings, **rest)

    def __call__(self, seen: Observation, settings: Settings) -> Judgement:
        return self._judgement


def violation(name: str, **fields: Any) -> Finding:
    """Return a violation of the layer `name`: by default, dead units."""
    dead: dict[str, Any] = {"check": "dead_units", "role": "activations", "value": 0.75}
    dead |= {"limit": 0.5, "origin": "pytest.ini: modelhealth_max_dead_fraction"}
    dead |= {"message": "3 of 4 units are dead", "cause": "the bias holds them on the flat side"}
    return Finding(layer=name, **dead | fields)


def healthy() -> HealthReport:
    """Two layers and nothing wrong."""
    values = torch.linspace(-1, 1, 40).reshape(10, 4)
    return judged(observation(layer("fc1", activations=values), layer("fc2", activations=values)))


def dead(**fields: Any) -> HealthReport:
    """``fc1``, then ``relu`` with dead units, then ``fc2``; gradients everywhere."""
    torch.manual_seed(0)
    before = torch.randn(32, 4)
    after = before.relu() * torch.tensor([1.0, 0.0, 0.0, 0.0])
    weights = {"weight": torch.randn(4, 4), "bias": torch.randn(4)}
    flowing = {"inputs": before, "activations": before, "gradients": before * 1e-3}
    seen = observation(
        layer("", type_name="Net", activations=after),
        layer("fc1", parameters=weights, parameter_gradients=weights, **flowing),
        layer("relu", type_name="ReLU", activations=after, gradients=after * 1e-2),
        layer("fc2", activations=before, gradients=before, parameter_gradients=weights),
        layer("spare", status=Status.NOT_CALLED, reason="forward never called it"),
        model_type="Net",
    )
    return judged(seen, violation("relu", **{"affected": ("head", "model")} | fields))


def nonfinite() -> HealthReport:
    """A layer whose values are all NaN, and one with an infinity of either sign."""
    some = torch.tensor([[1.0, torch.inf], [-torch.inf, torch.nan]])
    seen = observation(
        layer("log", activations=torch.full((4, 4), torch.nan), gradients=some * torch.nan),
        layer("exp", activations=some, gradients=some),
        loss=torch.nan,
    )
    fields = {"check": "finite", "value": 16, "limit": None, "message": "16 NaN"}
    return judged(seen, violation("log", **fields))


def bad_loss() -> HealthReport:
    """The loss is violated, which is no role of a layer."""
    seen = observation(layer("", type_name="Net", activations=torch.eye(4)), loss=torch.inf)
    return judged(seen, violation("", check="finite", role="loss", value=torch.inf, limit=None))


def inconclusive() -> HealthReport:
    """Too little was seen to judge."""
    seen = observation(layer("relu", activations=torch.zeros(2, 4)), samples=2)
    found = Finding("dead_units", "relu", message="2 samples, 32 needed", grade="unsure")
    return judged(seen, found, found, found)


def hostile() -> HealthReport:
    """Names, reasons, messages and notes that hold markup, escapes and newlines."""
    ones = torch.ones(4, 4)
    seen = observation(
        layer(HOSTILE, type_name=HOSTILE, activations=ones, gradients=ones),
        layer("opaque", status=Status.OPAQUE, reason=HOSTILE),
        model_type=HOSTILE,
        notes=(HOSTILE,),
        errors=(HOSTILE,),
    )
    found = violation(HOSTILE, message=HOSTILE, cause=HOSTILE, origin=HOSTILE)
    return judged(seen, found, Finding("finite", "opaque", message=HOSTILE, grade="unsure"))


def large() -> HealthReport:
    """A thousand layers, five hundred violations."""
    values = torch.linspace(-1, 1, 4)
    names = [f"encoder.layers.{i}.attention.output.dense" for i in range(1000)]
    seen = observation(*(layer(name, activations=values, gradients=values) for name in names))
    return judged(seen, *(violation(name) for name in names[::2]))


def odd_statistics() -> HealthReport:
    """Tensors that are empty, scalar, of integers, of a tiny dtype, or at a dtype's limits."""
    tensors = {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.0),
        "integers": torch.arange(4),
        "float8": torch.tensor([0.001, 400.0]).to(torch.float8_e4m3fn),
        "extremes": torch.tensor([1e-310, 1e308], dtype=torch.float64),
    }
    absent = layer("absent", status=Status.UNSUPPORTED, reason="meta tensor")
    seen = (layer(name, activations=tensor) for name, tensor in tensors.items())
    return judged(observation(*seen, absent), violation("float8"))


def absent_culprit() -> HealthReport:
    """The violation is of a role that was not seen at the culprit."""
    weights = {"weight": torch.ones(2)}
    seen = observation(
        layer("detached", status=Status.NO_GRAD_PATH, reason="detach() in forward"),
        layer("fc", activations=torch.ones(2, 2), parameter_gradients=weights),
        backward=False,
        loss=None,
    )
    fields = {"check": "missing_gradients", "role": "parameter_gradients", "limit": None}
    return judged(seen, violation("detached", **fields))


def waived() -> HealthReport:
    """One violation is waived, and one waiver is unused."""
    waiver = Waiver("fc1", "dead_units", "sparse on purpose", "marker")
    unused = Waiver("fc9", None, "gone", "marker")
    seen = healthy().observation
    return judged(seen, violation("fc1", waiver=waiver), unused_waivers=(unused,))


def empty() -> HealthReport:
    """No layer at all."""
    return judged(observation(loss=None, samples=0))


def inspected() -> HealthReport:
    """What the real engine and the real checks say of a model with a dead activation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].bias.fill_(-50.0)
    return Inspector(model).run_inspection(torch.randn(64, 8))


CASES = (
    healthy, dead, nonfinite, bad_loss, inconclusive, hostile, large, odd_statistics,
    absent_culprit, waived, empty, inspected,
)  # fmt: skip
