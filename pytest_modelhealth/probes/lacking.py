"""Which trainable parameters got no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.checks.facts import flow_of, trainable

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation


class Lacking(NamedTuple):
    """A trainable parameter without gradient, by its layer and its own name there."""

    layer: str
    own: str

    @property
    def name(self) -> str:
        """Full name."""
        return f"{self.layer}.{self.own}".lstrip(".")

    @property
    def part(self) -> str:
        """The top-level part of the model that it lies in."""
        return self.name.partition(".")[0]


def without_gradient(observation: Observation) -> Iterator[Lacking]:
    """Yield the trainable parameters that took part in the run and have no gradient, or only zeros.

    Their layer ran, or another one read them: a `ParameterList` is never called.
    """
    for record in observation.layers.values():
        if "parameter_gradients" not in record.watched:
            continue
        for own in trainable(record):
            gradient = record.parameter_gradients.get(own)
            if gradient is None or (gradient.abs_max == 0.0 and not gradient.nonfinite_count):
                lacking = Lacking(record.name, own)
                if record.calls or lacking.name in flow_of(observation):
                    yield lacking
