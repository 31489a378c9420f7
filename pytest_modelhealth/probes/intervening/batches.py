"""The batch that probes change, as a rule a few samples of what was inspected; where they lie."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.probes.conventions import Conventions, NotApplicableError, UntellableError

SEED = 20_240_229
"""Of what probes draw themselves."""

_FEW = (7, 5, 11, 13, 3)
"""How many samples show what samples see of each other, the usual number first: primes, of which
few sizes are a multiple."""
_FEWEST = 4

Values = Callable[[int, Tensor], Tensor | None]
"""Makes other values, of any size, of the number of a tensor in the batch and the tensor."""


class Samples(NamedTuple):
    """Where the samples of a batch lie."""

    number: int
    axes: tuple[int | None, ...]  # in each of `Batch.tensors`; ``None``: no row for each

    @classmethod
    def along(cls, batch: Batch, axis: int) -> Samples:
        """Return those along a dimension, as many as the first tensor that has it tells."""
        count = next((t.shape[axis] for t in batch.tensors if t.ndim > axis), 0)
        has = (t.ndim > axis and t.shape[axis] == count for t in batch.tensors)
        return cls(count, tuple(axis if one else None for one in has))

    def is_common(self, batch: Batch) -> bool:
        """Whether every tensor with dimensions has them."""
        return not any(a is None and t.ndim for t, a in zip(batch.tensors, self.axes, strict=True))

    def select(self, index: Tensor) -> Values:
        """Return the change to the samples of an index, in all tensors that have some at once."""

        def values(number: int, tensor: Tensor) -> Tensor | None:
            axis = self.axes[number]
            return None if axis is None else tensor.index_select(axis, index.to(tensor.device))

        return values


@dataclass(eq=False)
class Batch:
    """What a model is given, and what is known of it."""

    inputs: Inputs
    target: Any
    conventions: Conventions

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors in it that can have other values, in order."""
        return changeable((self.inputs.args, self.inputs.kwargs))

    @cached_property
    def has_others(self) -> bool:
        """Whether it holds tensors that are not changed: sparse or nested ones, say."""
        return len(find_tensors((self.inputs.args, self.inputs.kwargs))) > len(self.tensors)

    def copy(self, *changes: Values) -> Inputs:
        """Return a copy, in which tensors have other values, by one change after the other."""
        args, kwargs = copied((self.inputs.args, self.inputs.kwargs), *changes)
        return Inputs(*args, **kwargs)

    def is_changed(self, change: Values) -> bool:
        """Whether a change gives it other values."""
        pairs = ((change(n, tensor.detach()), tensor) for n, tensor in enumerate(self.tensors))
        return any(after is not None and not torch.equal(after, t) for after, t in pairs)

    @cached_property
    def samples(self) -> Samples:
        """Where the samples lie: in the first dimension that all tensors have in common."""
        asked, tensors = self.conventions.batch_dim, [t for t in self.tensors if t.ndim]
        if self.has_others:
            raise NotApplicableError(
                "the batch holds a tensor that is sparse, nested or quantized; give dense ones"
            )
        samples = Samples.along(self, asked or 0)
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors[:4])
        if not samples.number:
            raise NotApplicableError(
                f"dimension {asked or 0} of the batch ({shapes}) holds no sample"
            )
        if asked is None and not samples.is_common(self):
            raise NotApplicableError(
                f"the tensors of the batch have no first dimension in common ({shapes}), so that "
                "it is not known which is that of samples; say it by batch_dim="
            )
        if asked is None and any(map(_numbers_groups, tensors)):
            raise NotApplicableError(
                "a vector of the batch numbers groups of its rows, as the graph of each node; if "
                "each row is a sample, say batch_dim=0"
            )
        if samples.number < 2:
            raise NotApplicableError("the batch has one sample; give two or more")
        pairs = [(t, a) for t, a in zip(self.tensors, samples.axes, strict=True) if a is not None]
        others = range(1, samples.number)  # nearly always the next one differs
        if all(torch.equal(t.select(a, 0), t.select(a, n)) for t, a in pairs for n in others):
            raise NotApplicableError("all samples of the batch are equal; give samples that differ")
        return samples

    @property
    def ordered_samples(self) -> Samples:
        """The samples, if their order should not matter."""
        samples = self.samples
        if any(t.shape[:2] == (samples.number,) * 2 for t in self.tensors):
            raise NotApplicableError(f"the batch holds pairs of its {samples.number} rows")
        return samples

    def few(self, sizes: Iterable[int]) -> Batch:
        """Return a few samples, so many that sizes tell their dimension; itself where none can go.

        They are spread over the batch, the shortest and the longest among them.

        Args:
            sizes: what else dimensions of the model are long.
        """
        try:
            samples = self.samples
        except UntellableError:
            return self
        axis, count = self.conventions.batch_dim or 0, samples.number
        given = [*self.tensors, *find_tensors(self.target)]
        others = {*sizes, *(n for t in given for a, n in enumerate(t.shape) if a != axis)}
        fitting = (n for n in _FEW if n <= count and all(math.gcd(n, o) == 1 for o in others))
        number = next(fitting, count)
        if number == count:
            return self
        lengths = torch.zeros(count)
        padding = () if self.conventions.padding is None else (self.conventions.padding,)
        for tensor in (*padding, *self.tensors):
            if tensor.shape[:1] == (count,) and (tensor.ndim == 1 or is_mask(tensor)):
                lengths += tensor.detach().cpu().float().reshape(count, -1).sum(1)
        spread = torch.arange(number) * (count - 1) // (number - 1)
        index = lengths.argsort(stable=True)[spread].sort().values

        def rows(_: int, tensor: Tensor) -> Tensor | None:
            at = next((a for a in (axis, 0) if tensor.shape[a : a + 1] == (count,)), None)
            return None if at is None else tensor.index_select(at, index.to(tensor.device))

        try:
            few = self.cut(samples.select(index), rows)
            _ = few.samples
            return few
        except Exception:  # noqa: BLE001 - they are alike, or a target cannot be copied
            return self

    def cut(self, inputs: Values, others: Values) -> Batch:
        """Return it with other values, which are smaller, and those of its target and padding."""
        padding = copied(self.conventions.padding, others)
        conventions = self.conventions._replace(padding=padding)
        return Batch(self.copy(inputs), copied(self.target, others), conventions)


def is_number(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers that may be far apart or near."""
    return tensor.is_floating_point() or tensor.is_complex()


def _numbers_groups(tensor: Tensor) -> bool:
    """Whether it is a vector of whole numbers that ascend from 0, some of which come again."""
    if tensor.ndim != 1 or len(tensor) < _FEWEST or is_number(tensor) or tensor.dtype is torch.bool:
        return False
    return int(tensor[0]) == 0 and set(tensor.diff().tolist()) == {0, 1}


def is_mask(tensor: Tensor) -> bool:
    """Whether a tensor says of ``(samples, steps)`` yes or no, with one change a row at most."""
    if tensor.ndim != 2 or tensor.is_complex() or min(tensor.shape) < 2:
        return False
    if not bool(((tensor == 0) | (tensor == 1)).all()):
        return False
    changes = tensor.bool().diff(dim=1).sum(dim=1)
    return bool((changes <= 1).all() and (changes == 1).any())


def permutation(count: int) -> Tensor:
    """Return another order of so many, always the same."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
    return order.roll(1) if torch.equal(order, torch.arange(count)) else order


def changeable(value: Any) -> list[Tensor]:
    """Return the tensors in arguments or a target that can have other values, in order."""
    return [tensor for tensor in find_tensors(value) if _is_plain(tensor)]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def copied(value: Any, *changes: Values) -> Any:
    """Return a deep copy, in which tensors have other values, by one change after the other.

    Raises:
        Exception: whatever an object of the user's raises where it is copied.
    """
    copies, number = dict[int, Tensor](), 0
    for tensor in find_tensors(value):
        now, is_plain = tensor.detach(), _is_plain(tensor)
        for change in changes if is_plain else ():
            other = change(number, now)
            now = now if other is None else other
        number += is_plain
        # of sparse and nested ones torch makes no deep copy
        is_same = not is_plain or now.data_ptr() == tensor.data_ptr()
        copies[id(tensor)] = (now.clone() if is_same else now).requires_grad_(tensor.requires_grad)
    return copy.deepcopy(value, copies)


def names_of(batch: Batch, model: Any) -> list[str]:
    """Return what people call the tensors of the batch, in the order of `Batch.tensors`."""
    given, names = batch.inputs, list[str]()
    forward = vars(model).get("forward")  # looked up in a script, it would be kept there
    with suppress(TypeError, ValueError):
        declared = inspect.signature(forward or partial(type(model).forward, None))
        names = [p.name for p in declared.parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    names += map(str, range(len(names), len(given.args)))
    known: dict[int, str] = {}
    for name, value in [*zip(names, given.args, strict=False), *given.kwargs.items()]:
        for tensor, path in _paths(value, name):
            known.setdefault(id(tensor), path)
    return [known.get(id(tensor), str(n)) for n, tensor in enumerate(batch.tensors)]


def _paths(value: Any, name: str) -> Iterator[tuple[Tensor, str]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _paths(part, f"{name}[{key!r}]")
        return
    tensors = find_tensors(value)
    for n, tensor in enumerate(tensors):
        yield tensor, name if len(tensors) == 1 else f"{name}[{n}]"
