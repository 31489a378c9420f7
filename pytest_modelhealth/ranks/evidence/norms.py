"""Batch norms that see few samples each, because nothing synchronises them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from pytest_modelhealth.ranks.evidence.kind import Cards, Kind, counted, in_order
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks


class Norms(Kind):
    """How many samples a rank has, where batch norms of torch's in training see these alone."""

    name = "synced_norm"

    def card(self, own: Observation) -> tuple[int, tuple[str, ...]] | None:
        """Return the samples of this rank and the first batch norm that sees them alone."""
        if len(self.place.data) < 2:
            return None
        alone = (
            layer
            for module, layer in self.wrapped.names.items()
            if _is_alone(module) and layer in own.layers and own.layers[layer].calls
        )
        names = in_order(alone, own)
        return (own.samples // max(1, own.batches), names[:1]) if names else None

    def found(self, cards: Cards, joint: Observation) -> Iterator[Disagreement]:
        """Yield the batch norms by their first."""
        few = {rank: card for rank, card in cards.items() if card is not None}
        if not few:
            return
        samples = min(count for count, _ in few.values())
        layer = in_order((name for _, names in few.values() for name in names), joint)[0]
        layers = in_order((n for m, n in self.wrapped.names.items() if _is_alone(m)), joint)
        yield Disagreement(
            self.name,
            layer,
            "activations",
            "",
            tuple(few),
            (),
            f"{named_ranks(few)} normalise each by their own {counted(samples, 'sample')} alone",
            float(samples),
            layers,
        )


def _is_alone(module: nn.Module) -> bool:
    batch_norm = nn.modules.batchnorm._BatchNorm
    is_synced = isinstance(module, nn.SyncBatchNorm)
    return isinstance(module, batch_norm) and not is_synced and module.training
