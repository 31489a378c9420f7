"""Decides which units a smaller copy is without, by what two runs showed of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pytest_modelhealth.removal.following import Followed
from pytest_modelhealth.removal.kinds import how_computed, kind_of
from pytest_modelhealth.removal.marks import Group, Reading, Slot
from pytest_modelhealth.report.removable import RemovableLayer

_SLACK = 1024
"""Machine epsilons by which units that are equal up to rounding may differ where they are read."""


@dataclass(frozen=True)
class Step:
    """What is to be done for one group of units.

    Args:
        layers: the layers whose units go.
        units: how many they have.
        gone: the units that go, in order.
        merged: pairs of a unit that goes, and its twin, which takes over what reads it.
        slots: where units stand in what makes them, and in what reads them.
        readings: those of them that read.
        norms: modules that only know how many units there are.
    """

    layers: tuple[str, ...]
    units: int
    gone: tuple[int, ...]
    merged: tuple[tuple[int, int], ...]
    slots: tuple[Slot, ...]
    readings: tuple[Slot, ...]
    norms: tuple[str, ...]


@dataclass
class Plan:
    """Which units go, and why others stay.

    Args:
        steps: what is to be done.
        refused: by layer, why units that could go stay, phrases.
    """

    steps: list[Step] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def refuse(self, layers: Iterable[str], reason: str) -> None:
        """Keep a reason."""
        for layer in layers:
            reasons = self.refused.setdefault(layer, [])
            if reason not in reasons:
                reasons.append(reason)


def planned(
    runs: list[Followed],
    claims: Mapping[str, RemovableLayer],
    modules: Mapping[str, nn.Module],
    epsilon: float,
) -> Plan:
    """Return which units go.

    Args:
        runs: what runs showed: the first in evaluation mode, in which units were found.
        claims: units that are known to be removable, by layer.
        modules: the layers of the model that ran.
        epsilon: machine epsilon of the model.
    """
    plan = Plan()
    groups: list[Group] = []
    for name in claims:
        group = runs[0].group_of(name)
        if group is None:
            plan.refuse([name], _why_not_seen(modules.get(name)))
        elif group not in groups:
            groups.append(group)
    order = {id(group): number for number, group in enumerate(runs[0].groups)}
    rows: dict[str, Tensor] = {}
    for group in sorted(groups, key=lambda group: -order[id(group)]):
        _Decision(plan, runs, claims, rows, epsilon).decide(group)
    plan.steps.reverse()
    return plan


@dataclass
class _Decision:
    """Decides on groups, those that read before those that are read.

    Args:
        plan: where decisions are kept.
        runs: what runs showed.
        claims: units that are known to be removable, by layer.
        rows: by weight, which of its rows stay, where some go.
        epsilon: machine epsilon of the model.
    """

    plan: Plan
    runs: list[Followed]
    claims: Mapping[str, RemovableLayer]
    rows: dict[str, Tensor]
    epsilon: float

    def decide(self, group: Group) -> None:
        claimed = [name for name in group.layers if name in self.claims]
        readings = list(group.readings)
        reasons = [*group.reasons, *self._uses(self.runs[0], group)]
        for run in self.runs[1:]:
            other = run.group_of(group.layers[0])
            if other is None or other.layers != group.layers:
                reasons.append("in training mode its units take another way")
                continue
            reasons += [f"{reason}, in training mode" for reason in other.reasons]
            reasons += self._uses(run, other)
            known = {reading.slot.parameter for reading in readings}
            readings += [r for r in other.readings if r.slot.parameter not in known]
        reasons += self._read_elsewhere(group, readings, claimed)
        if reasons:
            self.plan.refuse(claimed, reasons[0])
            return
        merged = self._merged(group, claimed)
        gone = [*self._masked(group, readings, claimed), *(unit for unit, _ in merged)]
        if len(gone) == group.units:
            self.plan.refuse(
                claimed,
                f"the layer does nothing: all {group.units:,} units can go, and one is kept, as "
                "there are no layers without any",
            )
            gone.remove(min(gone))
        if gone:
            self._take(group, readings, tuple(sorted(gone)), merged)

    def _take(
        self,
        group: Group,
        readings: list[Reading],
        gone: tuple[int, ...],
        merged: list[tuple[int, int]],
    ) -> None:
        slots = tuple(reading.slot for reading in readings)
        self.plan.steps.append(
            Step(
                tuple(group.layers),
                group.units,
                gone,
                tuple(merged),
                tuple({(s.parameter, s.dimension): s for s in group.slots}.values()),
                slots,
                tuple(group.norms),
            )
        )
        kept = torch.ones(group.units, dtype=torch.bool)
        kept[list(gone)] = False
        for slot in group.slots:
            if slot.parameter.own == "weight":
                self.rows[slot.parameter.name] = kept[slot.ids]

    def _read_elsewhere(
        self, group: Group, readings: list[Reading], claimed: list[str]
    ) -> Iterator[str]:
        """Yield weights that read units in other batches alone, as where the data decides."""
        known = {reading.slot.parameter.name for reading in readings}
        known.update(slot.parameter.name for slot in group.slots)
        for part in (part for name in claimed for part in self.claims[name].read):
            if part.parameter not in known:
                yield f"it is read by '{part.parameter}' in other batches"

    def _uses(self, run: Followed, group: Group) -> Iterator[str]:
        """Yield why parameters of a group are not its alone."""
        slots = [*group.slots, *(reading.slot for reading in group.readings)]
        for parameter in dict.fromkeys(slot.parameter for slot in slots):
            if len(parameter.names) > 1:
                yield f"{' and '.join(map(repr, parameter.names))} are one shared tensor"
            elif (count := run.uses.get(parameter.name, 0)) > 1:
                yield f"'{parameter.name}' is used {count} times in a run"

    def _masked(self, group: Group, readings: list[Reading], claimed: list[str]) -> list[int]:
        """Return the units that go by being left out, and say why others do not."""
        layers = [self.claims[name] for name in claimed]
        off = {unit for layer in layers for unit in layer.inactive}
        off.update(unit for layer in layers if layer.produced for unit in layer.unread)  # masked
        found = []
        needed: dict[str, list[int]] = {}
        for unit in sorted({unit for layer in layers for unit in layer.masked}):
            reasons = [
                self._why_needed(reading, unit, is_off=unit in off)
                for reading in readings
                if not self._has_zero_columns(reading, unit)
            ]
            if reason := next(filter(None, reasons), ""):
                needed.setdefault(reason, []).append(unit)
            else:
                found.append(unit)
        for reason, units in needed.items():
            count = "1 unit is" if len(units) == 1 else f"{len(units):,} units are"
            self.plan.refuse(claimed, f"{count} {reason}")
        return found

    def _has_zero_columns(self, reading: Reading, unit: int) -> bool:
        """Whether a weight does not read a unit, its own rows that go aside."""
        parameter, columns = reading.slot.parameter, reading.slot.dimension
        weight = parameter.module._parameters[parameter.own]
        assert weight is not None
        values = weight.detach().movedim((reading.rows, columns), (0, 1))
        values = values[:, (reading.slot.ids == unit).to(values.device)]
        if parameter.name in self.rows:
            values = values[self.rows[parameter.name].to(values.device)]
        return not bool(values.any())

    def _why_needed(self, reading: Reading, unit: int, *, is_off: bool) -> str:
        """Return why a unit cannot be left out, a phrase; ``""`` if it can.

        Args:
            reading: what reads it.
            unit: its number.
            is_off: whether it gives zero in any run.
        """
        name = reading.slot.parameter.name
        if not is_off:
            return f"read by '{name}', with columns that are not zero"
        if not bool(reading.zero[unit]):
            return f"a constant other than zero where '{name}' reads"
        return ""

    def _merged(self, group: Group, claimed: list[str]) -> list[tuple[int, int]]:
        """Return the duplicates that go, and say why others do not."""
        said = [set(self.claims[end].duplicates) for end in group.ends if end in self.claims]
        everywhere = set.intersection(*said) if len(said) == len(group.ends) else set()
        found = []
        pairs = {pair for name in claimed for pair in self.claims[name].duplicates}
        for pair in sorted(pairs):
            apart = [
                reading.slot.parameter.name
                for reading in group.readings
                if reading.twins.get(pair, 0.0) > _SLACK * self.epsilon
            ]
            if pair not in everywhere or apart:
                where = f" where '{apart[0]}' reads them" if apart else " in all factors"
                self.plan.refuse(claimed, f"duplicates are not equal{where}")
            else:
                found.append(pair)
        return found


def _why_not_seen(module: nn.Module | None) -> str:
    """Return why nothing is known of the units of a layer."""
    if module is None or isinstance(module, torch.jit.ScriptModule):
        return "it is part of a script, whose weights cannot be replaced"
    if how := how_computed(module):
        return f"its weight is {how}"
    if kind_of(module) is None:
        return f"{type(module).__name__} is no plain layer of torch"
    return "its weight was not seen to make units"
