"""Values that are no numbers on some ranks, where the joint report does not show it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from pytest_modelhealth.ranks.evidence.kind import Cards, Kind
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks


class _Ill(NamedTuple):
    """A tensor of a rank with NaN or infinities, or its loss."""

    layer: str
    role: str
    tensor: str
    said: str
    values: int


class NonFinite(Kind):
    """A loss that is not finite, and weights that are not: of replicas the report has one."""

    name = "finite"

    def card(self, own: Observation) -> tuple[_Ill, ...]:
        """Return what is not finite: nothing, as a rule."""
        found = []
        if own.loss is not None and not math.isfinite(own.loss):
            found.append(_Ill("", "loss", "", str(own.loss), 1))
        for record in own.layers.values():
            for name, held in record.parameters.items():
                if held.nonfinite_count:
                    kind = "NaN" if held.nan_count else "inf"
                    said = f"{held.nonfinite_count} {kind} of {held.count} values"
                    found.append(_Ill(record.name, "parameters", name, said, held.nonfinite_count))
        return tuple(found)

    def found(self, cards: Cards, joint: Observation) -> Iterator[Disagreement]:
        """Yield what is not finite on some ranks, each with these."""
        ranks: dict[tuple[str, str, str], dict[int, _Ill]] = {}
        for rank, card in cards.items():
            for ill in card:
                ranks.setdefault((ill.layer, ill.role, ill.tensor), {})[rank] = ill
        for (layer, role, tensor), having in ranks.items():
            first = next(iter(having.values()))
            others = tuple(rank for rank in cards if rank not in having)
            if role == "parameters" and not _is_hidden(layer, tensor, joint):
                continue
            yield Disagreement(
                self.name,
                layer,
                role,
                tensor,
                tuple(having),
                others,
                f"the loss is {first.said} on {named_ranks(having)}"
                if role == "loss"
                else f"{first.said} in its parameter {tensor!r} on {named_ranks(having)}",
                float(first.values),
            )


def _is_hidden(layer: str, tensor: str, joint: Observation) -> bool:
    """Whether the joint report shows the replica of another rank."""
    record = joint.layers.get(layer)
    shown = None if record is None else record.parameters.get(tensor)
    return shown is None or not shown.nonfinite_count
