"""How a table of cases is held against a check, and what the models of the cases are made of."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from pytest_modelhealth import HealthReport, Inspector


class Net(nn.Module):
    """Layers by their names, and what is done with them: a function of the model and its inputs.

    Two sizes are a linear layer, and a tensor that is no parameter is a buffer.
    """

    def __init__(self, function: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            layer = nn.Linear(*layer) if isinstance(layer, tuple) else layer
            is_buffer = isinstance(layer, torch.Tensor) and not isinstance(layer, nn.Parameter)
            (self.register_buffer if is_buffer else self.__setattr__)(name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def holding(module: nn.Module, **values: Any) -> nn.Module:
    """Return a module after filling what these names stand for, or doing this to it."""
    with torch.no_grad():
        for name, value in values.items():
            tensor = attrgetter(name)(module)
            value(tensor) if callable(value) else tensor.fill_(value)
    return module


def says(report: HealthReport, check: str) -> list[Any]:
    """Return what a check says, but for what is folded under another finding."""
    every = (*report.violations, *report.warnings, *report._judgement.inconclusive)
    return [finding for finding in every if finding.check == check]


def hold(
    check: str, build: Callable[[Any], Any], layers: dict[str, str], *words: str, **settings: Any
) -> HealthReport:
    """Inspect what a row makes for a batch; a check says this of these layers, and nothing else.

    `build` returns a model, with its inputs if they are not the batch, its target and its loss;
    `layers` has a severity for each, ``"unsure"`` where the check cannot judge, and ``"folded"``
    for what is folded under a finding of another check.
    """
    batch = torch.randn(64, 16)
    made = build(batch)
    model, inputs, target, loss = (
        (made, batch, None, None) if isinstance(made, nn.Module) else (*made, None, None)[:4]
    )
    report = Inspector(model, **settings).run_inspection(inputs, target, loss=loss)
    assert report.observation.errors == report._judgement.broken == ()
    others = (root for root in (*report.violations, *report.warnings) if root.check != check)
    folded = [v for root in others for v in root.folded if v.check == check]
    findings = says(report, check)
    severities = [(f.layer, f.grade) for f in findings]
    severities += [(v.layer, "folded") for v in folded]
    assert sorted(severities) == sorted(layers.items()), findings
    for finding in (*findings, *folded):
        said = ("message", "cause", "tensor", "role", "reason")
        text = " ".join(str(getattr(finding, part, "")) for part in said)
        assert [word for word in words if word not in text] == [], text
    return report
