"""The same batch on ranks that share the batch out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.evidence.fingerprints import combined, fingerprint
from pytest_modelhealth.ranks.evidence.kind import Cards, Kind, same_of_others
from pytest_modelhealth.ranks.evidence.wrappers import Wrapped
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks

_ENOUGH_BITS = 64.0
"""What no two batches have in common by chance."""

_LOOKED_AT = 4096


class Batches(Kind):
    """A fingerprint of all that a rank is given, where it holds enough to be told apart."""

    name = "distinct_data"

    def __init__(self, company: Company, wrapped: Wrapped, request: Request) -> None:
        super().__init__(company, wrapped, request)
        given = find_tensors((request.inputs, request.target))
        self._batch = 0
        if len(company.place.data) > 1 and sum(map(_bits, given)) >= _ENOUGH_BITS:
            self._batch = combined(fingerprint(_local(tensor)) for tensor in given)

    def card(self, own: Observation) -> tuple[int, tuple[int, ...]]:
        """Return the fingerprint, 0 for none, and the ranks that rightly have the same."""
        return self._batch, self.place.tensor

    def found(self, cards: Cards, joint: Observation) -> Iterator[Disagreement]:
        """Yield the ranks that were given the same."""
        same = same_of_others(cards)
        if not same:
            return
        each = [f"{named_ranks(ranks)} got the same batch" for ranks in same[:3]]
        more = f"; and so on, {len(same) - 3} times more" if len(same) > 3 else ""
        ranks = tuple(sorted(rank for found in same for rank in found))
        others = tuple(rank for rank in self.company.ranks if rank not in ranks)
        yield Disagreement(
            self.name, "", "inputs", "", ranks, others, "; ".join(each) + more, float(len(ranks))
        )


def _bits(tensor: Tensor) -> float:
    """Return how much a tensor tells, at most: values times the logarithm of how many differ."""
    if tensor.is_meta or not tensor.numel():
        return 0.0
    flat = _local(tensor).detach().reshape(-1)
    kinds = len(flat[:: max(1, len(flat) // _LOOKED_AT)].unique())
    return len(flat) * math.log2(kinds)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
