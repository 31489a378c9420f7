"""`Probe`: a check that changes something and runs again, and how one ends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from pytest_modelhealth.checks import Check, checks_in
from pytest_modelhealth.checks.facts import at, place
from pytest_modelhealth.probes.conventions import Effects

if TYPE_CHECKING:
    from pytest_modelhealth.report import Finding, Observation, Parting
    from pytest_modelhealth.settings import Settings

_FEW = 3


class Kind(NamedTuple):
    """What is to be said of one kind of finding."""

    cause: str = ""
    said: str = ""  # where it is not that of the probe
    may_be_meant: bool = False  # whether some models do so on purpose, so that it only warns
    is_limited: bool = True  # whether it is held against the first of the probe's settings


class Probe(Check):
    """One property of a model that shows when something is changed.

    `probe` changes it and takes down what follows; `judge` holds that against the limits, maybe
    much later and under other ones. Between the two lies a `ProbeRecord`, which is plain data.
    """

    is_probe = True
    occasion = "Probes, which change something and run the model again: probes=True"

    automatic: ClassVar[bool] = False
    """Whether it runs by itself where `is_called_for` says so, else only if asked for by name."""

    said: ClassVar[str] = ""
    """What is wrong, one sentence that stands alone: a format of ``{effect}``, ``{began}`` (where
    runs part), ``{detail}`` and ``{more}``, the detail behind a semicolon."""

    kinds: ClassVar[Mapping[str, Kind]] = {}
    """What else is to be said of a kind of finding."""

    causes: ClassVar[Mapping[str, str]] = {}
    """Its cause, by names of operations and parts of classes' names, in lower case, of which one is
    what a layer is or does; `otherwise` where none of them fits."""

    otherwise: ClassVar[str] = ""

    def is_called_for(self, observation: Observation, settings: Settings) -> bool:
        """Whether a run shows something that this probe can tell a fault from a design by."""
        return False

    @property
    @abstractmethod
    def experiment(self) -> str:
        """What changes something and runs again, ``module:function`` of `intervening`."""

    def probe(self, runs: Any) -> Effects:
        """Change something, run the model again, and return what followed."""
        module, _, function = self.experiment.partition(":")
        package = f"{__name__.rpartition('.')[0]}.intervening"
        effects: Effects = getattr(import_module(f"{package}.{module}"), function)(runs)
        return effects

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield what the record of this probe shows, if it ran.

        What could not be judged leaves the verdict alone, unless this probe was asked for by name.
        """
        from pytest_modelhealth.report import Outcome

        record = observation.probes.get(self.name)
        root = observation.layers.get("")
        if record is None or root is None:
            return
        if record.outcome is Outcome.JUDGED:
            for parting in record.partings:
                yield from self.judge(parting, observation, settings)
        elif self.is_named(settings):
            yield self.inconclusive(root, record.reason)

    def is_named(self, settings: Settings) -> bool:
        """Whether settings ask for this probe by its name, and not for all."""
        return self.name in settings["probes"].value

    def judge(
        self, parting: Parting, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield a violation if what differs breaks a limit, at the layer where it begins."""
        kind = self.kinds.get(parting.kind, Kind())
        limit = settings[self.settings[0].name] if kind.is_limited else None
        if limit is not None and parting.effect <= limit.value:
            return
        culprit = place(observation, parting.layer)
        began, where = f"; it begins there{at(parting.line)}" if parting.line else "", "its output"
        if parting.taker:
            steps = ", ".join(f"`{step}`" for step in parting.between[-_FEW:])
            by = f" by {steps}" if steps else ""
            began = f"; it begins in its own code{by}, before {parting.taker!r}{at(parting.line)}"
            where = f"what {parting.taker!r} is given"
        if parting.role == "loss":
            where = "the loss"
        details = []
        if parting.before is not None and parting.after is not None:
            there = f" at {parting.place}" if parting.place else ""
            run = observation.probes[self.name].changed
            details = [f"{where}{there} is {parting.before:.4g}; with {run}, {parting.after:.4g}"]
        names = {step.rstrip("_").lower() for step in parting.between}
        class_name = "" if parting.taker else culprit.type_name.lower()
        fitting = (
            text
            for words, text in self.causes.items()
            if any(word in names or word in class_name for word in words.split())
        )
        yield self.violation(
            culprit,
            (kind.said or self.said).format(
                effect=f"{parting.effect:.2g}",
                began=began,
                detail=parting.detail,
                more=f"; {parting.detail}" if parting.detail else "",
            ),
            value=parting.effect,
            limit=limit,
            role=None if parting.taker else parting.role,
            tensor=parting.tensor,
            cause=kind.cause or next(fitting, self.otherwise),
            independent=True,
            severity="warn" if kind.may_be_meant else "fail",
            details=details,
        )


@cache
def all_probes() -> tuple[Probe, ...]:
    """Return one of each probe that a file of this folder defines, the gravest first."""
    probes = checks_in(__name__.rpartition(".")[0], Path(__file__).parent)
    return cast("tuple[Probe, ...]", probes)
