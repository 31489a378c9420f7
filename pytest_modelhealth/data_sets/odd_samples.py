"""Finds samples that hold one value throughout, and those far larger than the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytest_modelhealth.report import Extreme, Label
from pytest_modelhealth.statistics import unseen

_FEWEST_VALUES = 16
_FEWEST = 8
"""Blank samples of a class, or in a batch, that are no chance."""
_FEWEST_SAMPLES = 16
_FAR = 100.0
_FEW = 0.01


class OddSamples:
    """Takes the batches of a run one after the other."""

    def __init__(self) -> None:
        self._largest: dict[int, list[np.ndarray]] = defaultdict(list)  # by tensor of the batch
        self._all, self._blank = Counter[Label | None](), Counter[Label | None]()
        self._first: dict[Label | None, Extreme] = {}
        self._blank_batch: tuple[int, Extreme] | None = None

    def see(self, batch: int, samples: int, given: list[Tensor], target: Any) -> None:
        """See the tensors of a batch, and the class of each sample where the target holds it."""
        are_blank, first = np.ones(samples, dtype=bool), None
        for number, tensor in enumerate(given):
            if tensor.ndim < 2 or len(tensor) != samples or not tensor.numel():
                continue
            if tensor.layout != torch.strided or tensor.is_complex() or tensor.dtype == torch.bool:
                return
            with unseen():
                ends = torch.stack(torch.aminmax(tensor.detach().reshape(samples, -1), dim=1))
                low, high = ends.double().cpu().numpy()
            are_blank &= low == high
            if tensor.is_floating_point():
                self._largest[number].append(np.maximum(abs(low), abs(high)))
                is_enough = tensor.numel() >= _FEWEST_VALUES * samples
                first = low if first is None and is_enough else first
        if first is None:
            return
        for sample, label in enumerate(_classes(target, samples)):
            self._all[label] += 1
            if are_blank[sample]:
                self._blank[label] += 1
                place = Extreme(float(first[sample]), batch, sample)
                self._first.setdefault(label, place)
        if are_blank.all() and samples >= _FEWEST and self._blank_batch is None:
            self._blank_batch = samples, Extreme(float(first[0]), batch, 0)

    def found(self) -> Iterator[tuple[str, tuple[str, Extreme]]]:
        """Yield what stands out by its kind: who it is, in words, and where the first stood."""
        whole = [label for label, n in self._blank.items() if _FEWEST <= n == self._all[label]]
        classes = [label for label in whole if label is not None]
        if classes:
            label, more = classes[0], f" and of {len(classes) - 1} more" * (len(classes) > 1)
            who = f"all {self._blank[label]} samples of class {label}{more}"
            yield "blank", (who, self._first[label])
        elif self._blank_batch is not None:
            samples, place = self._blank_batch
            yield "blank", (f"all {samples} samples of one batch", place)
        for largest in self._largest.values():
            values = np.concatenate(largest)
            usual = float(np.median(values))
            far = np.isfinite(values) & (values > _FAR * usual)
            if len(values) < _FEWEST_SAMPLES or not usual or not far.any():
                continue
            if far.sum() > max(1.0, _FEW * len(values)):
                continue
            worst = int(np.where(far, values, 0.0).argmax())
            batch = int(np.searchsorted(np.cumsum([len(part) for part in largest]), worst, "right"))
            sample = worst - sum(len(part) for part in largest[:batch])
            who = f"{far.sum()} of {len(values)} samples"
            yield "outlier", (who, Extreme(float(values[worst]), batch, sample))
            return


def _classes(target: Any, samples: int) -> Iterable[Label | None]:
    """Return the class of each sample: of a target with a whole number for each."""
    is_one = isinstance(target, Tensor) and target.shape == (samples,)
    if is_one and not target.is_floating_point() and not target.is_complex():
        return target.tolist()  # type: ignore[no-any-return]
    return repeat(None, samples)
