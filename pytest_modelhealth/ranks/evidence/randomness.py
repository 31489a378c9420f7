"""Dropouts that drop the same units on ranks with other samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pytest_modelhealth.capture import Request
from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.evidence.fingerprints import fingerprint
from pytest_modelhealth.ranks.evidence.kind import Cards, Kind, in_order, same_of_others
from pytest_modelhealth.ranks.evidence.wrappers import Wrapped
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks


class Randomness(Kind):
    """The state of the generator that the model draws from, where it drops anything."""

    name = "distinct_dropout"

    def __init__(self, company: Company, wrapped: Wrapped, request: Request) -> None:
        super().__init__(company, wrapped, request)
        self._state = _state(wrapped) if len(company.place.data) > 1 else 0

    def card(self, own: Observation) -> tuple[int, tuple[int, ...], tuple[str, ...]]:
        """Return the state, the ranks that rightly have the same, and what drops."""
        dropping = tuple(r.name for r in own.layers.values() if _drops(r)) if self._state else ()
        return (self._state if dropping else 0), self.place.tensor, dropping[:1]

    def found(self, cards: Cards, joint: Observation) -> Iterator[Disagreement]:
        """Yield the ranks that draw alike."""
        same = same_of_others({rank: card[:2] for rank, card in cards.items()})
        if not same:
            return
        ranks = tuple(sorted(rank for found in same for rank in found))
        layer = in_order((cards[rank][2][0] for rank in ranks), joint)[0]
        each = " and so do ".join(named_ranks(found) for found in same[:3])
        yield Disagreement(
            self.name,
            layer,
            "activations",
            "",
            ranks,
            tuple(rank for rank in self.company.ranks if rank not in ranks),
            f"{each} start from the same random numbers: the same units are dropped on each",
            float(len(ranks)),
            in_order((r.name for r in joint.layers.values() if _drops(r)), joint),
        )


def _drops(record: LayerRecord) -> bool:
    """Whether a layer is a dropout at work, or its own forward calls one."""
    if drops_in_forward(record):
        return True
    options = record.options
    is_at_work = record.entered is not None and options.get("training", True) is True
    return is_at_work and "dropout" in record.type_name.lower() and _is_rate(options.get("p"))


def drops_in_forward(record: LayerRecord) -> bool:
    """Whether the own forward of a layer calls a dropout, or attention with one, at work."""
    options = record.options
    is_at_work = record.entered is not None and options.get("dropout_training", True) is True
    return is_at_work and _is_rate(options.get("dropout_p"))


def _is_rate(value: object) -> bool:
    return isinstance(value, float | int) and 0.0 < value < 1.0


def _state(wrapped: Wrapped) -> int:
    """Return a fingerprint of the generator of the device that the model is on."""
    device = next((leaf.tensor.device for leaf in wrapped.parameters), torch.device("cpu"))
    if device.type == "cuda":
        return fingerprint(torch.cuda.get_rng_state(device))
    return fingerprint(torch.get_rng_state())
