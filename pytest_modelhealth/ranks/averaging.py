"""Gradients of parameters, averaged over the ranks that share a batch out, once a step is over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.layer import Held
from pytest_modelhealth.ranks.company import Company

BUCKET = 2**22
"""The most elements that are added up at once: what an average takes beside the gradients."""

_Name = tuple[str, str, int, str]


class Averager:
    """Gives gradients as a step of the user's training would leave them on each rank.

    They are changed in place: a local backward pass made them, for the inspection alone. A
    parameter that a rank did not use counts as zeros there, where another rank used it.

    Args:
        company: the ranks.
    """

    def __init__(self, company: Company) -> None:
        self._company = company

    def __call__(self, gradients: list[Held]) -> list[Held]:
        """Return the averaged gradients.

        Raises:
            InspectionError: a rank failed or did not come this far.
        """
        self._company.meeting.agree("its gradients are averaged", "")
        with torch.no_grad():
            whole = [(layer, name, self._reduced(tensor)) for layer, name, tensor in gradients]
            self._average([held for held in whole if not _is_spread(held[2])])
        return whole

    def _reduced(self, gradient: Tensor) -> Tensor:
        """Return a gradient of which ranks hold parts of a sum, added up; any other as it is."""
        if not _is_spread(gradient):
            return gradient
        spread: Any = gradient
        partial = [p for p in spread.placements if p.is_partial()]
        if not partial:
            return gradient
        from torch.distributed.tensor import DTensor, Replicate

        among = self._company.place.tensor
        local = spread.to_local()
        total = self._company.total(_wide(local).reshape(-1), among).reshape(local.shape)
        if all(getattr(p, "reduce_op", "sum") == "avg" for p in partial):
            total /= len(among)
        whole = [Replicate() if p.is_partial() else p for p in spread.placements]
        return DTensor.from_local(
            total.to(local.device, local.dtype),
            spread.device_mesh,
            whole,
            run_check=False,
            shape=spread.shape,
            stride=spread.stride(),
        )

    def _average(self, held: list[Held]) -> None:
        ranks = self._company.place.data
        if len(ranks) == 1:
            return
        own = {_name(layer.name, name, tensor): tensor for layer, name, tensor in held}
        names = list(own)
        union: dict[_Name, None] = {}
        for some in self._company.gather(names, ranks):
            union.update(dict.fromkeys(some))
        for bucket in _buckets(union):
            self._add_up(bucket, own, ranks)

    def _add_up(
        self, bucket: list[_Name], own: Mapping[_Name, Tensor], ranks: tuple[int, ...]
    ) -> None:
        """Average one bucket, all of one dtype."""
        pieces = [
            _wide(own[name]).reshape(-1)
            if name in own
            else torch.zeros(name[2], dtype=_wide_of(name[3]))
            for name in bucket
        ]
        total = self._company.total(torch.cat([piece.cpu() for piece in pieces]), ranks)
        total /= len(ranks)
        for name, mean in zip(bucket, total.split([name[2] for name in bucket]), strict=True):
            if name in own:
                own[name].copy_(mean.reshape(own[name].shape))


def _name(layer: str, own: str, tensor: Tensor) -> _Name:
    return layer, own, tensor.numel(), str(tensor.dtype).removeprefix("torch.")


def _is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is a `DTensor`: its engine has averaged it over the ranks that share."""
    return hasattr(tensor, "device_mesh")


def _wide(tensor: Tensor) -> Tensor:
    """Return a gradient in a dtype that sums of many ranks do not overflow."""
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return dense.to(_wide_of(str(tensor.dtype).removeprefix("torch.")))


def _wide_of(dtype: str) -> torch.dtype:
    own: torch.dtype = getattr(torch, dtype)
    return torch.float32 if own.itemsize < 4 else own


def _buckets(names: Mapping[_Name, None]) -> Iterator[list[_Name]]:
    """Yield names in runs of one dtype that are no longer than a bucket, or one tensor each."""
    for dtype in dict.fromkeys(name[3] for name in names):
        bucket: list[_Name] = []
        size = 0
        for name in names:
            if name[3] != dtype:
                continue
            if bucket and size + name[2] > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += name[2]
        yield bucket
