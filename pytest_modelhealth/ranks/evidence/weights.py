"""Parameters and buffers that ought to be equal on several ranks, and are not."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pytest_modelhealth.capture import Request
from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.evidence.fingerprints import fingerprint, of_statistics
from pytest_modelhealth.ranks.evidence.kind import Cards, Kind, alike, in_order, listed
from pytest_modelhealth.ranks.evidence.wrappers import Leaf, Wrapped
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.ranks import Disagreement, named_ranks
from pytest_modelhealth.statistics import UnsupportedTensorError, reduce

Key = tuple[Any, ...]
"""How tensors lie, then which part of them: ranks with the same key hold the same."""


class _Held(NamedTuple):
    """A tensor that another rank may hold, too.

    Args:
        leaf: its names.
        role: ``"parameters"`` or ``"buffers"``.
        bits: its fingerprint.
        before: of a buffer, a number of its statistics before the run; 0 for a parameter.
        in_training: whether its module is in training mode.
    """

    leaf: Leaf
    role: str
    bits: int
    before: int
    in_training: bool


class Weights(Kind):
    """Fingerprints of parameters, and of those buffers that the forward does not write.

    Tensors are compared among the ranks that hold the same part of them: by the key that mesh,
    placements and coordinates make of a DTensor, over the ranks of its wrapper or over all ranks
    for a plain one. What DDP was told to ignore is each rank's own. So are running statistics, and
    buffers of one number: counters, and the number of the rank.
    """

    name = "same_weights"

    def __init__(self, company: Company, wrapped: Wrapped, request: Request) -> None:
        super().__init__(company, wrapped, request)
        self._held: dict[Key, list[_Held]] = {}
        for leaf in wrapped.parameters:
            self._note(leaf, "parameters", 0)
        for leaf in wrapped.buffers:
            if leaf.tensor.numel() > 1 and not _is_running(leaf):
                self._note(leaf, "buffers", _statistics(leaf.tensor))

    def _note(self, leaf: Leaf, role: str, before: int) -> None:
        if id(leaf.tensor) in self.wrapped.ignored or nn.parameter.is_lazy(leaf.tensor):
            return
        key, local = _key(leaf.tensor)
        if not key:
            ranks = self.wrapped.ranks_of(leaf) or self.company.ranks
            key = (zlib.crc32(repr(ranks).encode()),)
        bits = self._fingerprint(local) if role == "parameters" else fingerprint(local)
        self._held.setdefault(key, []).append(_Held(leaf, role, bits, before, leaf.module.training))

    def _fingerprint(self, tensor: torch.Tensor) -> int:
        """Return that of a parameter; in a run over batches anew only where it was written to."""
        kept = self.company.kept
        if kept is None or tensor.is_inference():
            return fingerprint(tensor)
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor._version)
        if place not in kept:
            kept[place] = fingerprint(tensor)
        return kept[place]

    def card(self, own: Observation) -> dict[Key, tuple[int, ...]]:
        """Return the fingerprints of all tensors by key."""
        for key, held in self._held.items():
            self._held[key] = [one for one in held if not _was_written(one, own)]
        return {key: tuple(one.bits for one in held) for key, held in self._held.items()}

    def found(self, cards: Cards, joint: Observation) -> Iterator[Disagreement]:
        """Yield all tensors that differ as one."""
        odd: dict[int, None] = {}
        most: dict[int, None] = {}
        differing: dict[tuple[str, str, str], bool] = {}
        same = {key[0]: held for key, held in self._held.items()}  # other parts, as here
        by_key: dict[Key, dict[int, tuple[int, ...]]] = {}
        for rank, card in cards.items():
            for key, bits in card.items():
                by_key.setdefault(key, {})[rank] = bits
        for key, having in by_key.items():
            first, *others = alike(having)
            if not others:
                continue
            most.update(dict.fromkeys(first))
            for ranks in others:
                odd.update(dict.fromkeys(ranks))
                pairs = zip(same[key[0]], having[first[0]], having[ranks[0]], strict=False)
                for held, one, other in pairs:
                    if one != other:
                        name = (held.leaf.layer, held.role, held.leaf.name)
                        is_sure = held.role == "parameters" or held.in_training
                        differing[name] = is_sure
        if differing:
            yield self._told(differing, sorted(odd), sorted(set(most) - set(odd)), joint)

    def _told(
        self,
        differing: dict[tuple[str, str, str], bool],
        odd: list[int],
        most: list[int],
        joint: Observation,
    ) -> Disagreement:
        layers = in_order((layer for layer, _, _ in differing), joint)
        sure = [one for one, is_sure in differing.items() if is_sure] or list(differing)
        layer, role, name = min(sure, key=lambda one: layers.index(one[0]))
        full = listed(f"{layer}.{name}", len(differing), "tensor")
        than = f" than {named_ranks(most)}" if most else ""
        return Disagreement(
            self.name,
            layer,
            role,
            name,
            tuple(odd),
            tuple(most),
            f"{named_ranks(odd)} {'has' if len(odd) == 1 else 'have'} "
            f"{'other' if most else 'different'} values of {full}{than}",
            float(len(differing)),
            layers,
            any(differing.values()),
        )


def _key(tensor: torch.Tensor) -> tuple[Key, torch.Tensor]:
    """Return what tells whether two ranks hold the same part, nothing where all is whole, and that
    part.
    """
    if not isinstance(tensor, DTensor):
        return (), tensor
    mesh = tensor.device_mesh
    here = mesh.get_coordinate() or ()
    parts = tuple(
        at
        for at, placement in zip(here, tensor.placements, strict=False)
        if not placement.is_replicate()
    )
    lies = f"{mesh.mesh.flatten().tolist()} {mesh.mesh.shape} {tensor.placements}"
    local = tensor.to_local()
    return (zlib.crc32(lies.encode()), parts), getattr(local, "elem", local)


def _is_running(leaf: Leaf) -> bool:
    """Whether a norm of torch's keeps it as its mean or variance over batches."""
    norms = (nn.modules.batchnorm._NormBase,)
    return isinstance(leaf.module, norms) and leaf.name in ("running_mean", "running_var")


def _statistics(tensor: torch.Tensor) -> int:
    try:
        return of_statistics(reduce(tensor))
    except UnsupportedTensorError:
        return 0


def _was_written(held: _Held, own: Observation) -> bool:
    """Whether the forward wrote to a buffer, or may have done so unseen."""
    if held.role == "parameters":
        return False
    record = own.layers.get(held.leaf.layer)
    after = None if record is None else record.buffers.get(held.leaf.name)
    return after is None or of_statistics(after) != held.before
