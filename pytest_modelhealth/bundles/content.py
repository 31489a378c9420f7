"""What a bundle holds, as frozen data: an inspection, its model's state and its surroundings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_modelhealth.settings import Limit
from pytest_modelhealth.settings.waiver import Waiver

FORMAT = "pytest-modelhealth inspection"
FORMAT_VERSION = 2
"""Raised when a field changes its name or its meaning; a reader refuses others."""

CONTENT = "inspection.pt"
REPORT = "report.json"
FAILURE = "failure.txt"
FILES = (REPORT, FAILURE, CONTENT)
"""The files of a bundle; the one without which it is none is written last."""


@dataclass(frozen=True)
class Test:
    """The test that made the inspection.

    Args:
        id: pytest's node id.
        number: which of the inspections of this test it was, counted from 1.
        place: ``path:line`` of the call.
    """

    id: str
    number: int
    place: str


@dataclass(frozen=True)
class HeldTensor:
    """A parameter, a buffer or a tensor in an attribute of the model.

    Args:
        layer: the module that holds it, as `named_modules` spells it.
        name: its own name there.
        shape: its shape.
        dtype: its dtype, without ``torch.``.
        value: the tensor, or ``None`` where it was left out or could not be kept.
        requires_grad: whether it collects a gradient.
        tied: further full names of the same tensor.
    """

    layer: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    value: Any = None
    requires_grad: bool = False
    tied: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """Its name from the model on."""
        return f"{self.layer}.{self.name}" if self.layer else self.name


@dataclass(frozen=True)
class Model:
    """What a model held.

    Args:
        kind: module and qualified name of its class.
        parameters: each once, a tied one at the first layer that owns it.
        buffers: those that are in no state_dict too.
        attributes: tensors kept in plain attributes of modules.
        generators: the state of random generators kept in plain attributes, by full name.
        training: whether each module was in training mode.
    """

    kind: str
    parameters: tuple[HeldTensor, ...] = ()
    buffers: tuple[HeldTensor, ...] = ()
    attributes: tuple[HeldTensor, ...] = ()
    generators: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """One batch and the state of all random generators before it ran."""

    inputs: Any
    target: Any
    random: Any


@dataclass(frozen=True)
class Function:
    """A function of the user's, which cannot be data.

    Args:
        name: its module and qualified name.
        place: ``path:line`` where it is defined, ``""`` where unknown.
    """

    name: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


@dataclass(frozen=True)
class WatchRule:
    """One call of `watch`: a pattern, or the text and flags of a regular expression."""

    pattern: str
    flags: int | None
    roles: tuple[str, ...]
    types: tuple[str, ...] | None


@dataclass(frozen=True)
class Missing:
    """Something that is not in the bundle; it stands in the place of what it is.

    Args:
        path: where it stood: ``"inputs[0]"``, ``"model.encoder"``.
        type: its type.
        reason: why it is not there, a phrase.
    """

    path: str
    type: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.type}): {self.reason}"


@dataclass(frozen=True)
class Content:
    """All of a bundle but its report.

    Args:
        created: when it was saved, ISO 8601, UTC.
        versions: of this package, torch and others, and what machine it was.
        test: the test that made it; ``None`` outside of tests.
        model: what the model held.
        of: ``"batch"`` for `run_inspection`, ``"batches"`` for `run_batches`.
        batches: what was run, in order.
        loss: a loss of torch's; a `Function` where it was the user's own, also among tasks.
        backward: ``None``, a truth value, or the user's function.
        scaler: the device and state of a gradient scaler; ``None`` without one.
        options: further arguments of `run_inspection` or `run_batches`.
        compiled: as in `Inspector`.
        watch: calls of `watch`.
        settings: those that were not at their default, the probes of the call among them.
        waivers: violations that were accepted.
        own_checks: the classes of a project's own checks.
        surroundings: switches of torch, as `surroundings` has them.
        missing: what is not there, and why.
    """

    created: str
    versions: Mapping[str, str]
    test: Test | None
    model: Model
    of: str
    batches: tuple[Batch, ...]
    loss: Any
    backward: bool | Function | None
    scaler: Any
    options: Mapping[str, Any]
    compiled: str
    watch: tuple[WatchRule, ...]
    settings: Mapping[str, Limit]
    waivers: tuple[Waiver, ...]
    own_checks: tuple[str, ...]
    surroundings: Mapping[str, Any]
    missing: tuple[Missing, ...] = ()

    @property
    def missing_values(self) -> list[Missing]:
        """What is not there and no test or argument gives again, as it does loss and backward."""
        return [m for m in self.missing if not m.path.startswith(("loss", "backward"))]

    def lacks(self, part: str) -> Missing | None:
        """Return the first thing under this path that is not there, if one is."""
        return next((m for m in self.missing if m.path.startswith(part)), None)
