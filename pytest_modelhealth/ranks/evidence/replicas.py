"""Layers of a tensor-parallel group that return other values for the same inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pytest_modelhealth.ranks.evidence.fingerprints import combined, of_statistics
from pytest_modelhealth.ranks.evidence.kind import Cards, Kind, in_order
from pytest_modelhealth.ranks.evidence.randomness import drops_in_forward
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.report.flow.inferred import with_flow
from pytest_modelhealth.report.ranks import Disagreement, named_ranks
from pytest_modelhealth.settings.layer_names import is_inside


class Replicas(Kind):
    """Layers that hold no shards and get the same inputs on all ranks of a group.

    Statistics that are equal to the last bit are taken for those of equal tensors.
    """

    name = "replicas_agree"

    def card(self, own: Observation) -> tuple[str, tuple[int, ...]] | None:
        """Return the first layer in which this rank's group disagrees, and the group."""
        among = self.place.tensor
        if len(among) < 2:
            return None
        each = self.company.gather(numbers_of(own), among)
        records = [own.layers[name] for name in each[0] if all(name in one for one in each)]
        equal = {
            r.name: [len({one[r.name][which] for one in each}) == 1 for which in range(3)]
            for r in records
        }
        cut = self._cut() | {name for name, (_, held, _) in equal.items() if not held}
        wrong = [
            record.name
            for record in records
            if _may_be_judged(record, cut, len(among))
            and equal[record.name][0]
            and not equal[record.name][2]
        ]
        innermost = (n for n in wrong if not any(_is_below(other, n) for other in wrong))
        found = next(innermost, None)
        first = found if found is not None else self._forward_that_drops(own, records, equal)
        return None if first is None else (first, among)

    def _forward_that_drops(
        self, own: Observation, records: list[LayerRecord], equal: Mapping[str, list[bool]]
    ) -> str | None:
        """Return the layer whose own forward drops, where that parts what another is given."""
        dropping = [r.name for r in own.layers.values() if drops_in_forward(r)]
        if not dropping:
            return None
        flow = with_flow(own).flow
        for record in records:
            if flow is None or equal[record.name][0] or record.name not in flow:
                continue
            sources = [name for name in flow.producers(record.name) if name in own.layers]
            around = [name for name in dropping if is_inside(record.name, name)]
            if sources and around and all(name in equal and equal[name][2] for name in sources):
                return max(around, key=len)
        return None

    def _cut(self) -> set[str]:
        """Return the layers of whose parameters this rank holds a part within its group."""
        return {leaf.layer for leaf in self.wrapped.parameters if self._is_cut(leaf.tensor)}

    def _is_cut(self, tensor: Tensor) -> bool:
        if not isinstance(tensor, DTensor):
            return False
        mesh, group = tensor.device_mesh, set(self.place.tensor)
        return any(
            not placement.is_replicate()
            and len(group & set(dist.get_process_group_ranks(mesh.get_group(dimension)))) > 1
            for dimension, placement in enumerate(tensor.placements)
        )

    def found(self, cards: Cards, joint: Observation) -> Iterator[Disagreement]:
        """Yield the first layer that disagrees in any group."""
        groups = sorted({card for card in cards.values() if card is not None}, key=lambda c: c[1])
        if not groups:
            return
        layer = in_order((layer for layer, _ in groups), joint)[0]
        ranks = tuple(sorted({rank for _, among in groups for rank in among}))
        each = " and ".join(named_ranks(among) for name, among in groups[:3] if name == layer)
        yield Disagreement(
            self.name,
            layer,
            "activations",
            "",
            ranks,
            (),
            f"{each}, of one tensor-parallel group, get other values from it for the same inputs",
        )


def numbers_of(own: Observation) -> dict[str, tuple[int, int, int]]:
    """Return numbers of what each layer is given, holds and returns."""
    return {
        r.name: (
            of_statistics(r.inputs),
            combined(of_statistics(held) for held in r.parameters.values()),
            of_statistics(r.activations),
        )
        for r in own.layers.values()
        if r.inputs and r.activations
    }


def _may_be_judged(record: LayerRecord, cut: set[str], size: int) -> bool:
    """Whether a layer holds no shards, and returns no piece of what it is given."""
    assert record.inputs is not None
    assert record.activations is not None
    is_piece = record.activations.count * size == record.inputs.count
    return not is_piece and not any(
        layer == record.name or _is_below(layer, record.name) for layer in cut
    )


def _is_below(layer: str, other: str) -> bool:
    return layer != other and is_inside(layer, other)
