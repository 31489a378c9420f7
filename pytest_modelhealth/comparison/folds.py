"""Which layers the one before them has taken over, by the numbers that it gives.

A fused layer gives what the last of a chain gave: a convolution, batch norm and activation in one.
The chain is what the reference computed one after the other, and what the candidate has no layer
for any more. Of the outputs along it, the candidate's is the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pytest_modelhealth.alignment.result import Alignment, Fold, Pair, Split, Unseen
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.capture.onnx_graphs.operators import is_rounding
from pytest_modelhealth.comparison.measures import gap
from pytest_modelhealth.comparison.trace import Trace
from pytest_modelhealth.report import Status
from pytest_modelhealth.settings.setting import ancestors


def with_folds(alignment: Alignment, a: Trace, b: Trace, store: TensorStore) -> Alignment:
    """Return an alignment that says which layers were taken over by the one before them."""
    chains = _Chains(alignment, a, b, store)
    found: dict[str, Fold] = {}
    for pair in alignment.pairs:
        fold = chains.fold(pair)
        if fold is not None and pair.reference is not None:
            found |= dict.fromkeys((pair.reference, *fold.layers), fold)
    reasons = _out_of_sight(alignment, a, b) | found
    pairs = (replace(p, reason=reasons.get(p.reference or "", p.reason)) for p in alignment.pairs)
    return replace(alignment, pairs=tuple(pairs))


def _out_of_sight(alignment: Alignment, a: Trace, b: Trace) -> dict[str, Fold | Unseen]:
    """Return the functions of the reference that may well run in the candidate, unseen.

    In scripts and compiled code none is seen, inside a transform of `torch.func` each is seen
    once for all samples, and where a value is rounded to few bits, its ends cut off what is
    outside as a ReLU does.
    """
    mapped = {y.kind for y in b.layers.values() if y.status is Status.UNSUPPORTED}
    flow = b.observation.flow
    rounds = flow is not None and any(map(is_rounding, {v.name for v in flow.graph.vertices}))
    return {
        pair.reference: Unseen()
        for pair in alignment.pairs
        if pair.reference is not None
        and pair.candidate is None
        and pair.reason is None
        and (layer := a.layers[pair.reference]).functional
        and (
            not b.shows_functions
            or layer.kind in mapped
            or (rounds and layer.kind in ("relu", "relu6", "hardtanh"))
        )
    }


class _Chains:
    """The chains of layers that one of the candidate may stand for."""

    def __init__(self, alignment: Alignment, a: Trace, b: Trace, store: TensorStore) -> None:
        self._alignment = alignment
        self._a, self._b, self._store = a, b, store
        self._holders = {above for name in a.layers for above in ancestors(name)}
        self._takers: dict[int, list[str]] = {}
        for key, entry in a.entries.items():
            if key.role == "inputs" and key.layer not in self._holders:
                takers = self._takers.setdefault(entry.slot, [])
                if key.layer not in takers:
                    takers.append(key.layer)

    def fold(self, pair: Pair) -> Fold | None:
        """Return what a layer of the candidate has taken over, if that is more than was known."""
        ours, theirs = pair.reference, pair.candidate
        if ours is None or theirs is None or ours in self._holders or pair.is_folded:
            return None
        known = pair.reason.layers if isinstance(pair.reason, Fold) else ()
        if pair.reason is not None and not known:
            return None
        chain = [*known, *self._gone_after(known[-1] if known else ours)]
        choices = [ours, *chain][len(known) :]
        if len(choices) < 2:
            return None
        distances = [self._distance(name, theirs) for name in choices]
        best = distances.index(min(distances))
        return Fold(tuple(chain[: len(known) + best]), theirs) if best else None

    def _gone_after(self, name: str) -> Iterator[str]:
        """Yield the layers of the reference in a row that are not in the candidate."""
        while True:
            outputs = self._a.of_role[name, "activations"]
            takers = {
                taker
                for key in outputs
                for taker in self._takers.get(self._a.entries[key].slot, ())
                if taker != name
            }
            if len(takers) != 1:
                return
            name = takers.pop()
            pair = self._alignment.by_reference[name]
            is_gone = pair.candidate is None or (
                self._b.layers[pair.candidate].is_inert and not self._a.layers[name].is_inert
            )
            if not is_gone or isinstance(pair.reason, Fold | Split):
                return
            yield name

    def _distance(self, ours: str, theirs: str) -> float:
        """Return the squared error of a layer's outputs; infinity where the shapes differ."""
        left = [self._a.entries[key] for key in self._a.of_role[ours, "activations"]]
        right = [self._b.entries[key] for key in self._b.of_role[theirs, "activations"]]
        if not left or [x.shape for x in left] != [y.shape for y in right]:
            return math.inf
        apart = 0.0
        for x, y in zip(left, right, strict=True):
            apart += gap(self._store[x.slot], self._store[y.slot])[0] ** 2
        return apart
